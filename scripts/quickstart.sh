#!/usr/bin/env bash
# See a real model fail beyond its trained length, and work again with YaRN. About six minutes on two CPU cores.
# Options are passed on, e.g. `bash scripts/quickstart.sh --output results`.
set -euo pipefail
. "$(dirname "$0")/setup.sh"
ensure_environment gguf,plot
exec "$VENV/bin/python" scripts/quickstart.py "$@"
