#!/usr/bin/env bash
# The README's comparison of methods on SmolLM2-135M: perplexity, passkey retrieval, one table, one picture.
# Takes hours on two CPU cores, minutes on a GPU; results that are there already are kept, so it can be interrupted.
#   bash scripts/reproduce.sh [--help]
set -euo pipefail
. "$(dirname "$0")/setup.sh"
ensure_environment gguf,plot
exec "$VENV/bin/python" scripts/reproduce.py "$@"
