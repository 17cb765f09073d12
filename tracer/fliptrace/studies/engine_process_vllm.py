"""What runs inside an engine's process: one vLLM engine that answers commands, line by line.

    python -m fliptrace.studies.engine_process_vllm '{"options": {"model": ...}, "adapters": [...]}'

Commands come as JSON lines on standard input and each is answered by one JSON line on standard output; what vLLM prints
goes to standard error. It ends when there are no more commands. Of studies, the one module that imports vLLM.

Settings: ``options`` (arguments of vllm.LLM), ``adapters`` (folders), and where studies ask: ``mode`` (``auto``,
``graphs``, ``compiled``, ``eager``) with ``batches`` (sizes to capture), ``described`` (describe the model's files).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

_GROUP, _NAME = "vllm.general_plugins", "fliptrace"


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
        say(answers, {"error": said(error)})
        raise
    say(answers, {"ready": round(time.perf_counter() - started, 1), **facts})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = COMMANDS[command["do"]](llm, adapters, command)
        except Exception as error:  # noqa: BLE001  (told to whoever asked)
            answer = {"error": said(error)}
        say(answers, answer)


def say(answers: TextIO, answer: dict[str, Any]) -> None:
    """Write one answer."""
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def said(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def show_plugin() -> None:
    """Make the kernels' plugin visible to vLLM where fliptrace is not installed, as in a checkout.

    An installed fliptrace has the entry point in its own metadata.
    """
    if not os.environ.get("FLIPTRACE_SHRINK", "").strip():
        return
    if importlib.metadata.entry_points(group=_GROUP, name=_NAME):
        return
    info = Path(tempfile.mkdtemp(prefix="fliptrace-entry-")) / "fliptrace_working_tree-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: fliptrace-working-tree\nVersion: 0\n"
    )
    (info / "entry_points.txt").write_text(
        f"[{_GROUP}]\n{_NAME} = fliptrace_kernels.vllm_plugin:register\n"
    )
    sys.path.insert(0, str(info.parent))


def start(settings: dict[str, Any]) -> tuple[dict[str, Any], Any, list[Any]]:
    """Make the engine; tell what the plugin had done by the time that plugins were loaded."""
    show_plugin()
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
    mode = settings.get("mode")
    options = dict(settings["options"])
    if mode:
        check_switch()
        facts["mode"] = mode = settled(mode)
        options |= compilation(mode, settings["batches"])
    if not gives_scores(options.get("logprobs_mode")):
        del options["logprobs_mode"]
        facts["scores"] = False
    llm = vllm.LLM(**options)
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    adapters = [
        LoRARequest(f"adapter{number}", number, path)
        for number, path in enumerate(settings.get("adapters", []), start=1)
    ]
    return facts, llm, adapters


def check_switch() -> None:
    """Refuse VLLM_BATCH_INVARIANT where vLLM would start with it and fail at the first request.

    Raises:
        InputError: it is on and this is no GPU.
    """
    import vllm.envs as variables
    from vllm.platforms import current_platform

    from fliptrace.errors import InputError

    if bool(getattr(variables, "VLLM_BATCH_INVARIANT", False)) and not current_platform.is_cuda():
        raise InputError(
            "VLLM_BATCH_INVARIANT needs CUDA, as vLLM's batch-invariant operators are Triton's; this vLLM runs on "
            f"{current_platform.device_name}: ask for the switch off alone"
        )


def settled(mode: str) -> str:
    """Return the mode that runs here: ``auto`` is ``graphs`` on CUDA and ``eager`` on the CPU.

    Raises:
        InputError: CUDA graphs or compilation without CUDA.
    """
    from vllm.platforms import current_platform

    from fliptrace.errors import InputError

    on_cuda = current_platform.is_cuda()
    if mode == "auto":
        return "graphs" if on_cuda else "eager"
    if mode != "eager" and not on_cuda:
        raise InputError(f"mode {mode!r} needs CUDA; this vLLM runs on another device: use eager")
    return mode


def compilation(mode: str, batches: list[int]) -> dict[str, Any]:
    """Return how decoding runs: from CUDA graphs alone, as vLLM would have it, or eager.

    Args:
        mode: ``graphs``, ``compiled`` or ``eager``.
        batches: numbers of requests at once; each gets a graph of its own.
    """
    from fliptrace.studies.engine_process import GRAPHS_ONLY

    if mode == "eager":
        return {"enforce_eager": True}
    most = max(batches)
    sizes = {
        "cudagraph_capture_sizes": sorted({size for size in (1, 2, 4, 8, *batches) if size <= most})
    }
    return {"compilation_config": sizes if mode == "compiled" else GRAPHS_ONLY | sizes}


def gives_scores(wanted: str | None) -> bool:
    """Tell whether this vLLM can give scores of the wanted kind with its tokens."""
    from vllm.engine.arg_utils import EngineArgs

    return wanted is None or "logprobs_mode" in EngineArgs.__dataclass_fields__


def sampling(command: dict[str, Any], **more: Any) -> Any:
    """Return greedy sampling parameters as a command asks for them."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=command["tokens"],
        ignore_eos=command.get("ignore_eos", False),
        detokenize=False,
        skip_reading_prefix_cache=command.get("skip_prefix_cache"),
        **more,
    )


