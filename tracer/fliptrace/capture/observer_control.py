"""The observer control: does recording change what is recorded?

Asking for more has changed greedy outputs in other tools. So the same prompt is run twice under one repeatable
reduction (or one schedule seed), once recorded and once not, and tokens and digests of the whole logits rows must
agree.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from torch import Tensor

from fliptrace.capture.decoding import Choice, generate
from fliptrace.capture.engine import Engine
from fliptrace.capture.recorder import Recorder, RecorderOptions
from fliptrace.errors import ObserverEffectError
from fliptrace.manifest import Manifest
from fliptrace.numerics import digest_hex, digest_rows
from fliptrace.store import TraceWriter
from fliptrace.trace import Closing

#: How many tokens the control generates; the prefill and some decode steps exercise both ways of recording.
CONTROL_STEPS = 8


def observer_control(
    engine: Engine,
    prompt_ids: Sequence[int],
    *,
    end_ids: Collection[int],
    options: RecorderOptions,
    steps: int = CONTROL_STEPS,
) -> str:
    """Run a prompt recorded and unrecorded and compare tokens and logits.

    Args:
        engine: with a repeatable reduction or a schedule seed set.
        prompt_ids: the prompt.
        end_ids: ids that end a generation.
        options: the recorder's.
        steps: how many tokens at the most.

    Returns:
        One sentence for the manifest: what was run and that it agreed.

    Raises:
        ObserverEffectError: recording changed tokens or logits.
    """
    reduction = engine.describe()["reduction"]
    plain = _generate(engine, prompt_ids, end_ids, steps, None)
    with tempfile.TemporaryDirectory(prefix="fliptrace-control-") as folder:
        writer = TraceWriter(Path(folder) / "control.trace", Manifest({}))
        recorder = Recorder(engine, writer, options)
        try:
            with engine.observed(recorder, modules=options.modules):
                recorded = _generate(engine, prompt_ids, end_ids, steps, recorder)
        except BaseException:
            writer.abandon("the observer control failed")
            raise
        writer.close(Closing(complete=True, stop_reason="control", steps=len(recorded)))
    for step, (before, after) in enumerate(zip(plain, recorded, strict=True)):
        if before != after:
            raise ObserverEffectError(
                f"recording changed the execution: at step {step} the unrecorded run chose token {before[0]} (logits "
                f"digest {before[1]}) and the recorded run token {after[0]} ({after[1]}) under "
                f"{reduction['identity']}. Nothing recorded on this machine can be trusted; please "
                "report it with your manifest"
            )
    return (
        f"{len(plain)} steps under {reduction['identity']} ({reduction['schedule']}), recorded and unrecorded: tokens "
        "and digests of all logits equal"
    )


def _generate(
    engine: Engine,
    prompt_ids: Sequence[int],
    end_ids: Collection[int],
    steps: int,
    recorder: Recorder | None,
) -> list[tuple[int, str]]:
    seen: list[tuple[int, str]] = []

    def on_choice(step: int, choice: Choice, logits: Tensor) -> None:
        seen.append((choice.token, digest_hex(digest_rows(logits.unsqueeze(0))[0])))
        if recorder is not None:
            recorder.complete_step(step, choice, logits)

    generate(engine, prompt_ids, max_new_tokens=steps, end_ids=end_ids, on_choice=on_choice)
    return seen
