"""Made-up results of interventions for the views: real values of fliptrace.judgements, no model."""

from __future__ import annotations

import dataclasses

from fliptrace.judgements import (
    CAVEAT,
    Arm,
    CachePartNeed,
    Control,
    CoordinateResult,
    DirectionResult,
    FirstCacheStep,
    Footprint,
    FootprintLayer,
    Investigation,
    Judgement,
    LayerNeed,
    MinimalSet,
    Receipt,
    Reconstruction,
    RootResult,
    Screening,
    Specificity,
    TwoByTwo,
    Verdict,
)
from fliptrace.views.interventions import ClaimResult, InterventionReport

#: The tokens of the made-up pair in conftest.py at its flip.
STEP, REFERENCE_TOKEN, CANDIDATE_TOKEN = 11, (211, ","), (311, ".")
DIGEST = "0123456789abcdef" * 2
#: The paper's example (section 6.2): one value on the boundary, one just below it.
REFERENCE_VALUE, CANDIDATE_VALUE = 0.010345458984375, 0.010345457121729851


def receipt(place="layer 2 mlp.up_proj, prefill", landed=True):
    consumed = DIGEST if landed else ""
    return Receipt(place, "f" * 32, DIGEST, consumed, landed)


def arm(name="unedited", token=REFERENCE_TOKEN, other=CANDIDATE_TOKEN, margin=0.125, **changes):
    """An arm that chose `token` before `other`; margin 0 is a tie of the two."""
    value = Arm(
        name=name,
        first_step=0,
        target_step=STEP,
        token_id=token[0],
        token_text=token[1],
        top_values=(17.25, 17.25 - margin),
        top_ids=(token[0], other[0]),
        tied=2 if margin == 0 else 1,
        logits_digest=DIGEST,
        repeats=2,
        repeatable=True,
        forwards=12,
        receipts=(receipt(),) if name != "unedited" else (),
        token_ids=(token[0],),
    )
    return dataclasses.replace(value, **changes)


def direction(recipient="reference", judgement=Judgement.SUFFICIENT, **changes):
    own, other = REFERENCE_TOKEN, CANDIDATE_TOKEN
    if recipient == "candidate":
        own, other = other, own
    sufficient = judgement is Judgement.SUFFICIENT
    edited = arm("edited", other, own, 0.0) if sufficient else arm("edited", own, other)
    value = DirectionResult(
        recipient=recipient,
        donor="candidate" if recipient == "reference" else "reference",
        recipient_token=own[0],
        donor_token=other[0],
        unedited=arm("unedited", own, other),
        edited=edited,
        free=dataclasses.replace(
            edited, name="edited, free", text="…so 7.\nFinal answer: 7", answer="7"
        ),
        free_unedited=arm("unedited, free", own, other, text="…so 8.", answer="8"),
        controls=(
            Control("self-substitution", True, "The recipient's own value changed nothing."),
            Control("latent sham", None, "No other FP32 value rounds alike."),
        ),
        specificity=Specificity(
            20, 20, 3, 1, 0, 1, "layer 2 mlp.up_proj, prefill", "3 of 20 surviving shams flip too."
        ),
        footprint=Footprint(
            108,
            176,
            0,
            (FootprintLayer(3, 108, 176, 108, 176, (5,), True, True),),
            True,
            True,
            "108 key and 176 value elements change, first in layer 3.",
        ),
        judgement=judgement,
        reasons=(),
    )
    return dataclasses.replace(value, **changes)


def verdict(judgement=Judgement.SUFFICIENT, claim="cache before step 11 := the donor's", **changes):
    value = Verdict(
        judgement=judgement,
        claim=claim,
        edits=({"edit": "cache", "step": STEP},),
        directions=(direction(judgement=judgement), direction("candidate", judgement)),
        reasons=(),
        caveat=CAVEAT,
        target_step=STEP,
        reduction="unsplit/64",
        repeatable_by_construction=True,
        between="recorded",
        environment={"engine": {"name": "transformers"}},
        environment_differences=(),
    )
    return dataclasses.replace(value, **changes)


def screening(recipient="reference", judgement=Judgement.NOT_SUFFICIENT):
    result = direction(recipient, judgement)
    return Screening(
        recipient=recipient,
        donor=result.donor,
        recipient_token=result.recipient_token,
        donor_token=result.donor_token,
        edits=({"edit": "shrink", "site": "model.layers.2.mlp.up_proj", "step": 0},),
        judgement=judgement,
        reasons=(),
        unedited=result.unedited,
        edited=dataclasses.replace(result.edited, stopped_early_at=0)
        if judgement is Judgement.NOT_SUFFICIENT
        else result.edited,
    )


def coordinate(judgement=Judgement.SUFFICIENT, **changes):
    value = CoordinateResult(
        name="layer 2 mlp.up_proj, prefill, token position 5, rank index 3",
        site="model.layers.2.mlp.up_proj",
        step=0,
        position=5,
        rank_index=3,
        reference=REFERENCE_VALUE,
        candidate=CANDIDATE_VALUE,
        reference_bits="0x3c298000",
        candidate_bits="0x3c297ffe",
        rounded_reference_bits="0x3c2a",
        rounded_candidate_bits="0x3c29",
        boundary=REFERENCE_VALUE,
        edits=({"edit": "shrink", "site": "model.layers.2.mlp.up_proj", "step": 0},),
        screenings=(screening("reference", judgement), screening("candidate", judgement)),
        verdict=verdict(
            judgement, "shrink of layer 2 mlp.up_proj, prefill, token position 5, rank index 3"
        ),
    )
    return dataclasses.replace(value, **changes)


