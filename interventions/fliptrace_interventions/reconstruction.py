"""Replay a recording from an empty cache by its token ids and shrinks alone, and compare everything else with it.

If every cache row, every recurrent state and every logits row comes out bit-equal, then the shrinks are all that could
have made a difference, and this machine computes what was recorded. Without that nothing said about substituted values
means anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fliptrace.capture.engine import Engine, StateTensor
from fliptrace.judgements import Reconstruction
from fliptrace.numerics import digest_tensor, integer_view
from fliptrace_interventions.audit import ArmAudit, Expectation
from fliptrace_interventions.recorded import RecordedExecution


def reconstruct(
    engine: Engine, recorded: RecordedExecution, last_step: int
) -> tuple[Reconstruction, int]:
    """Replay the steps 0 … last_step.

    Args:
        engine: with the recording's model; the caller has chosen the reduction, which every site's replaced shrink
            hides.
        recorded: gives prompt ids, token ids and shrinks; its cache rows and logits digests are only compared with.
        last_step: the last step that is replayed.

    Returns:
        What was found, and how many forwards it took. The replay ends at the first mismatch.
    """
    audit = ArmAudit()
    mismatch: str | None = None
    forwards = 0
    restored = True
    replay = _Replay(recorded)
    recorded.keep(last_step + 1)
    with engine.audited(audit), engine.intercepted(replay):
        engine.start(recorded.prompt_ids)
        for step in range(last_step + 1):
            mismatch = _replayed_step(engine, recorded, audit, replay, step)
            forwards += 1
            if mismatch is not None:
                break
        if mismatch is None and last_step > 0:
            engine.write_cache(
                recorded.cache_before(last_step), last_step, recorded.state_before(last_step)
            )
            restored = _replayed_step(engine, recorded, audit, replay, last_step) is None
            forwards += 1
    equal = mismatch is None
    return Reconstruction(
        recorded.which, last_step + 1, equal, mismatch, equal and restored
    ), forwards


def _changed_state(
    states: Sequence[StateTensor], recorded: RecordedExecution, step: int
) -> str | None:
    """Name the first recurrent state that is not the recorded one, by its digest; None when all are."""
    if not states:
        return None
    found = torch.stack([digest_tensor(state.values) for state in states]).cpu()
    differs = (found != recorded.state_digests(step)).any(1).tolist()
    names = [f"{state.name} of layer {state.layer}" for state in states]
    return next((name for name, odd in zip(names, differs, strict=True) if odd), None)


class _Replay:
    """An interceptor that hands over the recorded shrink of every site."""

    def __init__(self, recorded: RecordedExecution) -> None:
        self.recorded = recorded
        self.step = 0

    def __call__(self, site: int, operand: Tensor, z: Tensor) -> Tensor:
        return self.recorded.shrink(self.step, site)


def _replayed_step(
    engine: Engine, recorded: RecordedExecution, audit: ArmAudit, replay: _Replay, step: int
) -> str | None:
    """Replay one step; say where it is not the recorded one, None when it is."""
    replay.step = step
    audit.begin(Expectation(step, len(recorded.positions(step))))
    logits = engine.step(recorded.token_ids[step - 1] if step else None)
    states = engine.read_state()
    arrived, state = audit.finish(logits, states)
    expected = {layer: recorded.cache_rows(step, layer) for layer in engine.cache_layers}
    for layer, rows in expected.items():
        found = arrived.rows.get(layer)
        if found is None:
            return f"step {step}: layer {layer} cached no rows"
        if found.shape != rows.shape:
            return f"step {step}: layer {layer} cached {list(found.shape)}, recorded are {list(rows.shape)}"
    differs = {
        layer: integer_view(arrived.rows[layer]) != integer_view(rows)
        for layer, rows in expected.items()
    }
    flags = torch.stack(
        [mask.any() for mask in differs.values()]
    ).tolist()  # one wait for the device
    for (layer, mask), differing in zip(differs.items(), flags, strict=True):
        if differing:
            part, row = torch.nonzero(mask)[0, :2].tolist()
            return (
                f"step {step}: {int(mask.sum())} elements of layer {layer}'s new cache rows differ, first in the "
                f"{'values' if part else 'keys'} of token position {recorded.positions(step)[row]}"
            )
    changed = _changed_state(states, recorded, step)
    if changed is not None:
        return f"step {step}: the recurrent state {changed} differs"
    if state.logits != recorded.logits_digest(step):
        return f"step {step}: the cache rows are equal, but the logits differ"
    return None
