#!/usr/bin/env bash
# Lint, types and tests, the patching tests on the oldest and the newest supported Transformers.
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
"$VENV/bin/python" -m pytest -m "not slow"
