#!/usr/bin/env bash
# trace-check, trace-study and trace-study train on NVIDIA GPUs, inside vLLM: the paper's tables 1 and 2 and figure 3.
#
#   MODEL=... ADAPTER=... DATA=... bash examples/measure/studies_gpu.sh FOLDER STEP[+STEP...]...
#
# Steps, each into FOLDER/STEP; those joined by + run side by side. Studies go on where a folder has rows, trainings are
# not run again where there is an adapter.
#
#   check-own    trace-check on vLLM's own shrink; exit code 1 is expected
#   check-fixed  the same stack with deterministic:8; exit code 0 is expected
#   claims       the labelled set (no GPU)
#   train-16, train-32      adapters for GSM8K, rank 16 and 32
#   train-claims            an adapter for the labelled set, rank 16
#   repeat       table 1: 50 GSM8K prompts × 10, at most 150 tokens, with ADAPTER
#   repeat-16, repeat-32    the same with the adapters trained here
#   decide       table 2: 500 claims × 10, with ADAPTER
#   decide-claims           the same with the adapter trained here
#   replay       figure 3: shrinks of 10 prompts × 5 executions, captured in vLLM, with ADAPTER
#   replay-transformers     the same, captured in transformers
#
# repeat and decide run as vLLM serves: an engine per reduction (vllm-own, atomic:8, unsplit, deterministic:8) in a
# process of its own, CUDA graphs, one request at a time, engines dealt to the GPUs in turn.
#
# Seconds on two H200, estimated from shorter runs there: engines start in 60 to 120 s, a token takes 5 ms and up to 7
# where eight engines work, a decision 20 ms:
#
#   claims+train-32                            320 (BATCH=64: 190)
#   claims+train-claims                        240
#   repeat+replay+replay-transformers          420 (the replays 90)
#   repeat-32+decide-claims                    480
#   repeat+repeat-32+decide-claims+replay      600: twice with MINUTES=7 where a command may take ten minutes
#
# With MINUTES=0 nothing runs and nothing of vLLM or a GPU is needed: the reports are written from the rows that are
# there, on any machine that has the same DATA and claims.
#
# Settings: MODEL, ADAPTER; DATA, a folder with GSM8K's train.jsonl and test.jsonl; PYTHON; PROMPTS, REPETITIONS,
# TOKENS, DECISIONS, REDUCTIONS, for more or less; MINUTES, after which a study begins no more work; STEPS, at most, and
# BATCH, of each training; ADAPTER_16, ADAPTER_32 and ADAPTER_CLAIMS where they were trained elsewhere, CLAIMS, a test.csv;
# STEPPED and SERVED, the options of engines in this process and of their own; SCRATCH for their logs and caches. Exit
# code 1 if a step's was not the expected one.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
PYTHON="${PYTHON:-python3}"
folder="${1:?a folder}"
shift
export PYTHONPATH="tracer:interventions:kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_LOGGING_LEVEL="${VLLM_LOGGING_LEVEL:-ERROR}" VLLM_NO_USAGE_STATS=1
read -r -a stepped <<<"${STEPPED:---engine vllm --attention TRITON_ATTN --vllm-argument gpu_memory_utilization=0.2}"
read -r -a served <<<"${SERVED:---engine vllm --attention TRITON_ATTN --mode graphs --cache-gib 1 --max-model-len 2048 \
--max-num-batched-tokens 2048 --start-seconds 400}"
mkdir -p "$folder" || exit 2
# Bounds need scipy; without the others rows are kept, and the same command writes the report where they are installed.
for module in scipy pyarrow matplotlib plotly; do
    "$PYTHON" -c "import $module" 2>/dev/null || echo "warning: $PYTHON has no $module" >&2
done

# step NAME EXPECTED COMMAND...: runs it, keeps its output, shows the end of it, and fails if the exit code is another.
step() {
    local what="$1" expected="$2" start=$SECONDS status
    shift 2
    "$PYTHON" -m "$@" >"$folder/$what.out" 2>&1
    status=$?
    tail -n 30 "$folder/$what.out"
    printf '== %s: exit code %d (expected %d) after %d s\n' "$what" "$status" "$expected" "$((SECONDS - start))"
    [ "$status" = "$expected" ]
}

