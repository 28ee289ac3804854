#!/usr/bin/env bash
# See a real model fail beyond its trained length, and work again with YaRN, in at most eight minutes on two CPU cores.
# Options are passed on: `bash scripts/quickstart.sh --minutes 30` tries more passkeys.
set -euo pipefail
started="$(date +%s)"
. "$(dirname "$0")/setup.sh"
ensure_environment gguf,plot
exec "$VENV/bin/python" scripts/quickstart.py --started "$started" "$@"
