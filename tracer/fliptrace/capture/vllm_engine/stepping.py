"""One request on a vLLM engine core, alone or with neighbours, a forward at a time, the next token given from outside.

vLLM's own step schedules, computes, samples and books in one go. Here the same calls are made in two halves: a forward
ends with its logits, and only the next step, which brings the token, lets vLLM sample and book it. So the token that is
fed is the one that was given, by the sampler's result and not by a repair afterwards, and between two steps nothing
runs. Neighbours, if any, are computed in the same forwards, and vLLM samples them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fliptrace.capture.sources import first_line
from fliptrace.capture.vllm_engine.batch import (
    BatchRows,
    RunningNeighbours,
    check_schedule,
    queue_request,
    rows_told,
)
from fliptrace.capture.vllm_engine.hosting import Host
from fliptrace.capture.vllm_engine.neighbours import Neighbourhood
from fliptrace.errors import FliptraceError, InputError, RecordingError

_numbers = itertools.count()


class Request:
    """A running request; made by ``begin``, ended by ``end``."""

    def __init__(
        self,
        host: Host,
        lora_request: Any,
        limit: int,
        neighbourhood: Neighbourhood | None = None,
        tell: Callable[[BatchRows], None] | None = None,
    ) -> None:
        """Prepare for an engine.

        Args:
            host: where it runs.
            lora_request: vLLM's LoRARequest.
            limit: how many tokens a request may have.
            neighbourhood: who runs in one batch with it; None for nobody.
            tell: with neighbours, is told where the request's rows lie before each forward runs.
        """
        self.host = host
        self.lora_request = lora_request
        self.limit = limit
        self.length = 0
        self.neighbours = RunningNeighbours(host, neighbourhood, limit)
        self._tell = tell
        self._rows = BatchRows(0, 0, 0, 1)
        self._id = ""
        self._scheduled: Any = None
        self._logits: Tensor | None = None
        self._tables: tuple[int, Any, dict[int, Tensor]] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a request was begun and not ended."""
        return bool(self._id)

    def begin(self, prompt_ids: tuple[int, ...], *, alone: bool = False) -> None:
        """Queue a prompt, with the neighbours unless ``alone``; what ran before is ended.

        Raises:
            InputError: the prompts do not fit into one forward.
            RecordingError: the engine has other requests.
        """
        self.end()
        scheduler = self.host.scheduler
        if scheduler.has_unfinished_requests():
            raise RecordingError(
                f"the vLLM engine has {scheduler.get_num_unfinished_requests()} other requests; a recording is of one "
                "request alone, or with the neighbours that it was given. Let them end first"
            )
        hood = None if alone else self.neighbours.neighbourhood
        if hood is not None:
            room = int(self.host.config.scheduler_config.max_num_batched_tokens)
            if hood.prompt_tokens + len(prompt_ids) > room:
                raise InputError(
                    f"all prompts of a batch are computed in one forward of at most max_num_batched_tokens {room} "
                    f"tokens; the prompt has {len(prompt_ids)} and its neighbours' have {hood.prompt_tokens}. Give "
                    "fewer or shorter ones, or make the LLM with a larger max_num_batched_tokens"
                )
            self.neighbours.queue(before=True)
        self._id = queue_request(
            self.host, f"fliptrace-{next(_numbers)}", prompt_ids, self.limit, self.lora_request
        )
        if hood is not None:
            self.neighbours.queue(before=False)
        self.length = 0

    def forward(self, token_ids: tuple[int, ...], step: int) -> Tensor:
        """Run the prompt, or one more token.

        Args:
            token_ids: what the forward runs over; the prompt in step 0.
            step: the forward's number, for messages.

        Returns:
            Logits [vocabulary] of the last row.

        Raises:
            RecordingError: vLLM preempted, recomputed, split or ended the request, or failed.
        """
        if step:
            with _inside_vllm(step):
                self._book(token_ids[0], step)
                self.neighbours.top_up()
        core = self.host.core
        scheduled = core.scheduler.schedule()
        self._check_schedule(scheduled, len(token_ids), step)
        self._scheduled = scheduled
        try:
            with _inside_vllm(step), self._telling():
                result = core.model_executor.execute_model(scheduled)
        except BaseException:
            self._scheduled = None
            raise
        if result is not None:
            raise RecordingError(
                f"vLLM gave a result instead of logits in step {step}: only a generating model can be traced"
            )
        self.length += len(token_ids)
        self.neighbours.computed()
        with _inside_vllm(step):
            return self._read_logits()

    def _telling(self) -> contextlib.AbstractContextManager[None]:
        self._rows = BatchRows(0, 0, 0, 1)
        if not self.neighbours.are_running:
            return contextlib.nullcontext()
        return rows_told(self.host, self._id, self._laid_out)

    def _laid_out(self, rows: BatchRows) -> None:
        self._rows = rows
        if self._tell is not None:
            self._tell(rows)

    def block_ids(self) -> tuple[list[int], ...]:
        """Return the request's blocks per KV group, from position 0 on."""
        found: tuple[list[int], ...] = self.host.scheduler.kv_cache_manager.get_block_ids(self._id)
        return found

    def position(self) -> tuple[int, dict[int, Tensor]]:
        """Return how many tokens are cached, and the block table of each KV group; made once per forward."""
        length, blocks = self.length, self.block_ids()
        if self._tables is None or self._tables[:2] != (length, blocks):
            device = self.host.worker.device
            tables = {
                group: torch.tensor(ids, dtype=torch.int64, device=device)
                for group, ids in enumerate(blocks)
            }
            self._tables = (length, blocks, tables)
        return length, self._tables[2]

    def end(self) -> None:
        """Take the request and its neighbours off the engine; harmless when there are none."""
        try:
            if self._scheduled is not None:
                # The runner refuses another forward before this one was sampled.
                self._sample(0)
        finally:
            request, self._id, self._scheduled = self._id, "", None
            if request:
                self.host.llm.llm_engine.abort_request([request], internal=True)
            self.neighbours.end()

    def _check_schedule(self, scheduled: Any, expected: int, step: int) -> None:
        request = self.host.scheduler.requests.get(self._id)
        if request is None:
            raise RecordingError(
                f"the request was aborted before step {step}; the trace ends with the step before"
            )
        if request.num_preemptions:
            raise RecordingError(
                f"vLLM preempted the request before step {step} and would recompute its cache in another forward, so "
                "this recording is void. Give the engine more cache blocks (gpu_memory_utilization, "
                "kv_cache_memory_bytes) or a shorter prompt"
            )
        self.neighbours.check_preempted(step)
        found = {name: number for name, number in scheduled.num_scheduled_tokens.items() if number}
        due = {self._id: expected} | self.neighbours.due()
        check_schedule(found, due, self._id, step)

    def _book(self, token_id: int, step: int) -> None:
        """Let vLLM sample the last forward, with this token for a result."""
        if self._scheduled is None:
            raise RecordingError(f"step {step} follows no forward; start again")
        self._sample(token_id)
        if self._id not in self.host.scheduler.requests:
            raise RecordingError(
                f"the request was aborted before step {step}; the trace ends with the step before"
            )

    def _sample(self, token_id: int) -> None:
        host, scheduled = self.host, self._scheduled
        self._scheduled = None
        runner, name = host.runner, "sample" if host.is_v2 else "_sample"
        own_sample, known, place = getattr(runner, name), self._logits, self._rows.place

        def sample(*arguments: Any, **keywords: Any) -> Any:
            result = own_sample(*arguments, **keywords)
            output = result[0] if host.is_v2 else result
            output.sampled_token_ids[place].fill_(token_id)
            return result

        setattr(runner, name, sample)
        if host.is_v2 and known is not None:
            # The head ran already, for the step's logits.
            runner.model.compute_logits = lambda *_arguments, **_keywords: known
        try:
            output = host.core.model_executor.sample_tokens(None)
        finally:
            vars(runner).pop(name, None)
            if host.is_v2 and known is not None:
                vars(runner.model).pop("compute_logits", None)
            self._logits = None
        if self._id in host.scheduler.requests:
            given = list(output.sampled_token_ids[output.req_id_to_index[self._id]])
            if given != [token_id]:
                raise RecordingError(
                    f"the token {token_id} was to be taken as sampled, and vLLM booked {given}"
                )
        host.scheduler.update_from_output(scheduled, output)

    @torch.inference_mode()
    def _read_logits(self) -> Tensor:
        state = self.host.runner.execute_model_state
        if self.host.is_v2:
            hidden = state.hidden_states[state.input_batch.logits_indices]
            logits = self.host.runner.model.compute_logits(hidden)
            self._logits = logits
        else:
            logits = state.logits
        wanted = self._rows.requests
        if logits is None or logits.shape[0] != wanted:
            raise RecordingError(
                f"one row of logits per request was required, {wanted} in all; vLLM gave "
                f"{None if logits is None else list(logits.shape)}"
            )
        row: Tensor = logits[self._rows.place]
        return row