def chosen(adapters: list[Any], command: dict[str, Any]) -> list[Any]:
    """Return the adapter of each prompt, None for none."""
    return [None if number is None else adapters[number] for number in command["adapters"]]


def generate(llm: Any, adapters: list[Any], command: dict[str, Any]) -> dict[str, Any]:
    """Continue prompts and time it.

    The command holds prompts (lists of token ids), tokens (how many to generate), adapters (per prompt the number of an
    adapter, or null), and optionally ignore_eos, skip_prefix_cache, and batch: so many prompts at once, all if left
    out.
    """
    parameters = sampling(command)
    prompts = [{"prompt_token_ids": ids} for ids in command["prompts"]]
    wanted = chosen(adapters, command)
    size = command.get("batch") or len(prompts)
    outputs = []
    begin = time.perf_counter()
    for first in range(0, len(prompts), size):
        requests = wanted[first : first + size]
        outputs += llm.generate(
            prompts[first : first + size],
            parameters,
            lora_request=requests if any(requests) else None,
            use_tqdm=False,
        )
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached_tokens": [output.num_cached_tokens for output in outputs],
    }


def timed(llm: Any, adapters: list[Any], command: dict[str, Any]) -> dict[str, Any]:
    """Continue prompts batch by batch and tell when each request got each token.

    Takes what ``generate`` takes. Times are seconds after a batch's first request was handed in, taken when the step
    that made a token has returned, as a client in this process would see it.
    """
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    parameters = sampling(command, output_kind=RequestOutputKind.DELTA)
    prompts, wanted = command["prompts"], chosen(adapters, command)
    size = command.get("batch") or len(prompts)
    seconds: list[float] = []
    times: list[list[float]] = []
    tokens: list[list[int]] = []
    for first in range(0, len(prompts), size):
        numbers = range(first, min(first + size, len(prompts)))
        found: dict[str, tuple[list[float], list[int]]] = {str(n): ([], []) for n in numbers}
        begin = time.perf_counter()
        for number in numbers:
            engine.add_request(
                str(number),
                {"prompt_token_ids": prompts[number]},
                parameters,
                lora_request=wanted[number],
            )
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - begin
            for output in outputs:
                made = output.outputs[0].token_ids
                at, ids = found[output.request_id]
                at += [now] * len(made)
                ids += made
        seconds.append(time.perf_counter() - begin)
        times += [at for at, _ in found.values()]
        tokens += [ids for _, ids in found.values()]
    return {"seconds": seconds, "times": times, "tokens": tokens}


