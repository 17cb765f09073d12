"""The workbench: a recorded pair on an engine, ready for experiments.

Everything that the arms share is kept here: the two recordings, unedited arms that ran already, the check that both
recordings can be reconstructed, and the counts of what was run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fliptrace.capture.engine import Engine
from fliptrace.judgements import Arm, Reconstruction, Screening, Verdict
from fliptrace.pair import Pair
from fliptrace_interventions.edits import Edit
from fliptrace_interventions.recorded import RecordedExecution
from fliptrace_interventions.selection import Selection


class Workbench:
    """A pair on an engine.

    Attributes:
        pair: the recorded pair.
        engine: where continuations run.
        reference: the reference as it was recorded; candidate likewise.
        target_step: the step whose token is judged: the flip, unless another was asked for.
        reduction: of the continuations, in its long form.
        repeats, shams, seed: as asked.
        runs: arms run so far, reconstructions included; forwards: forward passes so far.
        environment_differences: (key, recorded, now): what differs from where the pair was recorded, of all that is
            told and not refused. Reconstruction decides whether it matters.
    """

    def __init__(
        self,
        pair: Pair,
        engine: Engine,
        *,
        reduction: str = "unsplit",
        repeats: int = 2,
        shams: int = 20,
        seed: int = 0,
        target: int | None = None,
        allow_unrepeatable: bool = False,
        answer: Callable[[str], object] | None = None,
        expected_answer: object = None,
    ) -> None:
        """Check that the pair and the engine belong together.

        Args:
            pair: from trace_pair or load_pair.
            engine: with the pair's model and adapter.
            reduction: of everything after an edit.
            repeats: how often each arm of a proof runs, at least 2.
            shams: surviving shams per direction of a proof.
            seed: of the shams, and the arrival schedule of simulated atomics.
            target: the step whose token is judged; None: the flip step. Needed where nothing flipped.
            allow_unrepeatable: accept a reduction that is not repeatable by construction; the repeats then decide, and
                an experiment whose repeats differ is void.
            answer: takes an answer out of a generated text; None: the final number, as GSM8K asks for it.
            expected_answer: what the answer should be; continuations then say whether it is correct.

        Raises:
            InputError: the traces are redacted, cut short or of another model, adapter, dtype or engine; nothing
                flipped and no target was given; a reduction that is not repeatable was not allowed.
        """
        raise NotImplementedError

    pair: Pair
    engine: Engine
    reference: RecordedExecution
    candidate: RecordedExecution
    target_step: int
    reduction: str
    repeats: int
    shams: int
    seed: int
    runs: int
    forwards: int
    environment_differences: tuple[tuple[str, object, object], ...]

    @property
    def flip_step(self) -> int | None:
        """The step at which the executions chose different tokens, None when they never did."""
        raise NotImplementedError

    @property
    def tokens(self) -> tuple[int, int]:
        """The tokens chosen at the target step: (reference, candidate)."""
        raise NotImplementedError

    def execution(self, which: str) -> RecordedExecution:
        """Return the recording called ``reference`` or ``candidate``.

        Raises:
            InputError: another name.
        """
        raise NotImplementedError

    def select(self, edits: Sequence[Edit], recipient: str = "reference") -> Selection:
        """Resolve edits without running anything: what they select, how many elements, and whether they differ.

        Raises:
            InputError: an edit selects nothing, another number of elements than it expects, an evicted or unknown
                place, or the same element as another edit.
        """
        raise NotImplementedError

    def reconstruct(self) -> tuple[Reconstruction, Reconstruction]:
        """Replay both executions from an empty cache by token ids and shrinks alone; done once, then remembered."""
        raise NotImplementedError

    def screen(
        self, edits: Sequence[Edit], recipient: str = "reference", *, between: str = "recorded"
    ) -> Screening:
        """Run one edited arm beside the unedited arm of the same start, which is remembered.

        Args:
            edits: what to put in.
            recipient: ``reference`` or ``candidate``; the other is the donor.
            between: what the shrinks between several edited sites are: ``recorded`` or ``recomputed``.

        Raises:
            InputError: see select.
        """
        raise NotImplementedError

    def prove(
        self,
        edits: Sequence[Edit],
        recipient: str | None = None,
        *,
        free: bool = True,
        shams: int | None = None,
        between: str = "recorded",
    ) -> Verdict:
        """Run a claim with repeats, controls, shams and footprint, and judge it.

        Args:
            edits: what to put in.
            recipient: ``reference`` or ``candidate``; None: both directions.
            free: also run each arm without forced tokens.
            shams: surviving shams per direction; None: the workbench's number.
            between: see screen.

        Raises:
            InputError: see select.
        """
        raise NotImplementedError

    def continue_freely(
        self, edits: Sequence[Edit], recipient: str = "reference", *, between: str = "recorded"
    ) -> Arm:
        """Continue to the end of the answer without forced tokens; the arm holds the text and the answer.

        Args:
            edits: what to put in; none continues the recipient itself from the target step.
            recipient: in whose execution.
            between: see screen.
        """
        raise NotImplementedError

    def mirrored(
        self, edits: Sequence[Edit], recipient: str = "reference", *, between: str = "recorded"
    ) -> Screening:
        """Screen the same edits in the other direction: the recipient's values put into the donor's execution."""
        raise NotImplementedError
