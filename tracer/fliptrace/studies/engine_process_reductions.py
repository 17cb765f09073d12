"""Production engines for studies whose items are single requests: one vLLM engine per reduction, side by side.

The engine that fliptrace steps itself runs eagerly and records; these run as vLLM serves: CUDA graphs, vLLM's own
sampler, its own log-probabilities. Prefix caching, asynchronous scheduling and speculative decoding are off, as in the
paper. Where there are several GPUs, engines are dealt to them in turn.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fliptrace.errors import InputError
from fliptrace.pair.bundled import bundled_model
from fliptrace.studies.engine_process import (
    EngineProcess,
    EngineProcessError,
    close_all,
    wait_for_all,
)
from fliptrace.studies.engine_process_settings import (
    ANSWER_SECONDS,
    MODES,
    EngineSettings,
    adapter_rank,
    verified_kernels,
)
from fliptrace.studies.engines import ModelSettings, is_repeatable
from fliptrace.studies.items import Item

#: The engine that is stepped in the study's own process.
IN_PROCESS = "in-process"
#: Columns of rows that it makes.
IN_THIS_PROCESS: dict[str, Any] = {"mode": IN_PROCESS, "batch_size": 1}
#: Arguments of vllm.LLM that make these engines what they are said to be.
_OURS = (
    "model",
    "enable_lora",
    "max_loras",
    "enable_prefix_caching",
    "async_scheduling",
    "speculative_config",
    "quantization",
    "kv_transfer_config",
    "enforce_eager",
    "compilation_config",
    "logprobs_mode",
    "tensor_parallel_size",
    "pipeline_parallel_size",
)
#: What says nothing to vLLM, and what its CPU build has no choice about.
_NO_BACKEND = ("sdpa", "CPU_ATTN")


def runs_in_processes(model: ModelSettings, engines: EngineSettings) -> bool:
    """Tell whether production engines run, on this machine: ``auto`` takes them where there is CUDA."""
    if model.engine != "vllm" or engines.mode == IN_PROCESS:
        return False
    if engines.mode != "auto" or engines.python is not None:
        return True
    return model.device != "cpu" and torch.cuda.is_available()


def mode_identity(model: ModelSettings, engines: EngineSettings, batch_size: int) -> dict[str, Any]:
    """Return what rows depend on: as it was asked for, so that a machine without a GPU may write the report."""
    if model.engine != "vllm" or engines.mode == IN_PROCESS:
        return {}
    return {
        "mode": engines.mode,
        "max_model_len": engines.max_model_len,
        "max_num_batched_tokens": engines.max_num_batched_tokens,
        "batch_size": batch_size,
    }


def check_mode(model: ModelSettings, engines: EngineSettings, batch_size: int) -> None:
    """Refuse what cannot run.

    Raises:
        InputError: an unknown mode, a mode of vLLM for another engine, an argument that the study sets itself.
    """
    if engines.mode not in (*MODES, IN_PROCESS):
        raise InputError(
            f"mode must be one of {', '.join((*MODES, IN_PROCESS))}; got {engines.mode!r}"
        )
    processes = model.engine == "vllm" and engines.mode != IN_PROCESS
    if not processes and engines.mode not in ("auto", IN_PROCESS):
        raise InputError(
            f"mode {engines.mode!r} is vLLM's; got engine {model.engine!r}: add --engine vllm, or leave --mode out"
        )
    if batch_size < 1 or (batch_size > 1 and not processes):
        raise InputError(
            f"several requests at once need an engine of vLLM's own (--engine vllm and a --mode other than "
            f"{IN_PROCESS}), one needs at least 1; got a batch size of {batch_size}"
        )
    if processes:
        dataclasses.replace(engines, mode="auto").check("vllm")
        backend_of(model.attention)
        for name in sorted(set(_OURS) & set(model.vllm_arguments)):
            raise InputError(
                f"{name} is what the study itself sets for its engines; leave --vllm-argument {name} out"
            )


def backend_of(attention: str) -> str:
    """Return vLLM's name of the attention backend, empty for its choice.

    Raises:
        InputError: transformers' eager attention.
    """
    if attention == "eager":
        raise InputError(
            "attention eager is transformers'; with vLLM name one of its backends (such as TRITON_ATTN), or leave it "
            "out"
        )
    return "" if attention in _NO_BACKEND else attention


def gpus_of(device: str) -> list[str]:
    """Return the GPUs to deal engines to, as CUDA_VISIBLE_DEVICES names them; none where vLLM is to see for itself.

    Args:
        device: ``auto``, ``cpu``, ``cuda``, or ``cuda:N`` for one of the visible ones.

    Raises:
        InputError: there is no such GPU.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        names = [str(number) for number in range(torch.cuda.device_count())]
    else:
        names = [name.strip() for name in listed.split(",") if name.strip()]
    if device == "cpu":
        return []
    _, chosen, number = device.partition(":")
    if not chosen or not names:
        return names
    if not number.isdecimal() or int(number) >= len(names):
        raise InputError(f"device {device}: there are {len(names)} GPUs, from cuda:0")
    return [names[int(number)]]


