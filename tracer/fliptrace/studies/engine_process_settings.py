"""How the engines of a study are made: one set of arguments for all, so that they differ in their shrink alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fliptrace.errors import InputError
from fliptrace.studies.amounts import check_above_zero, check_at_least
from fliptrace.studies.engine_process import (
    NO_ADAPTER,
    WITHOUT_PLUGIN,
    EngineProcess,
    EngineProcessError,
    engine_options,
    environment,
    file_name,
    inside,
)

#: Ranks for which vLLM makes buffers.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
MODES = ("auto", "graphs", "compiled", "eager")
_ENGINES = ("auto", "vllm")
#: Answers that take longer are taken for an engine that hangs.
ANSWER_SECONDS = 600.0


def default_scratch() -> str:
    """Return where logs and caches of engines go unless another folder is named."""
    return str(Path(tempfile.gettempdir()) / f"fliptrace-engines-{os.getuid()}")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Arguments that all engines of a study share.

    Attributes:
        mode: ``graphs`` (decoding from CUDA graphs, nothing compiled), ``compiled`` (as vLLM has it), ``eager``;
            ``auto`` is ``graphs`` on CUDA and ``eager`` on the CPU.
        attention_backend: vLLM's name of one; empty for its choice.
        dtype: as vLLM takes it.
        cache_gib: cache of each engine, GiB; several engines share one GPU.
        max_model_len: longest request, tokens; None for the model's.
        max_num_batched_tokens: of one forward; a prompt beyond it is cut in two.
        python: the Python that has vLLM; None for this one.
        scratch: where logs and caches go.
        start_seconds: how long an engine may take to start.
    """

    mode: str = "auto"
    attention_backend: str = ""
    dtype: str = "auto"
    cache_gib: float = 2.0
    max_model_len: int | None = None
    max_num_batched_tokens: int = 8192
    python: str | None = None
    scratch: str = ""
    start_seconds: float = 300.0

    def __post_init__(self) -> None:
        """Refuse numbers with which no engine starts."""
        check_above_zero("the cache of an engine, in GiB,", self.cache_gib)
        check_above_zero("the seconds in which an engine may start", self.start_seconds)
        check_at_least("batched tokens", self.max_num_batched_tokens)
        if self.max_model_len is not None:
            check_at_least("max model len", self.max_model_len)

    def identity(self) -> dict[str, Any]:
        """Return what rows depend on."""
        return {
            "mode": self.mode,
            "attention_backend": self.attention_backend,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_num_batched_tokens,
        }

    def check(self, engine: str = "auto") -> None:
        """Refuse what cannot run.

        Args:
            engine: as the person asked for it.

        Raises:
            InputError: another engine than vLLM, an unknown mode.
        """
        if engine not in _ENGINES:
            raise InputError(
                f"this study batches requests, which vLLM does; engine {engine!r} runs one request at a time, and "
                "padding several into one batch would be another computation. Leave --engine out, or use trace-study "
                "repeat"
            )
        if self.mode not in MODES:
            raise InputError(f"mode must be one of {', '.join(MODES)}; got {self.mode!r}")

    @property
    def folder(self) -> Path:
        """Where logs and caches go."""
        return Path(self.scratch or default_scratch()).expanduser().resolve()

    def start(
        self,
        name: str,
        label: str,
        model: str,
        adapters: Sequence[str],
        *,
        rank: int,
        batches: Sequence[int],
        variables: Mapping[str, str],
        mode: str | None = None,
        **options: Any,
    ) -> EngineProcess:
        """Start an engine's process; it is not ready yet.

        Args:
            name: of the engine.
            label: a reduction, ``vllm-own``, or ``none`` for no adapter.
            model: folder or hub name.
            adapters: folders.
            rank: of the adapters; 0 for none.
            batches: numbers of requests at once.
            variables: further environment.
            mode: another than the settings'.
            options: further arguments of vllm.LLM.
        """
        lora: dict[str, Any] = {}
        if rank:
            buffers = next(size for size in _RANKS if size >= rank)
            lora = {"enable_lora": True, "max_lora_rank": buffers, "max_loras": 1}
        arguments = engine_options(
            cache_gib=self.cache_gib,
            attention_backend=self.attention_backend,
            dtype=self.dtype,
            model=model,
            max_num_seqs=max(batches),
            max_num_batched_tokens=max(self.max_num_batched_tokens, *batches),
            **lora,
        )
        if self.max_model_len is not None:
            arguments["max_model_len"] = self.max_model_len
        arguments |= options
        settings = {
            "options": arguments,
            "adapters": list(adapters),
            "mode": mode or self.mode,
            "batches": sorted(batches),
        }
        # Workers on other GPUs have engines of the same names.
        devices = variables.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        place = f"{name} gpu {devices}" if devices else name
        return EngineProcess(
            name,
            self.folder / "logs" / f"{file_name(place)}.log",
            inside(self.python, settings),
            environment(self.folder, place, label, python=self.python, **variables),
        )


def adapter_rank(adapter: str) -> int:
    """Return an adapter's rank.

    Raises:
        InputError: the adapter cannot be read, or its rank is none that vLLM takes.
    """
    from fliptrace.capture.sources import adapter_folder, check_adapter

    rank = check_adapter(adapter_folder(adapter)).get("r")
    if not isinstance(rank, int) or not 0 < rank <= _RANKS[-1]:
        raise InputError(f"vLLM takes adapters of rank 1 to {_RANKS[-1]}; {adapter} has r={rank!r}")
    return rank


def verified_kernels(
    name: str, label: str, described: Mapping[str, Any], *, invariant: bool | None = None
) -> str:
    """Check what an engine's workers say of their shrink after they have generated, and say it in one line.

    Args:
        name: of the engine, for messages.
        label: the reduction's long name, ``vllm-own`` or ``none``.
        described: the engine's answer to ``describe``.
        invariant: whether VLLM_BATCH_INVARIANT had to be on; None if that is not asked.

    Raises:
        EngineProcessError: a worker runs another shrink than was asked for, or the switch is not as it was set.
    """
    said = described["engine"]["batch_invariant"]
    if invariant is not None and bool(said) != invariant:
        raise EngineProcessError(
            f"{name}: VLLM_BATCH_INVARIANT had to be {int(invariant)} and is {int(bool(said))} in the engine; this "
            "vLLM does not take it"
        )
    parts = []
    for worker in described["workers"]:
        if label in WITHOUT_PLUGIN:
            parts.append("no adapter" if label == NO_ADAPTER else str(worker["kernel"]))
            continue
        launches = worker["launches"]
        runs = worker["installed"] and worker["layers"] and (launches is None or launches > 0)
        if worker["reduction"] != label or not runs:
            raise EngineProcessError(
                f"{name}: worker {worker['rank']} had to run {label} and says {dict(worker)}; nothing it computes "
                "would belong to that name"
            )
        counted = "" if launches is None else f", {launches:,} launches counted on the device"
        parts.append(f"{worker['kernel']} in {worker['layers']} layers{counted}")
    return "; ".join(dict.fromkeys(parts))