study() {
    step "$1" 0 fliptrace.command_line.trace_study "${@:2}" --model "${MODEL:?}" --out "$folder/$1" --quiet \
        --budget-minutes "${MINUTES:-8.5}"
}
read -r -a names <<<"${REDUCTIONS:-vllm-own atomic:8 unsplit deterministic:8}"
reductions=()
for name in "${names[@]}"; do reductions+=(--reduction "$name"); done
repetitions=(--repetitions "${REPETITIONS:-10}")
claim="Is the claimed answer right?"
last=(--max-steps "${STEPS:-100000}" --batch "${BATCH:-32}")

# repeat NAME ADAPTER
repeat() {
    study "$1" repeat "${served[@]}" --scratch "${SCRATCH:-/tmp/fliptrace-studies}/$1" --adapter "$2" \
        --task "gsm8k:${DATA:?}/test.jsonl" --prompts "${PROMPTS:-50}" --max-new-tokens "${TOKENS:-150}" \
        "${repetitions[@]}" "${reductions[@]}"
}

# decide NAME ADAPTER
decide() {
    study "$1" decide "${served[@]}" --scratch "${SCRATCH:-/tmp/fliptrace-studies}/$1" --adapter "$2" \
        --csv "${CLAIMS:-$folder/claims/test.csv}" --question "$claim" --prompts "${DECISIONS:-500}" \
        "${repetitions[@]}" "${reductions[@]}"
}

# train NAME ARGUMENT...
train() {
    if [ -e "$folder/$1/adapter_model.safetensors" ]; then
        echo "== $1: is there"
        return
    fi
    step "$1" 0 fliptrace.command_line.trace_study train --model "${MODEL:?}" "${@:2}" "${last[@]}" \
        --out "$folder/$1" --quiet
}

check() {
    step "$1" "$2" fliptrace.command_line.trace_check "${stepped[@]}" --model "${MODEL:?}" --adapter "${ADAPTER:?}" \
        --seconds 60 --quiet "${@:3}"
}

run() {
    case "${MINUTES:-}$1" in
    0check-* | 0train-*)
        echo "== $1: not run"
        return
        ;;
    esac
    local trained_16="${ADAPTER_16:-$folder/train-16}" trained_32="${ADAPTER_32:-$folder/train-32}"
    case "$1" in
    check-own) check "$1" 1 ;;
    check-fixed) check "$1" 0 --reduction deterministic:8 --save "$folder/golden.json" ;;
    repeat) repeat "$1" "${ADAPTER:?}" ;;
    repeat-16) repeat "$1" "$trained_16" ;;
    repeat-32) repeat "$1" "$trained_32" ;;
    decide) decide "$1" "${ADAPTER:?}" ;;
    decide-claims) decide "$1" "${ADAPTER_CLAIMS:-$folder/train-claims}" ;;
    replay | replay-transformers)
        local engine=("${stepped[@]}")
        [ "$1" = replay ] || engine=(--engine transformers)
        study "$1" replay "${engine[@]}" --adapter "${ADAPTER:?}" --task "gsm8k:${DATA:?}/test.jsonl" \
            --prompts "$(((${PROMPTS:-50} + 4) / 5))"
        ;;
    claims)
        [ -e "$folder/claims/test.csv" ] \
            || "$PYTHON" examples/train_bundled_model/labelled_set.py --rows 6000 --test-rows 500 --out "$folder/claims"
        ;;
    train-16 | train-32) train "$1" --task "gsm8k:${DATA:?}/train.jsonl" --rank "${1#train-}" ;;
    train-claims)
        train "$1" --task "csv:$folder/claims/train.csv" --question "$claim" --validation-rows 500
        ;;
    *)
        echo "no step $1" >&2
        return 2
        ;;
    esac
}

failed=()
for together in "$@"; do
    IFS=+ read -r -a several <<<"$together"
    running=()
    for name in "${several[@]}"; do
        run "$name" &
        running+=("$!")
    done
    for number in "${!several[@]}"; do
        wait "${running[$number]}" || failed+=("${several[$number]}")
    done
done
if [ "${#failed[@]}" != 0 ]; then
    echo "not as expected: ${failed[*]}; see $folder"
    exit 1
fi
echo "done: $folder"
