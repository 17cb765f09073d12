"""What lies inside a vLLM ``LLM``, found by what is there and not by version, and what must hold to trace it.

A recording is of one request, eager, one forward after another. Whatever would reorder, share, split or hide the work
is refused here with its reason; what was found, as read from the worker's own configuration, goes into the
manifest. Nothing here changes an engine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from fliptrace.errors import InputError, UnsupportedModelError

#: Arguments of ``LLM`` that a recording needs as they are, with the reason.
FIXED_ARGUMENTS: dict[str, tuple[Any, str]] = {
    "enable_lora": (True, "shrinks are what is recorded"),
    "enforce_eager": (
        True,
        "CUDA graphs and compilation would replay kernels without passing the recorder",
    ),
    "enable_prefix_caching": (
        False,
        "a cached prefix is not computed, so its shrinks and cache rows would never be seen",
    ),
    "async_scheduling": (
        False,
        "the next forward would be scheduled before this one's token is known or forced",
    ),
    "enable_chunked_prefill": (
        False,
        "step 0 is the whole prompt in one forward; in chunks it would be another computation",
    ),
}


@dataclass(frozen=True, slots=True)
class Host:
    """The parts of an engine in this process.

    Attributes:
        llm: the user's or ours.
        core: vLLM's EngineCore, which schedules.
        worker: the one worker.
        runner: its model runner.
        config: the worker's whole configuration.
        is_v2: the runner is of the second kind, which computes logits when it samples.
    """

    llm: Any
    core: Any
    worker: Any
    runner: Any
    config: Any
    is_v2: bool

    @property
    def scheduler(self) -> Any:
        """The engine core's scheduler."""
        return self.core.scheduler

    @property
    def static_layers(self) -> dict[str, Any]:
        """Attention layers by name, with the caches that are bound to them."""
        layers: dict[str, Any] = self.config.compilation_config.static_forward_context
        return layers


def find_host(llm: Any, *, ranks: int = 1) -> Host:
    """Look inside an ``LLM``.

    Args:
        llm: to look inside.
        ranks: of the parallel group whose one rank runs in this process.

    Raises:
        InputError: no vLLM engine, or one in another process.
        UnsupportedModelError: several workers, or parts that are not where 0.26 and 0.32 have them.
    """
    client: Any = getattr(getattr(llm, "llm_engine", None), "engine_core", None)
    if client is None:
        raise InputError(
            f"a vllm.LLM is required; got {type(llm).__name__}, which has no llm_engine.engine_core. An asynchronous "
            "engine or a server cannot be attached to: make an LLM in this process"
        )
    core: Any = getattr(client, "engine_core", None)
    if core is None or not hasattr(core, "scheduler"):
        raise InputError(
            "the vLLM engine must run in this process, so that it can be stepped and seen; this one runs in another "
            f"({type(client).__name__}). Set VLLM_ENABLE_V1_MULTIPROCESSING=0 before the LLM is made"
        )
    parallel: Any = core.vllm_config.parallel_config
    wanted = (ranks, ranks, 1)
    sizes = (
        parallel.world_size,
        parallel.tensor_parallel_size,
        getattr(parallel, "data_parallel_size", 1),
    )
    if sizes != wanted:
        raise UnsupportedModelError(
            f"an engine with one worker, in this process, can be traced; this one has {parallel.world_size} (tensor "
            f"parallel {parallel.tensor_parallel_size}, pipeline parallel {parallel.pipeline_parallel_size}, data "
            f"parallel {getattr(parallel, 'data_parallel_size', 1)}). Let fliptrace start the ranks: "
            "load_engine(..., engine='vllm', vllm_arguments={'tensor_parallel_size': 2})"
        )
    wrapper = getattr(core.model_executor, "driver_worker", None)
    worker: Any = getattr(wrapper, "worker", wrapper)
    runner = getattr(worker, "model_runner", None)
    if runner is None or not hasattr(runner, "execute_model_state"):
        raise UnsupportedModelError(
            "the model runner must lie in the driver's worker and keep a forward's state until it samples, as in vLLM "
            f"0.26 and 0.32; here the executor is {type(core.model_executor).__name__} and the runner "
            f"{type(runner).__name__}"
        )
    is_v2 = not hasattr(runner, "_sample")
    if is_v2 and not hasattr(runner, "sample"):
        raise UnsupportedModelError(
            f"the model runner {type(runner).__name__} has neither _sample nor sample, so no token could be forced"
        )
    return Host(llm, core, worker, runner, worker.vllm_config, is_v2)


