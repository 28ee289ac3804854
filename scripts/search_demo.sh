#!/usr/bin/env bash
# A search that fits into half an hour on two CPU cores: YaRN's settings for SmolLM2-135M at 16,384 tokens, and whether
# the best of them beat the defaults on other documents. Can be interrupted, and goes on where it stopped.
#   bash scripts/search_demo.sh [options of ctxext search, e.g. --minutes 60 or --dry-run]
set -euo pipefail
. "$(dirname "$0")/setup.sh"
ensure_environment gguf,plot,search
exec "$VENV/bin/python" -m ctxext search --config configs/search/smollm2-16k.yaml --output results/search --resume "$@"
