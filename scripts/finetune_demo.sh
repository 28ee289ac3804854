#!/usr/bin/env bash
# A short fine-tune that changes a real number: Position Interpolation and YaRN on SmolLM2-135M, before and after a few
# PoSE steps on the standard library's sources, measured on its documentation. At most 25 minutes on two CPU cores.
#   bash scripts/finetune_demo.sh
set -euo pipefail
. "$(dirname "$0")/setup.sh"
ensure_environment gguf,plot
exec "$VENV/bin/python" scripts/finetune_demo.py "$@"
