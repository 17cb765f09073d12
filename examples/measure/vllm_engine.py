"""One vLLM engine in a process of its own that does what it is told, line by line.

    python examples/measure/vllm_engine.py '{"options": {"model": ...}, "adapters": [...]}'

Started by vllm_shrink.py. Commands come as JSON lines on standard input and each is answered by one
JSON line on standard output; what vLLM prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO


def main() -> None:
    """Start the engine, say so, and answer until there are no more commands."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    settings = json.loads(sys.argv[1])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    started = time.perf_counter()
    try:
        facts, llm, adapters = start(settings)
    except Exception as error:
        say(answers, {"error": f"{type(error).__name__}: {error}"})
        raise
    say(answers, {"ready": round(time.perf_counter() - started, 1), **facts})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = DO[command["do"]](llm, adapters, command)
        except Exception as error:  # noqa: BLE001  (told to whoever asked)
            answer = {"error": f"{type(error).__name__}: {error}"}
        say(answers, answer)


def say(answers: TextIO, answer: dict[str, Any]) -> None:
    """Write one answer."""
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def start(settings: dict[str, Any]) -> tuple[dict[str, Any], Any, list[Any]]:
    """Make the engine; tell what the plugin had done by the time that plugins were loaded."""
    import torch
    import vllm
    from vllm.lora.request import LoRARequest
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    facts: dict[str, Any] = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "plugin_modules": sorted(
            name for name in sys.modules if name.startswith("fliptrace_kernels")
        ),
        "cuda_initialised_by_plugins": torch.cuda.is_initialized(),
    }
    llm = vllm.LLM(**settings["options"])
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    adapters = [
        LoRARequest(f"adapter{number}", number, path)
        for number, path in enumerate(settings.get("adapters", []), start=1)
    ]
    return facts, llm, adapters


def generate(llm: Any, adapters: list[Any], command: dict[str, Any]) -> dict[str, Any]:
    """Continue prompts and time it.

    The command holds prompts (lists of token ids), tokens (how many to generate), adapters (per
    prompt the number of an adapter, or null), and optionally ignore_eos.
    """
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0.0,
        max_tokens=command["tokens"],
        ignore_eos=command.get("ignore_eos", False),
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in command["prompts"]]
    wanted = [None if number is None else adapters[number] for number in command["adapters"]]
    begin = time.perf_counter()
    outputs = llm.generate(
        prompts,
        parameters,
        lora_request=wanted if any(wanted) else None,
        use_tqdm=False,
    )
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    }


def chat(llm: Any, _adapters: list[Any], command: dict[str, Any]) -> dict[str, Any]:
    """Turn questions into the token ids of a chat's first turn."""
    tokenizer = llm.get_tokenizer()
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        for text in command["texts"]
    ]
    return {
        "prompts": [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts],
    }


def status(llm: Any, _adapters: list[Any], _command: dict[str, Any]) -> dict[str, Any]:
    """Ask the workers which shrink they run."""
    from fliptrace_kernels.vllm_plugin import status as ask

    return {"status": ask(llm)}


DO = {"generate": generate, "chat": chat, "status": status}

if __name__ == "__main__":
    main()
