#!/usr/bin/env bash
# Make .venv ready for `make demo`, `make test` and `make check`; does nothing if it is already.
#
# PYTHON=/path/to/python picks the interpreter (3.11 to 3.13); TORCH_BUILD=cuda or cpu overrides
# the choice of torch build. Package sources are pip's own business (PIP_INDEX_URL and the like).
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
stamp="$venv/.headrace-setup"

log() { printf 'setup: %s\n' "$*" >&2; }

usable() { # A Python we support that can make environments (a pyenv shim may be an empty promise).
    "$1" - >/dev/null 2>&1 <<'PY'
import ensurepip, sys, venv
raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PY
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3 python; do
        if usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    log "no Python 3.11, 3.12 or 3.13 with venv found; install one or set PYTHON=/path/to/it"
    exit 1
}

build="${TORCH_BUILD:-}"
if [ -z "$build" ]; then
    if nvidia-smi -L >/dev/null 2>&1; then build=cuda; else build=cpu; fi
fi

if [ -x "$venv/bin/python" ] && ! usable "$venv/bin/python"; then
    log "$venv has no usable Python 3.11 to 3.13; making it again"
    rm -rf "$venv"
fi

# The stamp names what was installed and from where; a moved checkout has stale paths in .venv/bin.
fingerprint="$(cat pyproject.toml constraints-cpu.txt tools/setup.sh | cksum) $build $PWD"
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$fingerprint" ]; then
    exit 0
fi

if [ ! -x "$venv/bin/python" ]; then
    python="$(find_python)"
    log "creating $venv with $("$python" --version 2>&1)"
    "$python" -m venv "$venv"
fi

# The pip that comes with Python may be years old, and takes twice as long to find the packages.
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --upgrade pip

# Bytecode is made when a module is first imported: most of what is installed never is.
pip=("$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-compile)
if [ "$build" = cpu ]; then
    # torch first and exact: a range asked for together with the rest resolves to a CUDA build.
    log "installing torch ($(grep -o 'torch==.*' constraints-cpu.txt), CPU); then the package"
    "${pip[@]}" -r constraints-cpu.txt
    "${pip[@]}" -c constraints-cpu.txt -e '.[test,dev]'
else
    log "installing the package with torch for CUDA"
    "${pip[@]}" -e '.[test,dev]'
fi

printf '%s' "$fingerprint" >"$stamp"
log "ready: $("$venv/bin/python" --version), torch $("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')"
