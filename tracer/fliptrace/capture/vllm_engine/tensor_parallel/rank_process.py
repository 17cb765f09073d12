"""What runs in the process of one rank: a vLLM engine core with its worker, and VllmEngine on it, told by the driver.

    python -m fliptrace.capture.vllm_engine.tensor_parallel.rank_process '{"rank": 0, "ranks": 2, ...}'

Started by RankGroup only; nobody else calls it. All ranks get the same commands in the same order, so their collectives
meet.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from fliptrace.capture.engine import CacheLayer
from fliptrace.capture.vllm_engine.engine import VllmEngine
from fliptrace.capture.vllm_engine.loading import load_llm
from fliptrace.capture.vllm_engine.parallel_layers import sums_over_ranks
from fliptrace.capture.vllm_engine.tensor_parallel.messages import (
    Command,
    Done,
    Failed,
    Packed,
    StepResult,
    pack,
    receive,
    send,
    unpack,
)
from fliptrace.capture.vllm_engine.tensor_parallel.telling import Telling
from fliptrace.errors import UnsupportedModelError
from fliptrace.numerics.digest import digest_rows

#: Arrival orders of simulated atomics are those of another seed on every rank: ranks' hardware shares none.
SEED_STRIDE = 1_000_003


def main() -> None:
    """Load this rank's part of the model and serve the driver until it is gone."""
    settings = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_driver, args=(settings["lifeline"],), daemon=True).start()
    connection = Connection(settings["connection"])
    try:
        server = RankServer(connection, settings)
        facts = server.facts()
        _unlink_shared_memory()
    except Exception as error:  # noqa: BLE001  (told to the driver)
        send(connection, _failed(error))
        _leave()
    send(connection, Done(facts))
    while True:
        try:
            command = receive(connection)
        except (EOFError, OSError):
            _leave()
        send(connection, server.answer(command))


def _leave() -> NoReturn:
    """End at once: nothing here outlives its driver, and taking process groups down in order takes ten seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_with_driver(descriptor: int) -> None:
    """End this process when the driver's end of a pipe is closed, whatever it waits for."""
    os.read(descriptor, 1)
    os._exit(0)


def _failed(error: BaseException) -> Failed:
    """Say what went wrong; the whole of it goes to this rank's log."""
    traceback.print_exception(error)
    return Failed(type(error).__name__, " ".join(str(error).split()))