def root(number=0, judgement=Judgement.NOT_SUFFICIENT, **changes):
    value = RootResult(
        name=f"layer {number} mlp.gate_proj, prefill, token position 3",
        site=f"model.layers.{number}.mlp.gate_proj",
        step=0,
        position=3,
        order=20 + number,
        surviving=1,
        edits=({"edit": "shrink", "site": f"model.layers.{number}.mlp.gate_proj", "step": 0},),
        screenings=(screening("reference", judgement), screening("candidate", judgement)),
    )
    return dataclasses.replace(value, **changes)


def minimal_set():
    return MinimalSet(
        edits=({"edit": "shrink", "site": "model.layers.2.mlp.gate_proj", "step": 0},),
        names=("layer 2 mlp.gate_proj, prefill, token position 3",),
        recipient="reference",
        runs=5,
        one_minimal=True,
        whole=3,
    )


def investigation(judgement=Judgement.SUFFICIENT, **changes):
    """The whole story; everything in it can be replaced."""
    best = coordinate() if judgement is Judgement.SUFFICIENT else None
    value = Investigation(
        judgement=judgement,
        sentence="One coordinate alone flips the token, in both directions (31 runs)."
        if best
        else "No sufficient cause was found within 31 runs.",
        target_step=STEP,
        reference_token=REFERENCE_TOKEN,
        candidate_token=CANDIDATE_TOKEN,
        reduction="unsplit/64",
        repeats=2,
        shams=20,
        seed=0,
        fingerprints=("a" * 32, "b" * 32),
        reconstruction=(
            Reconstruction("reference", 12, True, None, True),
            Reconstruction("candidate", 12, True, None, True),
        ),
        cache_substitution=verdict(),
        roots_in_pair=4,
        roots=(root(0), root(1, Judgement.CHANGES), root(2, Judgement.SUFFICIENT)),
        coordinates=(coordinate(),) if best else (),
        best_coordinate=best,
        minimal_set=minimal_set(),
        minimal_sets=(minimal_set(),),
        layers=tuple(
            LayerNeed(layer, "reference", layer == 3, layer == 3, 100 * layer) for layer in range(4)
        ),
        first_cache_step=FirstCacheStep(
            "reference", 4, (11, 6, 4, 3), 4, "The cache alone flips the token from step 4 on."
        ),
        two_by_two=TwoByTwo(
            arm("cache of the reference, its shrinks"),
            arm("cache of the reference, the candidate's shrinks"),
            arm("cache of the candidate, the reference's shrinks", CANDIDATE_TOKEN, margin=0.0),
            arm("cache of the candidate, its shrinks", CANDIDATE_TOKEN, REFERENCE_TOKEN),
            "cache",
            "The past decided: the cache gives its own token whichever shrinks follow.",
        ),
        continuations=(
            arm(
                "unedited",
                text="Mia starts with 12. She gives 5 away, so 7.\nFinal answer: 7",
                answer="7",
                correct=True,
                stop_reason="end of sequence",
            ),
            arm(
                "edited",
                CANDIDATE_TOKEN,
                text="Mia starts with 12. She gives 5 more.\nFinal answer: 8",
                answer="8",
                correct=False,
                stop_reason="end of sequence",
            ),
        ),
        runs=31,
        forwards=402,
        seconds=64.2,
        budget="400 runs",
        not_covered=("Roots after the first 3 were not tried: the budget ended.",),
        environment={"engine": {"name": "transformers"}},
        environment_differences=(("environment.processor", "AMD EPYC", "Other"),),
        all_roots=(screening("reference", Judgement.SUFFICIENT), screening("candidate")),
        cache_parts=(CachePartNeed("keys", (2, 3), "reference", True, False, 510),),
        sentences=(
            "One coordinate alone flips the token, in both directions (31 runs).",
            "Layer 2 mlp.up_proj: 0.010345458984375 in the reference, 0.010345457121729851 in the candidate.",
            "Proof, reference with the candidate's: sufficient; 3 of 20 shams flip too.",
            "The past decided: the cache gives its own token whichever shrinks follow.",
            CAVEAT,
        )
        if best
        else (),
    )
    return dataclasses.replace(value, **changes)


def report(judgement=Judgement.SUFFICIENT, **changes):
    """What a page is given: the whole story and one claim of one's own."""
    own = ClaimResult(verdict(Judgement.CHANGES, "tokens of step 3 := 7"))
    return InterventionReport(
        investigation(judgement, **changes), (own,), "trace-intervene pair --seed 0"
    )


def hostile_report(corpus):
    """Every text of a report replaced by texts that try to become more than text."""
    texts = iter(corpus * 50)

    def spoil(value):
        if isinstance(value, str) and not isinstance(value, Judgement):
            return next(texts)
        if isinstance(value, tuple):
            return tuple(spoil(item) for item in value)
        if dataclasses.is_dataclass(value):
            kinds = {"recipient", "donor", "which", "between", "decided_by", "fate", "unit", "part"}
            kept = {*kinds, "site"}
            return dataclasses.replace(
                value,
                **{
                    item.name: spoil(getattr(value, item.name))
                    for item in dataclasses.fields(value)
                    if item.name not in kept
                    and "bits" not in item.name
                    and "digest" not in item.name
                },
            )
        return value

    return spoil(report())
