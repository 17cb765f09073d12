"""Plant a cause among decoys: a pair whose flip is known to come from one shrink coordinate and from no other.

The reference is recorded under ``unsplit``. Then single coordinates of its shrink records are pushed across their
nearest rounding boundary, one by one and by trial, until one flips a later token. Decoys are other coordinates of the
same record, pushed across their own, of which it was tried that

* each one alone leaves every token up to the flip as it was, and so do all of them together;
* with the cause and all decoys the token flips, to the same other token as with the cause alone.

So in the reference the cause is sufficient and no decoy is; in the candidate the cause undoes the flip. Whether a decoy
does so too, taken back in the presence of all the others, is a matter of rounding; it is tried as well. The candidate
is a live recorded execution in which all of them are planted. Nothing in a trace says which one is the cause.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fliptrace.capture.decoding import choose
from fliptrace.capture.engine import CacheLayer
from fliptrace.capture.transformers_engine import TransformersEngine
from fliptrace.numerics import ordered_integers, round_to
from fliptrace.numerics.rounding import nearest_boundary
from fliptrace.pair import Pair, PairSettings, Prompt
from fliptrace.pair.recording import Run, record_execution
from fliptrace.store import open_trace
from fliptrace.trace import Kind, Trace

#: Pushes of the cause, in 16-bit ULP; decoys are always pushed by one.
PUSHES = (1, 2, 4, 8, 16, 32, 64)
#: Steps are tried whose two best logits are at most so far apart: one coordinate moves them little.
LARGEST_MARGIN = 0.0
#: A cause lies at most so many steps before the flip.
LONGEST_WAY = 3
#: How many causes are tried before each such step.
TRIES = 60
#: How many sets of decoys are tried for a cause.
SETS = 12
#: Causes are sought in the first part of the stack, from which most of the cache is reached.
PART_OF_STACK = 0.5


@dataclass(frozen=True, slots=True)
class Nudge:
    """One coordinate of a record and the value it gets: row within the step, rank index, FP32 value."""

    row: int
    rank_index: int
    value: float


@dataclass(frozen=True, slots=True)
class Planted:
    """What was planted and tried out.

    Attributes:
        site: index of the site; step: the step of the record.
        cause: the coordinate that flips.
        decoys: coordinates that do not.
        flip_step: the step whose token flips.
        tokens: the reference's token there and the one that the cause gives.
        push_ulp: how many 16-bit ULP the cause was pushed; decoys are pushed by one.
        tries: how many coordinates were tried before one flipped.
        undone_by: those whose return to the reference's value, all else planted, gives the reference's token again.
    """

    site: int
    step: int
    cause: Nudge
    decoys: tuple[Nudge, ...]
    flip_step: int
    tokens: tuple[int, int]
    push_ulp: int
    tries: int
    undone_by: tuple[Nudge, ...]


class Planter:
    """Tries nudges on one prompt and records the pair."""

    def __init__(
        self,
        engine: TransformersEngine,
        prompt: Prompt,
        folder: Path,
        *,
        seed: int,
        max_new_tokens: int = 80,
    ) -> None:
        """Record the reference into ``folder``."""
        self.engine = engine
        self.prompt = prompt
        self.folder = folder
        self.random = random.Random(seed)
        self.run = Run(
            engine=engine,
            prompt=prompt,
            settings=PairSettings(reduction="unsplit", attempts=1, max_new_tokens=max_new_tokens),
            folder=folder,
            key=None,
            control="not run: the pair is planted",
            end_ids=engine.end_ids,
        )
        folder.mkdir(parents=True, exist_ok=True)
        self._record("reference")
        self.reference = open_trace(folder / "reference.trace")
        self.tokens = self.reference.generated_ids
        self._caches: dict[int, tuple[CacheLayer, ...]] = {}

    def plant(self, decoys: int = 10) -> tuple[Planted, Pair] | None:
        """Find a cause and so many decoys, and record the candidate; None when this prompt has none."""
        close = sorted(
            (record.margin, record.step)
            for record in self.reference.steps
            if record.step > 0 and record.margin <= LARGEST_MARGIN
        )
        tries = 0
        for _, flip_step in close:
            for _ in range(TRIES):
                tries += 1
                planted = self._try_before(flip_step, decoys, tries)
                if planted is not None:
                    return planted, self._record_pair(planted)
        self.reference.close()
        return None

    def _try_before(self, last: int, decoys: int, tries: int) -> Planted | None:
        """Try one coordinate at one place before a step."""
        step = self.random.randint(max(0, last - LONGEST_WAY), last - 1)
        site = self.random.randrange(int(len(self.engine.sites) * PART_OF_STACK))
        record = self._record_at(step, site)
        push_ulp = self.random.choice(PUSHES)
        row, rank_index = (self.random.randrange(size) for size in record.shape)
        value = pushed(record[row, rank_index], push_ulp, self.engine.dtype)
        if value is None:
            return None
        cause = Nudge(row, rank_index, value)
        flipped = self._first_change(step, last, site, (cause,))
        if flipped is None or flipped[0] <= step:
            return None
        found = self._decoys(step, site, record, cause, flipped, decoys)
        if found is None:
            return None
        every = (cause, *found)
        undone_by = tuple(
            back
            for back in every
            if self._first_change(step, flipped[0], site, [n for n in every if n is not back])
            is None
        )
        tokens = (self.tokens[flipped[0]], flipped[1])
        return Planted(site, step, cause, found, flipped[0], tokens, push_ulp, tries, undone_by)

    def _decoys(
        self,
        step: int,
        site: int,
        record: Tensor,
        cause: Nudge,
        flipped: tuple[int, int],
        wanted: int,
    ) -> tuple[Nudge, ...] | None:
        """Choose coordinates that flip nothing, alone or together, and that do not keep the cause from flipping."""

        def change(*nudges: Nudge) -> tuple[int, int] | None:
            return self._first_change(step, flipped[0], site, nudges)

        quiet = [nudge for nudge in self._others(record, cause) if change(nudge) is None]
        for _ in range(SETS if len(quiet) >= wanted else 0):
            chosen = self.random.sample(quiet, wanted)
            if change(*chosen) is None and change(cause, *chosen) == flipped:
                return tuple(sorted(chosen, key=lambda nudge: (nudge.row, nudge.rank_index)))
        return None

    def _others(self, record: Tensor, cause: Nudge) -> list[Nudge]:
        """Push other coordinates of the record by one, so many at the most as a record of one row has."""
        places = list(itertools.product(*map(range, record.shape)))
        places.remove((cause.row, cause.rank_index))
        self.random.shuffle(places)
        values = [
            (row, rank_index, pushed(record[row, rank_index], 1, self.engine.dtype))
            for row, rank_index in places[: record.shape[1]]
        ]
        return [Nudge(row, rank, value) for row, rank, value in values if value is not None]

    def _record_at(self, step: int, site: int) -> Tensor:
        return self.reference.record(self.engine.sites[site].path, Kind.SHRINK, step)

    def _first_change(
        self, step: int, last: int, site: int, nudges: Sequence[Nudge]
    ) -> tuple[int, int] | None:
        """Run from a step to ``last`` with nudges; return the first changed token as (step, token id)."""
        engine = self.engine
        engine.set_reduction("unsplit")
        if step == 0:
            engine.start(self.prompt.ids)
        else:
            engine.write_cache(self._cache_before(step), step)
        token = None if step == 0 else self.tokens[step - 1]
        with planting(engine, step, site, nudges):
            for current in range(step, last + 1):
                chosen = choose(engine.step(token), current).token
                if chosen != self.tokens[current]:
                    return current, chosen
                token = chosen
        return None

    def _cache_before(self, step: int) -> tuple[CacheLayer, ...]:
        """Return the reference's cache before a step; a run over the tokens keeps all of them."""
        if not self._caches:
            self.engine.start(self.prompt.ids)
            self.engine.step()
            for later, token in enumerate(self.tokens[:-1], start=1):
                self._caches[later] = self.engine.read_cache()
                self.engine.step(token)
        return self._caches[step]

    def _record_pair(self, planted: Planted) -> Pair:
        nudges = (planted.cause, *planted.decoys)
        with planting(self.engine, planted.step, planted.site, nudges):
            self._record("candidate")
        return Pair(self.reference, open_trace(self.folder / "candidate.trace"))

    def _record(self, name: str) -> None:
        record_execution(
            self.run, self.folder / f"{name}.trace", "unsplit", 0, name, lambda *_: None
        )


