#!/usr/bin/env bash
# First passes of trace-check, trace-study and trace-study train on this machine's GPU, inside vLLM.
#
#   MODEL=... ADAPTER=... DATA=... bash examples/measure/studies_gpu.sh FOLDER STEP...
#
# Steps, each into FOLDER/STEP (studies go on where a folder has rows already):
#
#   check-own    trace-check on vLLM's own shrink; exit code 1 is expected
#   check-fixed  the same stack with deterministic:8; exit code 0 is expected
#   repeat       20 GSM8K prompts × 4 under vllm-own and deterministic:8
#   replay       shrinks of 10 prompts × 5 executions
#   decide       100 claims × 4 under vllm-own, unsplit and deterministic:8
#   claims       the labelled set (no GPU)
#   train-16, train-32      adapters for GSM8K, rank 16 and 32
#   train-claims            an adapter for the labelled set, rank 16
#   decide-claims           decide with that adapter
#   repeat-16, repeat-32    repeat with the new adapters
#
# Settings: MODEL, ADAPTER; DATA, a folder with GSM8K's train.jsonl and test.jsonl; PYTHON; PROMPTS, REPETITIONS,
# TOKENS, MINUTES (of each study), STEPS (of each training, at most), ENGINE, for more or less. Exit code 1 if a step's
# was not the expected one.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
PYTHON="${PYTHON:-python3}"
folder="${1:?a folder}"
shift
export PYTHONPATH="tracer:interventions:kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_LOGGING_LEVEL="${VLLM_LOGGING_LEVEL:-ERROR}" VLLM_NO_USAGE_STATS=1
read -r -a engine <<<"${ENGINE:---engine vllm --attention TRITON_ATTN --vllm-argument gpu_memory_utilization=0.2}"
mkdir -p "$folder" || exit 2
failed=()
# Bounds need scipy; without the others rows are kept, and the same command writes the report where they are installed.
for module in scipy pyarrow matplotlib plotly; do
    "$PYTHON" -c "import $module" 2>/dev/null || echo "warning: $PYTHON has no $module" >&2
done

# step NAME EXPECTED COMMAND...: runs it, keeps its output, shows the end of it.
step() {
    local what="$1" expected="$2" start=$SECONDS status
    shift 2
    "$PYTHON" -m "$@" >"$folder/$what.out" 2>&1
    status=$?
    tail -n 30 "$folder/$what.out"
    printf '== %s: exit code %d (expected %d) after %d s\n' "$what" "$status" "$expected" "$((SECONDS - start))"
    if [ "$status" != "$expected" ]; then failed+=("$what"); fi
}

study() { step "$1" 0 fliptrace.command_line.trace_study "${@:2}" --out "$folder/$1" --quiet; }
stack=("${engine[@]}" --model "${MODEL:?}")
own=(--adapter "${ADAPTER:?}")
minutes=(--budget-minutes "${MINUTES:-8}")
length=(--max-new-tokens "${TOKENS:-160}" --repetitions "${REPETITIONS:-4}")
both=(--reduction vllm-own --reduction deterministic:8)
claim="Is the claimed answer right?"
last=(--max-steps "${STEPS:-100000}")

for name in "$@"; do
    prompts=(--prompts "${PROMPTS:-20}")
    case "$name" in
    check-own) step "$name" 1 fliptrace.command_line.trace_check "${stack[@]}" "${own[@]}" --seconds 60 --quiet ;;
    check-fixed)
        step "$name" 0 fliptrace.command_line.trace_check "${stack[@]}" "${own[@]}" --seconds 60 --quiet \
            --reduction deterministic:8 --save "$folder/golden.json"
        ;;
    repeat)
        study "$name" repeat "${stack[@]}" "${own[@]}" --task "gsm8k:${DATA:?}/test.jsonl" "${prompts[@]}" \
            "${length[@]}" "${both[@]}" "${minutes[@]}"
        ;;
    repeat-16 | repeat-32)
        study "$name" repeat "${stack[@]}" --adapter "$folder/train-${name#repeat-}" \
            --task "gsm8k:${DATA:?}/test.jsonl" "${prompts[@]}" "${length[@]}" "${both[@]}" "${minutes[@]}"
        ;;
    replay)
        study "$name" replay "${stack[@]}" "${own[@]}" --task "gsm8k:${DATA:?}/test.jsonl" \
            --prompts "$(((${PROMPTS:-20} + 1) / 2))" "${minutes[@]}"
        ;;
    claims)
        "$PYTHON" examples/train_bundled_model/labelled_set.py --rows 6000 --test-rows 500 --out "$folder/claims" \
            || failed+=("$name")
        ;;
    decide | decide-claims)
        [ "$name" = decide ] || own=(--adapter "$folder/train-claims")
        study "$name" decide "${stack[@]}" "${own[@]}" --csv "$folder/claims/test.csv" --question "$claim" \
            --prompts "$((5 * ${PROMPTS:-20}))" --repetitions "${REPETITIONS:-4}" --reduction vllm-own \
            --reduction unsplit --reduction deterministic:8 "${minutes[@]}"
        own=(--adapter "$ADAPTER")
        ;;
    train-16 | train-32)
        study "$name" train --model "$MODEL" --task "gsm8k:${DATA:?}/train.jsonl" --rank "${name#train-}" \
            --batch 32 "${last[@]}"
        ;;
    train-claims)
        study "$name" train --model "$MODEL" --task "csv:$folder/claims/train.csv" --question "$claim" \
            --validation-rows 500 --batch 32 "${last[@]}"
        ;;
    *)
        echo "no step $name" >&2
        exit 2
        ;;
    esac
done
if [ "${#failed[@]}" != 0 ]; then
    echo "not as expected: ${failed[*]}; see $folder"
    exit 1
fi
echo "done: $folder"
