"""What the searches over a pair found, and the investigation that holds them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fliptrace.judgements.claims import Arm, Judgement, Screening, Verdict
from fliptrace.judgements.documents import SCHEMA_VERSION, Value


@dataclass(frozen=True, slots=True)
class Reconstruction(Value):
    """A recorded execution replayed from an empty cache by its token ids and shrinks alone.

    Attributes:
        which: ``reference`` or ``candidate``.
        steps: how many steps were replayed.
        equal: every cache row and every logits row was bit-equal to the record.
        first_mismatch: where it was not, None when equal.
        restored_start: the cache restored from the record at the target step, and that step's recorded shrinks, gave
            the recorded logits bit by bit.
    """

    which: str
    steps: int
    equal: bool
    first_mismatch: str | None
    restored_start: bool


@dataclass(frozen=True, slots=True)
class RootResult(Value):
    """One root row of the pair, substituted whole.

    Attributes:
        name: for people; site: its path; step, position: which row; order: of the record within its step.
        surviving: how many of its coordinates survive rounding.
        edits: as JSON.
        screenings: one per direction that was run.
        verdict: where it was proved.
        fate: ``propagating`` or ``absorbed`` at the end of its own projection, ``not observed``.
    """

    name: str
    site: str
    step: int
    position: int
    order: int
    surviving: int
    edits: tuple[dict[str, Any], ...]
    screenings: tuple[Screening, ...]
    verdict: Verdict | None = None
    fate: str = "not observed"


@dataclass(frozen=True, slots=True)
class CoordinateResult(Value):
    """One coordinate, substituted alone.

    Attributes:
        name: for people; site: its path; step, position, rank_index: which one.
        reference: FP32 value of the reference; candidate likewise.
        reference_bits: its 32 bits as ``0x........``; candidate_bits likewise.
        rounded_reference_bits: after rounding; rounded_candidate_bits likewise.
        boundary: the rounding boundary between them, None where there is none.
        edits: as JSON.
        screenings: one per direction that was run.
        verdict: where it was proved.
    """

    name: str
    site: str
    step: int
    position: int
    rank_index: int
    reference: float
    candidate: float
    reference_bits: str
    candidate_bits: str
    rounded_reference_bits: str
    rounded_candidate_bits: str
    boundary: float | None
    edits: tuple[dict[str, Any], ...]
    screenings: tuple[Screening, ...]
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class MinimalSet(Value):
    """A set of edits that flips the token.

    Attributes:
        edits: as JSON; names: the same for people.
        recipient: in whose execution.
        runs: arms that it took.
        one_minimal: each single removal was tried and no longer flips. False: the budget ended before that, or of
            some removals nothing can be said.
        verdict: where it was proved.
        unit: of what it is a set: ``rows`` or ``coordinates``; whole: how many of them there were at the start.
        between: what the shrinks between the edited sites were: ``recorded`` or ``recomputed``.
        undecided: how many single removals are void, so that nothing can be said of them.
    """

    edits: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    recipient: str
    runs: int
    one_minimal: bool
    verdict: Verdict | None = None
    unit: str = "rows"
    whole: int = 0
    between: str = "recorded"
    undecided: int = 0


@dataclass(frozen=True, slots=True)
class LayerNeed(Value):
    """One layer's part in a cache substitution.

    Attributes:
        layer: its number.
        recipient: in whose execution.
        sufficient_alone: the donor's cache of this layer alone gives the donor's token; None when not run.
        needed: with every other layer's cache from the donor the donor's token is not reached; None when not run.
        differing_elements: of the incoming cache of this layer.
    """

    layer: int
    recipient: str
    sufficient_alone: bool | None
    needed: bool | None
    differing_elements: int


@dataclass(frozen=True, slots=True)
class CachePartNeed(Value):
    """Keys or values of some layers and their part in a cache substitution.

    Attributes:
        part: ``keys`` or ``values``.
        layers: which layers.
        recipient: in whose execution.
        sufficient_alone: the donor's values of this part alone give the donor's token; None when not run.
        needed: with all the rest of the cache from the donor the donor's token is not reached; None when not run.
        differing_elements: of this part of the incoming cache.
    """

    part: str
    layers: tuple[int, ...]
    recipient: str
    sufficient_alone: bool | None
    needed: bool | None
    differing_elements: int


@dataclass(frozen=True, slots=True)
class FirstCacheStep(Value):
    """The first step at which the donor's incoming cache alone flips the token at the target step.

    Attributes:
        recipient: in whose execution.
        step: None when not found; tried: steps that were run, in order.
        runs: arms that it took.
        sentence: for people; says whether every earlier step was tried.
        flips: the steps, of those tried, at which they flip it: not always all from the first one on.
    """

    recipient: str
    step: int | None
    tried: tuple[int, ...]
    runs: int
    sentence: str
    flips: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TwoByTwo(Value):
    """Cache of either execution × the target step's shrinks of either execution.

    Attributes:
        reference_cache_reference_shrinks: the arm; the other three likewise.
        decided_by: ``cache``, ``shrinks``, ``either``, ``both together`` or ``neither``.
        sentence: for people.
    """

    reference_cache_reference_shrinks: Arm
    reference_cache_candidate_shrinks: Arm
    candidate_cache_reference_shrinks: Arm
    candidate_cache_candidate_shrinks: Arm
    decided_by: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Investigation(Value):
    """The whole story of a pair.

    Attributes:
        judgement: SUFFICIENT: a sufficient cause was found; VOID: the pair cannot be judged; else none was found.
        sentence: the same for people, with the number of runs.
        target_step: the step whose token was judged.
        reference_token: id and text; candidate_token likewise.
        reduction: of the continuations; repeats, shams, seed: as asked.
        fingerprints: of the two traces.
        reconstruction: of reference and candidate.
        cache_substitution: the whole cache before the target step.
        roots_in_pair: how many root rows survive in the pair; roots: those that were tried, in execution order.
        coordinates: single coordinates that were tried; best_coordinate: the first sufficient one.
        minimal_set: a 1-minimal set that flips, None when not found or not run.
        layers, first_cache_step, two_by_two: see there.
        continuations: free arms to the end of the answer: unedited and edited by the best cause found.
        runs: edited arms, controls and shams (unedited arms are shared and, like reconstructions, not counted);
            forwards: forward passes, all of them; seconds: of wall time.
        budget: what was allowed, in words.
        not_covered: sentences.
        environment: where it ran; environment_differences: (key, recorded, now).
        schema: version of this document.
        all_roots: all root rows together as one edit, per direction and way between the sites.
        minimal_sets: per direction a set of rows and, where no single coordinate is enough in it, one of coordinates:
            the set of rows taken apart. ``minimal_set`` is the smallest of rows, ``coordinate_set`` of coordinates.
        cache_parts: keys and values apart: of all layers, and of each layer that is enough or needed.
        sentences: what was found, for people, the most informative first.
    """

    judgement: Judgement
    sentence: str
    target_step: int
    reference_token: tuple[int, str]
    candidate_token: tuple[int, str]
    reduction: str
    repeats: int
    shams: int
    seed: int
    fingerprints: tuple[str, str]
    reconstruction: tuple[Reconstruction, ...]
    cache_substitution: Verdict | None
    roots_in_pair: int
    roots: tuple[RootResult, ...]
    coordinates: tuple[CoordinateResult, ...]
    best_coordinate: CoordinateResult | None
    minimal_set: MinimalSet | None
    layers: tuple[LayerNeed, ...]
    first_cache_step: FirstCacheStep | None
    two_by_two: TwoByTwo | None
    continuations: tuple[Arm, ...]
    runs: int
    forwards: int
    seconds: float
    budget: str
    not_covered: tuple[str, ...]
    environment: dict[str, Any]
    environment_differences: tuple[tuple[str, Any, Any], ...]
    schema: int = SCHEMA_VERSION
    all_roots: tuple[Screening, ...] = ()
    coordinate_set: MinimalSet | None = None
    minimal_sets: tuple[MinimalSet, ...] = ()
    cache_parts: tuple[CachePartNeed, ...] = ()
    sentences: tuple[str, ...] = ()
