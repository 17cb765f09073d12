"""Recorded pairs whose cause is known: a coordinate nudged across its boundary so that a later token flips.

The search for such a coordinate runs on the engine itself, so that it finds one whatever the processor; all recording
is the real recorder's.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch

from fliptrace.capture.decoding import generate
from fliptrace.capture.recorder import Recorder, RecorderOptions
from fliptrace.pair import Pair, PairSettings, Prompt
from fliptrace.pair.recording import Run, manifest_of
from fliptrace.sites import Coordinate
from fliptrace.store import TraceWriter, open_trace
from fliptrace.trace import Closing
from fliptrace_interventions.pushing import pushed_across

TOKENS = 10


@dataclass
class Nudge:
    """Elements of one shrink, replaced as it is handed over in one step.

    Attributes:
        site: the site's index; step: the step.
        elements: (row, rank index) -> ULP to push across the nearest boundaries.
        values: what was put there, in a run.
    """

    site: int
    step: int
    elements: dict[tuple[int, int], int]
    values: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def interceptor(self, engine):
        """Apply it to executions on an engine."""

        def hand_over(site, operand, z):
            if (site, engine.step_number) != (self.site, self.step):
                return z
            z = z.clone()
            for place, ulp in self.elements.items():
                pushed = pushed_across(z[place].cpu(), ulp, engine.dtype)
                if pushed is not None:
                    z[place] = self.values[place] = pushed.to(z.device)
            return z

        return hand_over


def record(
    engine,
    prompt,
    path,
    nudge=None,
    *,
    tokens=TOKENS,
    reduction="unsplit",
    seed=None,
    options=None,
):
    """Record one execution into a file."""
    options = options or RecorderOptions()
    run = Run(
        engine=engine,
        prompt=Prompt(tuple(prompt), "", False, "test"),
        settings=PairSettings(reduction=reduction, max_new_tokens=tokens),
        folder=path.parent,
        key=None,
    )
    with (
        engine.reducing(reduction, seed),
        TraceWriter(path, manifest_of(run, options, 0)) as writer,
    ):
        recorder = Recorder(engine, writer, options)
        hand_over = nudge.interceptor(engine) if nudge else (lambda site, operand, z: z)
        with engine.observed(recorder), engine.intercepted(hand_over):
            execution = generate(
                engine,
                prompt,
                max_new_tokens=tokens,
                end_ids=(),
                on_choice=recorder.complete_step,
            )
            recorder.finish()
        writer.close(Closing(True, execution.stop_reason, len(execution.token_ids)))
    return path


def record_pair(engine, prompt, folder: Path, nudge, *, reference=None, **settings) -> Pair:
    """Record a reference (with a nudge of its own, where given) and a nudged candidate."""
    folder.mkdir(parents=True, exist_ok=True)
    first = record(engine, prompt, folder / "reference.trace", reference, **settings)
    second = record(engine, prompt, folder / "candidate.trace", nudge, **settings)
    return Pair(open_trace(first), open_trace(second))


def tokens_under(engine, prompt, nudge, tokens=TOKENS):
    """Generate under a nudge, recording nothing."""
    with engine.intercepted(nudge.interceptor(engine)):
        return generate(engine, prompt, max_new_tokens=tokens, end_ids=()).token_ids


def planted_pair(engine, prompts, folder: Path, *, decoys=10, draws=12, rounds=5, least=2):
    """Search a coordinate that flips a later token alone, and decoys in its record that do not.

    The decoys flip nothing alone nor together, and leave the flip as it is when the cause is there, too.

    Args:
        engine: where to search.
        prompts: seed -> prompt; the draws for a prompt follow its seed.
        folder: for the traces.
        decoys: how many.
        draws: coordinates tried per prompt and round.
        rounds: how often each prompt is taken.
        least: the earliest step of the flip.

    Returns:
        pair, engine, prompt, cause (a Coordinate), decoys (coordinates), step (of the flip), nudge, tokens.
    """
    choices = {seed: random.Random(seed) for seed in prompts}
    for seed in [*prompts] * rounds:
        prompt, choose = prompts[seed], choices[seed]
        plain = generate(engine, prompt, max_new_tokens=TOKENS, end_ids=()).token_ids
        for _ in range(draws):
            site, step = choose.randrange(1, len(engine.sites)), 0
            cause = choose.randrange(len(prompt)), choose.randrange(16)
            nudge = Nudge(site, step, {cause: 1})
            flipped = tokens_under(engine, prompt, nudge)
            if flipped == plain or not nudge.values:
                continue
            flip = next(s for s in range(TOKENS) if plain[s] != flipped[s])
            if flip < least:
                continue
            others = _decoys(engine, prompt, nudge, cause, plain, flipped, flip, decoys, choose)
            if len(others) < decoys:
                continue
            whole = Nudge(site, step, {cause: 1, **dict.fromkeys(others, 1)})
            return SimpleNamespace(
                pair=record_pair(engine, prompt, folder, whole),
                engine=engine,
                prompt=prompt,
                cause=Coordinate(engine.sites[site], step, *cause),
                decoys=[Coordinate(engine.sites[site], step, row, rank) for row, rank in others],
                step=flip,
                nudge=whole,
                tokens=(plain[flip], flipped[flip]),
            )
    raise AssertionError("no coordinate of these prompts flips a token; give other prompts")


def _decoys(engine, prompt, nudge, cause, plain, flipped, flip, wanted, choose):
    """Find other coordinates of the record whose push changes no token up to the flip."""
    found = []
    places = [(row, rank) for row in range(len(prompt)) for rank in range(16)]
    choose.shuffle(places)

    def gives(elements, tokens):
        pushed = Nudge(nudge.site, nudge.step, dict.fromkeys(elements, 1))
        same = tokens_under(engine, prompt, pushed, flip + 1) == tokens[: flip + 1]
        return same and len(pushed.values) == len(elements)

    for place in places[: 3 * wanted]:
        if len(found) == wanted:
            break
        if (
            place != cause
            and gives([place], plain)
            and gives([*found, place], plain)
            and gives([cause, *found, place], flipped)
        ):
            found.append(place)
    return found
