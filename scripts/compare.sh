#!/usr/bin/env bash
# Seven methods on SmolLM2-135M, side by side: tables, pictures and one HTML page in results/compare.
# Takes hours on two CPU cores, minutes on a GPU; can be interrupted, and goes on where it stopped.
#   bash scripts/compare.sh [options of ctxext eval compare, e.g. --limit 1 or --dry-run]
set -euo pipefail
. "$(dirname "$0")/setup.sh"
ensure_environment gguf,plot
exec "$VENV/bin/python" -m ctxext eval compare --config configs/compare.yaml --output results/compare --resume "$@"