@contextlib.contextmanager
def planting(
    engine: TransformersEngine, step: int, site: int, nudges: Sequence[Nudge]
) -> Iterator[None]:
    """Give nudged coordinates their values in one step at one site while inside."""

    def intercept(index: int, _operand: Tensor, z: Tensor) -> Tensor:
        if (engine.step_number, index) != (step, site):
            return z
        changed = z.clone()
        for nudge in nudges:
            changed[nudge.row, nudge.rank_index] = nudge.value
        return changed

    with engine.intercepted(intercept):
        yield


def pushed(value: Tensor, ulp: int, dtype: torch.dtype) -> float | None:
    """Return the first FP32 value that rounds ``ulp`` 16-bit values away, towards the nearest boundary.

    Args:
        value: FP32, no dimensions.
        ulp: at least 1.
        dtype: the 16-bit type.

    Returns:
        The value, None where there is none (infinities, NaN, an FP32 model).
    """
    boundary = nearest_boundary(float(value), dtype)
    if boundary is None:
        return None
    before = round_to(value, dtype)
    upwards = boundary > float(before)
    beyond = _moved(before, ulp if upwards else -ulp)
    last = _moved(beyond, -1 if upwards else 1)
    middle = torch.tensor((float(beyond) + float(last)) / 2, dtype=torch.float32)
    result = float(_moved(middle, 1 if upwards else -1))
    return result if torch.isfinite(beyond.float()) else None


def _moved(value: Tensor, steps: int) -> Tensor:
    """Return the value of the same dtype a number of representable values further up."""
    ordered = int(ordered_integers(value)) + steps
    width = value.element_size() * 8
    bits = ordered if ordered >= 0 else -(ordered + 1) - (1 << (width - 1))
    integers = torch.int32 if width == 32 else torch.int16
    return torch.tensor(bits, dtype=integers).view(value.dtype)


def describe(planted: Planted, engine: TransformersEngine, trace: Trace) -> dict[str, object]:
    """Return what was planted as JSON; coordinates are [token position, rank index]."""
    position = trace.steps[planted.step].first_position

    def places(nudges: Sequence[Nudge]) -> list[list[int]]:
        return [[position + nudge.row, nudge.rank_index] for nudge in nudges]

    return {
        "site": engine.sites[planted.site].path,
        "step": planted.step,
        "flip_step": planted.flip_step,
        "tokens": list(planted.tokens),
        "push_ulp": planted.push_ulp,
        "tries": planted.tries,
        "cause": places([planted.cause])[0],
        "decoys": places(planted.decoys),
        "undone_by": places(planted.undone_by),
    }
