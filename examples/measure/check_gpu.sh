#!/usr/bin/env bash
# Repeats the whole check of the shrinks on this machine's GPU and adds its column to the table of GPUs:
# bit equality, stress, memcheck, replay of real inputs, bench. Without compute-sanitizer the memcheck fails.
#
#   bash examples/measure/check_gpu.sh [FOLDER]
#
# FOLDER (default examples/measure/results/gpus) gets a folder named after the GPU, with every row and log,
# and gpus.md with one column per GPU. Run it again to go on where a bench was cut short. It takes ten to fifteen
# minutes on an NVIDIA H200 (estimated), half of it the bench. Exit code 1 if any step failed; the others run all
# the same.
#
# Settings: PYTHON; LAUNCHES of the stress (default 1000000); BENCH, more arguments for the bench, such as
# "--seconds 200"; REPLAY, more arguments for the replay, such as "--model M --adapter A".
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
PYTHON="${PYTHON:-python3}"
folder="${1:-examples/measure/results/gpus}"
export PYTHONPATH="tracer:interventions:kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

name="$("$PYTHON" -c 'import torch; print("-".join(torch.cuda.get_device_name().split()))' 2>/dev/null)"
if [ -z "$name" ]; then
    echo "error: this needs a CUDA device and a CUDA build of torch; $PYTHON sees none" >&2
    exit 2
fi
here="$folder/$name"
mkdir -p "$here" || exit 2
failed=()

# step NAME COMMAND...: runs it, keeps its output in NAME.out (steps write logs of their own), and shows the end of it.
step() {
    local what="$1" start=$SECONDS status
    shift
    "$@" >"$here/$what.out" 2>&1
    status=$?
    tail -n 25 "$here/$what.out"
    printf '== %s: exit code %d after %d s\n' "$what" "$status" "$((SECONDS - start))"
    if [ "$status" != 0 ]; then failed+=("$what"); fi
}

read -r -a more_replay <<<"${REPLAY:-}"
read -r -a more_bench <<<"${BENCH:-}"
step tests "$PYTHON" -m pytest -q -rP tests/gpu tests/bench/test_bench_on_gpu.py \
    -k "not small_stress"
step equality "$PYTHON" -m fliptrace_kernels.bench equality --folder "$here"
step stress "$PYTHON" examples/measure/shrink_stress.py --folder "$here" --launches "${LAUNCHES:-1000000}"
step memcheck "$PYTHON" examples/measure/shrink_memcheck.py --folder "$here"
step replay "$PYTHON" examples/measure/shrink_replay.py --folder "$here" "${more_replay[@]}"
step bench "$PYTHON" -m fliptrace_kernels.bench measure --folder "$here" "${more_bench[@]}"
step columns "$PYTHON" -m fliptrace_kernels.bench columns --folder "$folder"
if [ "${#failed[@]}" != 0 ]; then
    echo "failed on $name: ${failed[*]}; see $here"
    exit 1
fi
echo "done on $name: $folder/gpus.md"