def grouped(rows: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Return the rows in groups whose requests run at once."""
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def together(
    group: Sequence[tuple[str, int, str, *tuple[Any, ...]]], place: int, size: int
) -> dict[str, Any]:
    """Return what an item says about the requests that run with it; nothing where each runs alone.

    Args:
        group: source, row and text of each.
        place: of the item's own.
        size: requests at once.
    """
    if size == 1:
        return {}
    return {"together": [[source, text] for source, _, text, *_ in group], "place": place}


def mode_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what a page says of the engines that made its rows; nothing where all ran in the study's own process."""
    modes = sorted({row.get("mode") or IN_PROCESS for row in rows})
    if modes in ([], [IN_PROCESS]):
        return []
    sizes = ", ".join(map(str, sorted({row.get("batch_size") or 1 for row in rows})))
    said = f"vLLM engines in processes of their own, one per reduction; mode: {', '.join(modes)}"
    lines = ["", f"{said}; requests at once: {sizes}."]
    if len(modes) > 1:
        lines.append(
            "**Rows of several modes are together here:** compare only those of one; name a mode and a new folder."
        )
    return lines


class ReductionEngines:
    """One engine per reduction, each in a process of its own."""

    def __init__(
        self, model: ModelSettings, engines: EngineSettings, batch_size: int, **options: Any
    ) -> None:
        """Settle the settings; nothing starts yet.

        Args:
            model: what runs.
            engines: how the engines are made; type and attention backend are the model's.
            batch_size: requests at once, at most.
            options: further arguments of vllm.LLM; those of the model's settings go before them.

        Raises:
            InputError: a model without adapter or the reverse.
        """
        if (model.model is None) != (model.adapter is None):
            raise InputError(
                "a model needs a LoRA adapter and an adapter its model: give both, or neither for the bundled ones"
            )
        self._model = model
        self._settings = dataclasses.replace(
            engines, attention_backend=backend_of(model.attention), dtype=model.dtype
        )
        self._batch_size = batch_size
        self._options = {**options, **model.vllm_arguments}
        self._engines: dict[str, EngineProcess] = {}
        self._groups: dict[str, tuple[Any, list[dict[str, Any]]]] = {}

    def start(self, reductions: Iterable[str]) -> None:
        """Start an engine for each reduction, all at once; they are not ready yet."""
        bundled = bundled_model()
        adapter = str(self._model.adapter or bundled.adapter)
        gpus = gpus_of(self._model.device)
        for number, reduction in enumerate(dict.fromkeys(reductions)):
            variables = {
                "FLIPTRACE_COUNT_LAUNCHES": "1",
                "OMP_NUM_THREADS": str(self._model.threads),
            }
            if gpus:
                variables["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
            self._engines[reduction] = self._settings.start(
                reduction,
                reduction,
                str(self._model.model or bundled.model),
                [adapter],
                rank=adapter_rank(adapter),
                batches=[self._batch_size],
                variables=variables,
                **self._options,
            )

    def ready(self, reductions: Iterable[str]) -> dict[str, Any]:
        """Wait for the engines, let each generate, and return what they read about themselves.

        Args:
            reductions: to start if none was started.

        Raises:
            EngineProcessError: an engine does not start, or its workers run another shrink than was asked for.
        """
        if not self._engines:
            self.start(reductions)
        try:
            wait_for_all(list(self._engines.values()), self._settings.start_seconds)
        except EngineProcessError as error:
            raise EngineProcessError(
                f"{error}. --mode {IN_PROCESS} steps vLLM in this process instead, on a CPU under any reduction"
            ) from error
        found: dict[str, Any] = {"kernels": {}, "arms": {}}
        for reduction, engine in self._engines.items():
            engine.ask("generate", ANSWER_SECONDS, prompts=[[1, 2, 3]], adapters=[0], tokens=2)
            said = engine.ask("describe", ANSWER_SECONDS, files="model" not in found)
            kernels = verified_kernels(engine.name, reduction, said)
            found = {**said, **found}
            found["kernels"][reduction] = kernels
            found["arms"][reduction] = {
                "kernels": kernels,
                "engine": said["engine"],
                "mode": self.mode_of(reduction),
                "workers": said["workers"],
                "variables": said["environment"]["variables"],
                "seconds_to_start": engine.facts["ready"],
            }
        found.pop("workers", None)
        return found

    def mode_of(self, reduction: str) -> str:
        """Return the mode in which an engine runs; ``auto`` is settled where it runs."""
        return str(self._engines[reduction].facts.get("mode", self._settings.mode))

    def columns(self, reduction: str) -> dict[str, Any]:
        """Return the columns of a row that say which engine made it."""
        by_hardware = "gpu" in self._engines[reduction].facts and not is_repeatable(reduction)
        return {
            "reduction": reduction,
            "schedule": "hardware" if by_hardware else "none",
            "mode": self.mode_of(reduction),
            "batch_size": self._batch_size,
            "seed": None,
        }

    def answer(
        self, do: str, source: str, text: str, asked: Mapping[str, Any], **command: Any
    ) -> Any:
        """Return an engine's answer to one request; its group runs at once, and is asked once.

        Args:
            do: a command that takes texts and gives ``answers``.
            source: the request's name.
            text: what it asks.
            asked: the item's arguments: ``reduction``, ``repetition`` and what ``together`` adds.
            command: further arguments of the command.

        Raises:
            EngineProcessError: the engine fails at it.
        """
        reduction = asked["reduction"]
        requests = asked.get("together", [[source, text]])
        place = asked.get("place", 0)
        key = (do, asked["repetition"], requests)
        if self._groups.get(reduction, (None,))[0] != key:
            answers = self._engines[reduction].ask(
                do,
                ANSWER_SECONDS,
                sources=[name for name, _ in requests],
                texts=[words for _, words in requests],
                template=self._model.chat_template,
                **command,
            )["answers"]
            self._groups[reduction] = key, answers
        answers = self._groups[reduction][1]
        found = answers[place]
        if place == len(answers) - 1:
            # The next repetition is asked for anew, also where it has the same number.
            del self._groups[reduction]
        return found

    def close(self) -> None:
        """End the engines."""
        close_all(self._engines.values())


class ReductionWorker:
    """What a study's worker on these engines is, less its items: each belongs to the engine of its reduction."""

    def __init__(self, engines: ReductionEngines) -> None:
        """Keep the engines; they start when it is known which are needed."""
        self._engines = engines

    def begin(self, items: Sequence[Item]) -> None:
        """Start the engines that these items need."""
        self._engines.start(item.arguments["reduction"] for item in items)

    def lane(self, item: Item) -> str:
        """Items of one engine wait for each other."""
        reduction: str = item.arguments["reduction"]
        return reduction

    def close(self) -> None:
        """End the engines."""
        self._engines.close()