class RankServer:
    """Carries out commands; the methods without underscore that take plain values are the commands."""

    def __init__(self, connection: Connection, settings: dict[str, Any]) -> None:
        """Load."""
        self.rank, self.ranks = int(settings["rank"]), int(settings["ranks"])
        _own_rendezvous()
        self.loaded = load_llm(
            settings["model"],
            settings["adapter"],
            device=settings["device"],
            dtype=settings["dtype"],
            arguments=settings["arguments"],
            ranks=self.ranks,
        )
        self.engine = VllmEngine(self.loaded)
        self._telling = Telling(
            connection,
            [site.path for site in self.engine.sites],
            self.engine.cache_layers,
            self.engine.device,
        )
        self._watching = contextlib.ExitStack()

    def answer(self, command: Command) -> Done | Failed:
        """Carry out a command."""
        try:
            return Done(getattr(self, command.do)(*command.arguments))
        except Exception as error:  # noqa: BLE001  (told to the driver)
            return _failed(error)

    def facts(self) -> dict[str, Any]:
        """Return what does not change: rank 0 speaks for the model, every rank for its part."""
        engine = self.engine
        if engine.state_keys:
            raise UnsupportedModelError(
                "layers with recurrent state (Mamba) cannot be traced with several ranks yet, which hold parts of each "
                "state; use tensor_parallel_size=1"
            )
        own: dict[str, Any] = {
            "sites": [site.path for site in engine.sites],
            "cache_layers": engine.cache_layers,
            "windows": dict(engine.cache_windows),
            "row_shapes": {layer.number: layer.row_shape for layer in engine.paged},
            "not_observed": engine.not_observed(),
            "device": str(engine.device),
            "summing": [
                part.site.path
                for layer in engine._layers
                if sums_over_ranks(layer.module)
                for part in layer.slices
            ],
            "total_kv_heads": int(engine.host.config.model_config.get_total_num_kv_heads()),
        }
        if self.rank == 0:
            own |= {
                "tokenizer": pickle.dumps(self.loaded.tokenizer),
                "end_ids": self.loaded.end_ids,
                "dtype": engine.dtype,
                "vocabulary": int(engine.host.config.model_config.get_vocab_size()),
                "limit": engine.context_length,
                "simulates": engine.simulates_atomics,
            }
        return own

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return the engine's manifest sections."""
        return self.engine.describe()

    def set_reduction(self, reduction: str, seed: int | None) -> None:
        """Choose the reduction."""
        own = None if seed is None else seed + SEED_STRIDE * self.rank
        self.engine.set_reduction(reduction, own)

    def start(self, prompt_ids: tuple[int, ...]) -> None:
        """Begin a prompt."""
        self.engine.start(prompt_ids)

    def watch(
        self, observed: bool, intercepted: bool, audited: bool, operands: bool, modules: bool
    ) -> None:
        """Tell the driver of these from now on, and of nothing else."""
        self._watching.close()
        self._telling.reset(operands=operands)
        with contextlib.ExitStack() as stack:
            if observed:
                stack.enter_context(self.engine.observed(self._telling, modules=modules))
            if intercepted:
                stack.enter_context(self.engine.intercepted(self._telling.intercept))
            if audited:
                stack.enter_context(self.engine.audited(self._telling))
            self._watching = stack.pop_all()

    def keep_operands(self, operands: bool) -> None:
        """Export whole operands from now on, or not."""
        self._telling.keep_operands(operands)

    def step(
        self, token_id: int | None, captured: bool, whole_layers: frozenset[int]
    ) -> StepResult:
        """Run one forward."""
        telling = self._telling
        telling.capturing, telling.whole_layers = captured, whole_layers
        logits = self.engine.step(token_id)
        if captured:
            records, digest, launches, sources = telling.export(logits)
            return StepResult(self._shown(logits), digest, records, launches, sources)
        first, second = digest_rows(logits.unsqueeze(0)).flatten().tolist()
        return StepResult(self._shown(logits), (first, second))

    def _shown(self, logits: torch.Tensor) -> Packed | None:
        """Pack the logits for the driver, once for all ranks."""
        return pack(logits) if self.rank == 0 else None

    def read_cache(self) -> list[tuple[int, Packed, int, int | None]]:
        """Return this rank's heads of every layer."""
        return [
            (layer.layer, pack(layer.values), layer.first_position, layer.window)
            for layer in self.engine.read_cache()
        ]

    def write_cache(self, layers: Sequence[tuple[int, Packed, int, int | None]], step: int) -> None:
        """Replace this rank's heads of every layer."""
        content = [
            CacheLayer(number, unpack(values), first, window)
            for number, values, first, window in layers
        ]
        self.engine.write_cache(content, step)

    def shrink_weight(self, site: int) -> Packed:
        """Return A of one of this rank's sites."""
        return pack(self.engine.shrink_weight(site))

    def generate_alone(self, prompt_ids: tuple[int, ...], tokens: int) -> list[float]:
        """Let vLLM generate with nothing of ours in it; seconds of the prefill and of each decode step, to compare."""
        import time

        from vllm import SamplingParams

        self.engine._request.end()
        own = self.loaded.llm.llm_engine
        parameters = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        own.add_request(
            f"alone-{time.monotonic_ns()}",
            {"prompt_token_ids": list(prompt_ids)},
            parameters,
            lora_request=self.loaded.lora_request,
        )
        seconds = []
        while own.has_unfinished_requests():
            begin = time.perf_counter()
            own.step()
            seconds.append(time.perf_counter() - begin)
        return seconds


def _own_rendezvous() -> None:
    """Name the group by its port on the CPU too, where vLLM calls every group of this kind alike on one machine.

    Its shared-memory communicator would join ranks of two engines that run at once.
    """
    from vllm.platforms import current_platform
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    if not current_platform.is_cpu():
        return
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    rank = int(os.environ["RANK"])
    ExecutorWithExternalLauncher._distributed_args = lambda _self: (address, rank, rank)


def _unlink_shared_memory() -> None:
    """Take the names of vLLM's shared memory away; all ranks have mapped it by now, as a forward ran.

    vLLM, and Python's tracker for it, do so at an end in good order, which a rank that is killed has not. NCCL sees to
    its own files, which it may open later.
    """
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        name = line.rpartition("/dev/shm/")[2]  # noqa: S108  (vLLM's place)
        if name.startswith("psm_") or "cpushm" in name:
            Path("/dev/shm", name).unlink(missing_ok=True)  # noqa: S108


if __name__ == "__main__":
    main()
