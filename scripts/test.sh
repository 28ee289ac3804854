#!/usr/bin/env bash
# Lint, types and tests; then the tests of patching, configuration and the command line with every dependency at its
# lowest supported version, Transformers among them.
#   bash scripts/test.sh               all but the slow tests
#   bash scripts/test.sh -m slow       the slow ones
#   bash scripts/test.sh tests/test_patching.py -k yarn
set -euo pipefail
. "$(dirname "$0")/setup.sh"
ensure_environment dev
if [ $# -gt 0 ]; then
    exec "$VENV/bin/python" -m pytest "$@"
fi
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
"$VENV/bin/mypy"
"$VENV/bin/python" -m pytest -m "not slow" -n 2

ensure_oldest
echo "again with the lowest supported versions" >&2
"$VENV/oldest/bin/python" -m pytest -m "not slow" -n 2 \
    tests/test_{rope,methods,families,patching,saving,user_methods,precision,running,inspection,config,cli,compare}.py \
    tests/test_{partition,attention,caches,gradients,attention_inputs,streaming,clex,blocks,loss,training,adapters}.py