def check_settings(host: Host) -> dict[str, Any]:
    """Read in the worker what a recording depends on.

    Returns:
        Name -> value, for the manifest.

    Raises:
        UnsupportedModelError: some setting would make a recording wrong; each is named with its reason.
    """
    found = read_settings(host)
    troubles = [
        f"{name} must be {wanted} ({reason}), and is {found[name]}"
        for name, (wanted, reason) in FIXED_ARGUMENTS.items()
        if found[name] != wanted
    ]
    limits = (
        ("dual_stream", "shrink and expand would overlap with the base projection"),
        ("speculative_decoding", "several tokens would be computed in one forward"),
        ("fully_sharded_loras", "ranks would add their shrinks to one another"),
        ("kv_transfer", "cache rows would come from elsewhere"),
        ("quantisation", "projections would not be those that a trace describes"),
    )
    troubles += [f"{name} must be off ({why})" for name, why in limits if found[name]]
    if found["compilation"] or found["cuda_graphs"]:
        troubles.append("compilation and CUDA graphs must be off (no Python runs in a replay)")
    if found["max_num_batched_tokens"] < found["max_model_len"]:
        troubles.append(
            f"max_num_batched_tokens must be at least max_model_len {found['max_model_len']} (a prompt is one "
            f"forward), and is {found['max_num_batched_tokens']}"
        )
    if found["cache_dtype"] not in ("auto", found["dtype"]):
        troubles.append(
            f"kv_cache_dtype must be auto (rows are recorded as they are cached), and is {found['cache_dtype']}"
        )
    if troubles:
        raise UnsupportedModelError(
            f"this vLLM engine cannot be recorded faithfully: {'; '.join(troubles)}. Make the LLM with these settings, "
            "or let load_engine(..., engine='vllm') make it"
        )
    return found


def read_settings(host: Host) -> dict[str, Any]:
    """Return every setting that check_settings looks at, and some that are only stated."""
    import vllm.envs as variables

    config = host.config
    lora, cache, scheduler = config.lora_config, config.cache_config, config.scheduler_config
    compilation = config.compilation_config
    mode = getattr(compilation, "mode", 0)
    graphs = getattr(compilation, "cudagraph_mode", None)
    return {
        "enable_lora": lora is not None,
        "enforce_eager": bool(config.model_config.enforce_eager),
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "async_scheduling": bool(scheduler.async_scheduling)
        or getattr(host.core, "batch_queue", None) is not None,
        "enable_chunked_prefill": bool(scheduler.enable_chunked_prefill),
        "dual_stream": bool(getattr(variables, "VLLM_LORA_ENABLE_DUAL_STREAM", False)),
        "speculative_decoding": config.speculative_config is not None,
        "fully_sharded_loras": bool(lora is not None and lora.fully_sharded_loras),
        "kv_transfer": config.kv_transfer_config is not None,
        "quantisation": config.model_config.quantization or "",
        "compilation": int(mode or 0),
        "cuda_graphs": "" if graphs is None or graphs.name == "NONE" else graphs.name,
        "max_num_batched_tokens": int(scheduler.max_num_batched_tokens),
        "max_model_len": int(config.model_config.max_model_len),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "cache_dtype": str(cache.cache_dtype),
        "block_size": int(cache.block_size),
        "batch_invariant": bool(getattr(variables, "VLLM_BATCH_INVARIANT", False)),
        "max_loras": int(lora.max_loras) if lora is not None else 0,
        "max_lora_rank": int(lora.max_lora_rank) if lora is not None else 0,
        "runner": "V2" if host.is_v2 else "V1",
        "seed": int(config.model_config.seed or 0),
    }


def check_plugin() -> str:
    """Say what the kernels' vLLM plugin does in this process.

    Returns:
        A sentence for the manifest.

    Raises:
        InputError: FLIPTRACE_SHRINK asks for it, and it is not there, or does something else there.
    """
    from fliptrace_kernels import FliptraceKernelsError
    from fliptrace_kernels.vllm_plugin.installation import installed
    from fliptrace_kernels.vllm_plugin.settings import read
    from fliptrace_kernels.vllm_plugin.shrink_operator import Operator

    wanted = os.environ.get("FLIPTRACE_SHRINK", "").strip()
    found = installed(Operator())
    if not wanted and found is None:
        return "not asked for (FLIPTRACE_SHRINK is unset)"
    if found is None:
        allowed = os.environ.get("VLLM_PLUGINS")
        why = (
            f"VLLM_PLUGINS={allowed} keeps it from loading: add fliptrace to it, or unset it"
            if allowed is not None and "fliptrace" not in allowed.split(",")
            else "its entry point was not found: install fliptrace in this environment"
        )
        raise InputError(
            f"FLIPTRACE_SHRINK={wanted} asks for the fliptrace plugin, but vLLM runs its own shrink: {why}; or unset "
            "FLIPTRACE_SHRINK"
        )
    try:
        asked = read(os.environ)
    except FliptraceKernelsError as error:
        raise InputError(str(error)) from error
    there = found.settings.reduction
    if asked is None or asked.reduction != there:
        raise InputError(
            f"FLIPTRACE_SHRINK {f'is {wanted}' if wanted else 'is unset'} here, but vLLM's worker read {there} when it "
            "started and sums by it: what a trace says of its reduction would be wrong. Set the same in both, before "
            "vLLM is started"
        )
    return f"vLLM's own operator is replaced by {there}"
