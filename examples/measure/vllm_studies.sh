#!/usr/bin/env bash
# trace-study batch and latency on one NVIDIA GPU with vLLM: the counterparts of the paper's tables 3 and 4 and figure 6.
#
#   bash examples/measure/vllm_studies.sh batch   OUT SECONDS MODEL ADAPTER gsm8k.jsonl
#   bash examples/measure/vllm_studies.sh vary    OUT SECONDS MODEL ADAPTER gsm8k.jsonl
#   bash examples/measure/vllm_studies.sh latency OUT SECONDS [RANK]
#   bash examples/measure/vllm_studies.sh invariant-cost OUT SECONDS [RANK]
#
# batch: 64 prompts, batches of 16, 32, 64 and 1 (on 16 of them), vLLM's own, deterministic:8 and local, each with and
# without VLLM_BATCH_INVARIANT, three repetitions; with the switch on also the first module that depends on neighbours.
# vary: batch 32, order, neighbours, cold and warm prefix. latency: Llama-3.2-3B's shape with dummy weights.
# invariant-cost: the same shape with VLLM_BATCH_INVARIANT off and on.
#
# The process is ended after SECONDS; finished rows are kept, the same command goes on, and at the end the report is
# written from what is there. Settings: PYTHON; BACKEND (TRITON_ATTN); MODE of latency (graphs, or compiled as vLLM has
# it); ROUNDS, TRIALS (starts of all engines); SCRATCH for logs and caches; MORE, further arguments.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
PYTHON="${PYTHON:-python3}"
export PYTHONPATH="$PWD/kernels:$PWD/tracer:$PWD/interventions${PYTHONPATH:+:$PYTHONPATH}"
study="${1:?batch, vary, latency or invariant-cost}" out="${2:?a folder}" seconds="${3:?seconds}"
shift 3
common=(--attention-backend "${BACKEND:-TRITON_ATTN}" --scratch "${SCRATCH:-/tmp/fliptrace-engines}"
    --start-seconds "$seconds" --quiet --out "$out")
prompts() {
    arguments=(batch --model "$1" --adapter "$2" --task "gsm8k:$3" --prompts 64 --max-model-len 1024
        --max-num-batched-tokens 16384 --max-new-tokens 150
        --reduction vllm-own --reduction deterministic:8 --reduction local)
}
case "$study" in
batch)
    prompts "$@"
    arguments+=(--batch-size 16 --batch-size 32 --batch-size 64 --alone 16 --repetitions 3 --locate 6 --locate-tokens 8)
    ;;
vary)
    prompts "$@"
    arguments+=(--batch-size 32 --alone 0 --repetitions 2 --vary order --vary neighbours --vary prefix)
    ;;
latency)
    arguments=(latency --shape llama-3.2-3b --rank "${1:-16}" --mode "${MODE:-graphs}" --trials "${TRIALS:-1}" --rounds "${ROUNDS:-5}"
        --batch-size 1 --batch-size 16 --batch-size 32 --batch-size 64)
    ;;
invariant-cost)
    arguments=(latency --shape llama-3.2-3b --rank "${1:-16}" --mode "${MODE:-graphs}" --trials "${TRIALS:-1}" --rounds "${ROUNDS:-5}"
        --batch-size 1 --batch-size 16 --batch-size 64 --batch-invariant off --batch-invariant on
        --reduction vllm-own --reduction local --baseline vllm-own)
    ;;
*)
    echo "error: a study is batch, vary, latency or invariant-cost; got $study" >&2
    exit 2
    ;;
esac
# shellcheck disable=SC2206  # MORE holds several words
command=("$PYTHON" -m fliptrace.command_line.trace_study "${arguments[@]}" "${common[@]}" ${MORE:-})
begin=$SECONDS
timeout "$seconds" "${command[@]}" >"$out.txt" 2>&1
code=$?
echo "$study: exit code $code after $((SECONDS - begin)) s"
# Ended from outside: the report of what is there, without an engine.
[ "$code" -eq 124 ] && "${command[@]}" --budget-minutes 0 >"$out.txt" 2>&1
tail -n 60 "$out.txt"
exit "$code"