@contextlib.contextmanager
def _inside_vllm(step: int) -> Iterator[None]:
    """Say of what goes wrong inside vLLM in which step it did, and what remains.

    Raises:
        RecordingError: it did; what fliptrace raises on purpose passes as it is.
    """
    try:
        yield
    except FliptraceError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise RecordingError(
            f"out of memory in step {step} ({first_line(error)}); the trace ends with the step before. Leave vLLM less "
            "for its cache (kv_cache_memory_bytes, gpu_memory_utilization) or a shorter context (max_model_len)"
        ) from error
    except Exception as error:
        raise RecordingError(
            f"vLLM's worker failed in step {step} ({type(error).__name__}: {first_line(error)}); the trace ends with "
            "the step before. After an error of the device nothing more runs in this process: begin another"
        ) from error


def check_prompt(prompt_ids: tuple[int, ...], vocabulary: int, limit: int) -> None:
    """Refuse what cannot be run.

    Raises:
        InputError: empty, too long, or an id outside the vocabulary.
    """
    if not prompt_ids:
        raise InputError("the prompt is empty: at least one token is needed")
    check_ids(prompt_ids, vocabulary, "prompt ids")
    if len(prompt_ids) >= limit:
        raise InputError(
            f"the prompt has {len(prompt_ids)} tokens and the engine's context {limit}; a prompt must leave room for "
            "at least one generated token"
        )


def check_ids(ids: tuple[int, ...], vocabulary: int, what: str) -> None:
    """Refuse ids outside the vocabulary.

    Raises:
        InputError: one is.
    """
    odd = [token for token in ids if not 0 <= token < vocabulary]
    if odd:
        raise InputError(f"{what} must lie in 0 .. {vocabulary - 1}; got {odd[0]}")
