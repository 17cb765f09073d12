"""Run one arm: restore or recompute the recipient's state, put the edits in, continue, and keep the evidence.

An arm may stop early when, after a step, the residual stream of all rows, every cache row written since its start, and
the logits are bit-equal to those of an unedited arm from the same start: the same weights then see the same state and
the same tokens, so all the rest is equal by construction. An edited arm is compared with its own unedited arm only; an
unedited arm with those that ran before it, which hand over recorded shrinks up to another place.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fliptrace.capture.decoding import Choice, choose
from fliptrace.capture.engine import CacheLayer, Engine
from fliptrace.errors import RecordingError
from fliptrace.judgements import Receipt
from fliptrace.numerics import digest_hex, digest_rows, digest_tensor
from fliptrace_interventions.audit import (
    ArmAudit,
    Expectation,
    StepAudit,
    StepState,
)
from fliptrace_interventions.digests import digest_of_shrinks, digests_by_key, hexes
from fliptrace_interventions.edits import Source
from fliptrace_interventions.plans import CachePatch, Place, Plan, StatePatch
from fliptrace_interventions.receipts import (
    MISSING,
    PatchedCache,
    cache_receipts,
    landed,
    token_receipt,
)
from fliptrace_interventions.recorded import recorded_parts
from fliptrace_interventions.rounding_errors import Computed, with_recorded_error


@dataclass(frozen=True)
class ArmSettings:
    """How an arm is continued.

    Attributes:
        free: feed the arm's own tokens instead of the recorded ones.
        to_end: go on after the target step to the end of the answer.
        end_ids: tokens that end an answer.
        last_step: the last step that a free arm may run.
        keep_rows: keep copies of the cache rows that are written.
    """

    free: bool = False
    to_end: bool = False
    end_ids: Collection[int] = ()
    last_step: int = 0
    keep_rows: bool = False


@dataclass
class ArmRun:
    """What one run of an arm showed.

    Attributes:
        plan: what it did.
        choices: what was chosen in each step, from ``plan.start`` on.
        states: the state after each step, likewise.
        fed: the tokens that were taken as generated in each step, likewise.
        receipts: one per edited place.
        changed_operands: names of watched sites whose operand was not the recorded one.
        wrong_operand: the first edited site's operand was not the recorded one, although nothing before it was edited.
        rows: per step and layer the cache rows written, where asked for.
        stopped_early_at: see Arm.
        stop_reason: why a free arm ended; "" otherwise.
        forwards: forward passes run.
    """

    plan: Plan
    choices: list[Choice] = field(default_factory=list)
    states: list[StepState] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)
    changed_operands: list[str] = field(default_factory=list)
    wrong_operand: str = ""
    rows: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    stopped_early_at: int | None = None
    stop_reason: str = ""
    forwards: int = 0

    def choice(self, step: int) -> Choice | None:
        """Return what was chosen in a step, None when the arm did not reach it."""
        place = step - self.plan.start
        return self.choices[place] if 0 <= place < len(self.choices) else None

    def is_equal(self, other: ArmRun) -> bool:
        """Tell whether another run gave the same tokens and left the same states, bit by bit."""
        return self.fed == other.fed and self.states == other.states

    def first_difference(self, other: ArmRun) -> int | None:
        """Return the first step whose token or state differs, None when both are equal."""
        for place, (ours, theirs) in enumerate(zip(self.states, other.states, strict=False)):
            if ours != theirs or self.fed[place] != other.fed[place]:
                return self.plan.start + place
        shorter = min(len(self.states), len(other.states))
        return None if len(self.states) == len(other.states) else self.plan.start + shorter


def run_arm(
    engine: Engine,
    plan: Plan,
    settings: ArmSettings,
    known: Sequence[ArmRun] = (),
    computed: Computed | None = None,
) -> ArmRun:
    """Run an arm once. The caller has chosen the reduction.

    Args:
        engine: where it runs; its cache is used.
        plan: what to do.
        settings: how to continue.
        known: unedited arms from the same start under the same settings, to stop early by; none: run to the end.
        computed: what the reduction gives for the recorded operands: later shrinks then keep their recorded rounding
            errors, as long as the recorded tokens are fed; None: they are computed and nothing else.

    Returns:
        What it showed. Whatever fails inside is raised; the engine's interceptor and audit are taken off first.
    """
    run = ArmRun(plan)
    audit = ArmAudit()
    handover = Handover(engine, plan, computed)
    with engine.audited(audit), engine.intercepted(handover):
        _Continuation(engine, settings, audit, handover, run, known).go()
    return run


class Handover:
    """The interceptor of one arm: hands over recorded, edited or computed shrinks, as the plan says."""

    def __init__(self, engine: Engine, plan: Plan, computed: Computed | None = None) -> None:
        """Prepare for ``plan``; see run_arm."""
        self.engine = engine
        self.plan = plan
        self.computed: Computed = computed or {}
        self.step = -1
        self.written: dict[Place, Tensor] = {}
        self.replayed: list[Tensor] = []
        self.operands: dict[Place, Tensor] = {}
        self._last_operand: tuple[Tensor, Tensor, int] | None = None

    def begin(self, step: int) -> None:
        """A forward is about to run."""
        self.step = step
        self.written, self.replayed, self.operands = {}, [], {}
        self._last_operand = None

    def __call__(self, site: int, operand: Tensor, z: Tensor) -> Tensor:
        """Return what expand is to get instead of ``z``."""
        plan, place = self.plan, (self.step, site)
        patches = plan.patches.get(place, ())
        replay = plan.replays.get(self.step)
        recorded = plan.is_recorded(place)
        computed = None if recorded or replay is not None else self.computed.get(place)
        if replay is None and not recorded and not patches:
            if computed is None:
                return z
            return with_recorded_error(z, computed, plan.recipient.shrink(self.step, site))
        if replay is not None or (plan.watched_from is not None and place >= plan.watched_from):
            self.operands[place] = self._operand_digests(operand)
        if replay is not None:
            given = plan.execution(replay).shrink(self.step, site)
        elif recorded:
            given = plan.recipient.shrink(self.step, site)
        elif computed is not None:
            given = with_recorded_error(z, computed, plan.recipient.shrink(self.step, site))
        else:
            given = z.clone()
        if given.shape != z.shape:
            raise RecordingError(
                f"{self.engine.sites[site].name} computed {list(z.shape)} in step {self.step}, but "
                f"{list(given.shape)} was recorded; the recording is of another prompt or adapter"
            )
        for patch in patches:
            source = None
            if isinstance(patch.value, Source):
                source = plan.execution(patch.value).shrink(self.step, site)
            patch.apply(given, source)
        if patches:
            self.written[place] = digest_tensor(given)
        if replay is not None:
            self.replayed.append(given.clone())
        return given

    def _operand_digests(self, operand: Tensor) -> Tensor:
        """Digest the rows; q, k and v read one tensor, which is held here so that its address is not used again."""
        last = self._last_operand
        if (
            last is not None
            and last[0].data_ptr() == operand.data_ptr()
            and last[0].shape == operand.shape
            and last[2] == operand._version
        ):
            return last[1]
        digests = digest_rows(operand)
        self._last_operand = operand, digests, operand._version
        return digests


class _Continuation:
    """One run of an arm, step by step."""

    def __init__(
        self,
        engine: Engine,
        settings: ArmSettings,
        audit: ArmAudit,
        handover: Handover,
        run: ArmRun,
        known: Sequence[ArmRun],
    ) -> None:
        self.engine, self.settings, self.audit, self.handover = engine, settings, audit, handover
        self.run, self.plan = run, run.plan
        self.known = () if self.plan.changes_cache else known
        self.last_step = max(settings.last_step, run.plan.target)
        if not settings.to_end:
            self.last_step = run.plan.target

    def go(self) -> None:
        """Run the steps."""
        plan, run = self.plan, self.run
        token = self._restore()
        limit = self.engine.context_length
        for step in range(plan.start, self.last_step + 1):
            if limit is not None and len(plan.recipient.prompt_ids) + step > limit:
                run.stop_reason = "context full"
                return
            if 0 < step <= plan.target and token != plan.recipient.token_ids[step - 1]:
                self.handover.computed = {}  # another token than the recorded: no error belongs to it
            cached = self._patch_cache(step)
            arrived, logits = self._forward(step, token, cached)
            choice = choose(logits, step)
            run.choices.append(choice)
            run.forwards += 1
            if self.settings.keep_rows:
                run.rows[step] = arrived.rows
            token = self._next_token(step, choice)
            run.fed.append(token)
            other = self._same_from_here(step)
            if other is not None:
                self._take_the_rest(step, other)
                return
            if self.settings.free and token in self.settings.end_ids:
                run.stop_reason = "end of sequence"
                return
        if self.settings.free and self.settings.to_end:
            run.stop_reason = "max new tokens"

    def _restore(self) -> int | None:
        """Bring the engine to the state before the first step; return the token to feed."""
        plan = self.plan
        if plan.start == 0:
            self.engine.start(plan.recipient.prompt_ids)
            return None
        if plan.start not in plan.cache_patches:
            self.engine.write_cache(
                plan.recipient.cache_before(plan.start),
                plan.start,
                plan.recipient.state_before(plan.start),
            )
        return plan.tokens.get(plan.start - 1, plan.recipient.token_ids[plan.start - 1])

    def _next_token(self, step: int, choice: Choice) -> int:
        """Return the token that counts as generated in a step."""
        forced = self.plan.tokens.get(step)
        if forced is not None:
            return forced
        if self.settings.free or step >= self.plan.target:
            return choice.token
        return self.plan.recipient.token_ids[step]

    def _patch_cache(self, step: int) -> PatchedCache | None:
        """Put the cache edits before a step in."""
        patches = self.plan.cache_patches.get(step)
        if patches is None:
            return None
        plan = self.plan
        at_start = step == plan.start
        content = plan.recipient.cache_before(step) if at_start else self.engine.read_cache()
        kept = plan.recipient.state_before(step) if at_start else self.engine.read_state()
        sources = {
            source: recorded_parts(plan.execution(source), step)
            for source in {patch.value for patch in patches if isinstance(patch.value, Source)}
        }
        edited: dict[int, CacheLayer] = {layer.layer: layer for layer in content}
        states = {(state.layer, state.name): state for state in kept}
        for patch in patches:
            where = patch.layer if isinstance(patch, CachePatch) else (patch.layer, patch.name)
            source = None
            if isinstance(patch.value, Source):
                source = sources[patch.value][where]
            if isinstance(patch, CachePatch):
                layer = edited[patch.layer]
                patch.apply(layer.values, layer.first_position, source)
            else:
                patch.apply(states[patch.layer, patch.name].values, source)
        written = {layer: content.values for layer, content in edited.items()}
        states_written = {key: state.values for key, state in states.items()}
        changed = {
            kind: {patch.layer for patch in patches if isinstance(patch, kind)}
            for kind in (CachePatch, StatePatch)
        }
        patched = PatchedCache(
            edited=changed[CachePatch],
            before=plan.recipient.cache_digests(step),
            written=digests_by_key(written),
            edited_states=changed[StatePatch],
            states_before=hexes(
                digests_by_key(
                    {(s.layer, s.name): s.values for s in plan.recipient.state_before(step)}
                )
            ),
            states_written=digests_by_key(states_written),
        )
        self.engine.write_cache(tuple(edited.values()), step, tuple(states.values()))
        return patched

    def _forward(
        self, step: int, token: int | None, cached: PatchedCache | None
    ) -> tuple[StepAudit, Tensor]:
        """Run one forward and settle its receipts."""
        plan = self.plan
        sites = {site for at, site in plan.patches if at == step}
        replayed = step in plan.replays
        rows = len(plan.recipient.prompt_ids) if step == 0 else 1
        self.audit.begin(
            Expectation(
                step,
                rows,
                sites,
                replayed,
                cached.written if cached is not None else (),
                cached.states_written if cached is not None else (),
                tokens=step - 1 in plan.tokens,
            )
        )
        self.handover.begin(step)
        logits = self.engine.step(token)
        arrived, state = self.audit.finish(logits, self.engine.read_state())
        self.run.states.append(state)
        if cached is not None:
            self.run.receipts += cache_receipts(step, cached, arrived)
        if step - 1 in plan.tokens:
            own, forced = plan.recipient.token_ids[step - 1], plan.tokens[step - 1]
            self.run.receipts.append(token_receipt(step - 1, own, forced, arrived.tokens))
        if replayed:
            self.run.receipts.append(self._replay_receipt(step, arrived))
        if sites:
            self.run.receipts += self._shrink_receipts(step, sorted(sites), arrived)
        self._compare_operands(step)
        return arrived, logits

    def _shrink_receipts(self, step: int, sites: list[int], arrived: StepAudit) -> list[Receipt]:
        written = hexes(self.handover.written)
        consumed = hexes({(step, site): digest for site, digest in arrived.shrinks.items()})
        receipts = []
        for site in sites:
            place = (step, site)
            given, got = written.get(place, MISSING), consumed.get(place, MISSING)
            phase = "prefill" if step == 0 else f"step {step}"
            receipts.append(
                Receipt(
                    place=f"{self.engine.sites[site].name}, {phase}",
                    digest_before=self.plan.recipient.shrink_digest(step, site),
                    digest_written=given,
                    digest_consumed=got,
                    landed=landed(given, got),
                )
            )
        return receipts

    def _replay_receipt(self, step: int, arrived: StepAudit) -> Receipt:
        sites = range(len(self.engine.sites))
        before = digest_of_shrinks([self.plan.recipient.shrink(step, site) for site in sites])
        given, got = (
            digest_hex(digest_of_shrinks(shrinks)) if shrinks else MISSING
            for shrinks in (self.handover.replayed, arrived.replayed)
        )
        return Receipt(
            place=f"all {len(sites)} shrinks of {'the prefill' if step == 0 else f'step {step}'}",
            digest_before=digest_hex(before),
            digest_written=given,
            digest_consumed=got,
            landed=landed(given, got),
        )

    def _compare_operands(self, step: int) -> None:
        """Name the watched sites whose operand rows are not the recorded ones."""
        operands = self.handover.operands
        if not operands:
            return
        found = torch.cat(list(operands.values())).cpu()
        whose = self.plan.execution(self.plan.replays.get(step, Source.RECIPIENT))
        first = 0
        for at, site in operands:
            expected = whose.operand_digests(step, site)
            same = torch.equal(found[first : first + expected.shape[0]], expected)
            first += expected.shape[0]
            if not same:
                phase = "prefill" if step == 0 else f"step {step}"
                name = f"{self.engine.sites[site].name}, {phase}"
                self.run.changed_operands.append(name)
                if (at, site) == self.plan.strict_operand:
                    self.run.wrong_operand = name

    def _same_from_here(self, step: int) -> ArmRun | None:
        """Return a known arm whose continuation after this step is this one's by construction."""
        run, done = self.run, step - self.plan.start + 1
        if step < self.plan.last_planned_step:
            return None
        for other in self.known:
            if (
                len(other.states) >= done
                and other.plan.last_planned_step <= step
                and not other.plan.changes_cache
                and other.fed[:done] == run.fed
                and all(map(StepState.is_equal, run.states, other.states))
            ):
                return other
        return None

    def _take_the_rest(self, step: int, other: ArmRun) -> None:
        """Take what another arm showed after a step."""
        run, done = self.run, step - self.plan.start + 1
        run.choices += other.choices[done:]
        run.states += other.states[done:]
        run.fed += other.fed[done:]
        run.stop_reason = other.stop_reason
        run.stopped_early_at = step