def continue_texts(llm: Any, adapters: list[Any], command: dict[str, Any]) -> dict[str, Any]:
    """Continue texts with scores; see engine_process_texts, which is not to be imported before plugins are loaded."""
    from fliptrace.studies.engine_process_texts import continue_texts as answers

    return answers(sampling, llm, adapters, command)


def decide_texts(llm: Any, adapters: list[Any], command: dict[str, Any]) -> dict[str, Any]:
    """Read two words' log-probabilities as the next token of texts; see engine_process_texts."""
    from fliptrace.studies.engine_process_texts import decide_texts as answers

    return answers(sampling, llm, adapters, command)


def chat(llm: Any, _adapters: list[Any], command: dict[str, Any]) -> dict[str, Any]:
    """Turn texts into token ids: of a chat's first turn, or as they are if ``template`` is false."""
    tokenizer = llm.get_tokenizer()
    if not command.get("template", True):
        return {"prompts": [tokenizer(text)["input_ids"] for text in command["texts"]]}
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


def describe(llm: Any, adapters: list[Any], command: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest's sections as read here: model and adapter if ``files``, environment, engine and kernels."""
    import torch

    from fliptrace.capture.environment import describe_environment
    from fliptrace.capture.vllm_engine.hosting import find_host, read_settings
    from fliptrace.capture.vllm_engine.loading import describe_llm
    from fliptrace_kernels.vllm_plugin import SHRINK_VARIABLE

    host = find_host(llm)
    device = torch.device(host.runner.device)
    found: dict[str, Any] = {}
    if command.get("files") and adapters:
        found = dict(describe_llm(llm, adapters[0]).description)
    layers = (getattr(layer, "impl", None) for layer in host.static_layers.values())
    attention = {type(layer).__name__ for layer in layers if layer is not None}
    found["engine"] = {
        "name": "vllm",
        **read_settings(host),
        "vocabulary": int(host.config.model_config.get_vocab_size()),
        "attention_implementation": ", ".join(sorted(attention)),
    }
    found["environment"] = describe_environment(device)
    if os.environ.get(SHRINK_VARIABLE, "").strip():
        found["workers"] = status(llm, adapters, command)["status"]
    else:
        own = "operator vllm::lora_shrink" if device.type == "cuda" else "FP32 einsum of torch"
        found["workers"] = [{"rank": 0, "reduction": "vllm-own", "kernel": f"vLLM's own {own}"}]
    return found


def forget_prefixes(llm: Any, _adapters: list[Any], _command: dict[str, Any]) -> dict[str, Any]:
    """Empty the prefix cache."""
    from fliptrace.errors import InputError

    if not llm.reset_prefix_cache():
        raise InputError("vLLM could not empty its prefix cache; no request may be running")
    return {}


def locate(llm: Any, adapters: list[Any], command: dict[str, Any]) -> dict[str, Any]:
    """Find the first module whose rows depend on a request's neighbours; see batch_rows."""
    from fliptrace.capture.vllm_engine.hosting import find_host
    from fliptrace.studies.batch_rows import first_dependent_modules

    def run(prompts: list[list[int]]) -> list[list[int]]:
        asked = command | {"prompts": prompts, "adapters": [0 if adapters else None] * len(prompts)}
        found: list[list[int]] = generate(llm, adapters, asked)["tokens"]
        return found

    model = find_host(llm).runner.model
    return {"requests": first_dependent_modules(model, command["prompts"], command["alone"], run)}


COMMANDS: dict[str, Callable[[Any, list[Any], dict[str, Any]], dict[str, Any]]] = {
    "chat": chat,
    "continue_texts": continue_texts,
    "decide_texts": decide_texts,
    "describe": describe,
    "forget_prefixes": forget_prefixes,
    "generate": generate,
    "locate": locate,
    "status": status,
    "timed": timed,
}

if __name__ == "__main__":
    main()
