"""Made-up pairs for the views: real values of fliptrace.verdicts around traces that live in memory."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fliptrace.grids import Grid
from fliptrace.manifest import Manifest, differing_keys
from fliptrace.numerics import CoordinateClass, boundary_report, special_difference, ulp_distance
from fliptrace.sites import Coordinate, Site
from fliptrace.trace import Closing, StepRecord, Trace
from fliptrace.verdicts import (
    CacheDifference,
    CoordinateDifference,
    Coverage,
    Fate,
    Flip,
    Origin,
    Outcome,
    PairDiff,
    PropagationSummary,
    RowDifference,
    ShrinkStatistics,
    StepComparison,
    TokenLogit,
)

MODULES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
PROMPT = (
    "Question",
    ":",
    " Mia",
    " has",
    " 12",
    " apples",
    " and",
    " gives",
    " 5",
    " away",
    ".",
    "\n",
    "How",
    " many",
    " are",
    " left",
    "?",
    "\n",
)
#: The paper's own example: one value on a BF16 boundary, the other 2 FP32 ULP below.
ON_BOUNDARY, BELOW = 0.010345458984375, 0.010345457121729851


class MemorySource:
    """A trace source that holds everything in memory."""

    def __init__(self, name, manifest, closing, steps):
        self.name, self.manifest, self.closing, self.steps = name, manifest, closing, steps

    def frame(self, step, kind):
        return None

    def frames(self, kind):
        return iter(())


def bits32(value: float) -> str:
    return f"0x{struct.unpack('<I', struct.pack('<f', value))[0]:08x}"


def bits16(value: float, dtype: torch.dtype) -> str:
    return f"0x{int(torch.tensor(value).to(dtype).view(torch.int16)) & 0xFFFF:04x}"


def coordinate_difference(
    reference=ON_BOUNDARY,
    candidate=BELOW,
    *,
    layer=2,
    module="mlp.up_proj",
    step=0,
    position=5,
    rank_index=3,
    dtype=torch.bfloat16,
):
    report = boundary_report(reference, candidate, dtype)
    site = Site.from_path(f"model.layers.{layer}.{module}")
    pair = torch.tensor([reference, candidate])

    def bits(value):
        return bits32(value) if dtype is torch.float32 else bits16(value, dtype)

    survives = bits(reference) != bits(candidate)
    return CoordinateDifference(
        coordinate=Coordinate(site, step, position, rank_index),
        reference=reference,
        candidate=candidate,
        reference_bits=bits32(reference),
        candidate_bits=bits32(candidate),
        coordinate_class=CoordinateClass.SURVIVING if survives else CoordinateClass.LATENT,
        rounded_dtype=str(dtype).removeprefix("torch."),
        rounded_reference_bits=bits(reference),
        rounded_candidate_bits=bits(candidate),
        distance_ulp=int(ulp_distance(pair[:1], pair[1:])[0]),
        boundary=report,
        special=special_difference(reference, candidate),
    )


def row_difference(
    coordinate=None, *, origin=Origin.ROOT, fate=Fate.PROPAGATING, latent=6, surviving=1, order=40
):
    first = coordinate or coordinate_difference()
    place = first.coordinate
    return RowDifference(
        site=place.site,
        step=place.step,
        position=place.position,
        order=order,
        origin=origin,
        row_class=first.coordinate_class,
        fate=fate,
        latent=latent,
        surviving=surviving if first.coordinate_class is CoordinateClass.SURVIVING else 0,
        coordinates=(first,),
    )


def grid_rows(layers):
    rows = []
    for layer in range(layers):
        sites = [Site.from_path(f"model.layers.{layer}.{module}") for module in MODULES]
        rows += [("shrink", site) for site in sites[:3]]
        rows += [("key", layer), ("value", layer)]
        rows += [("shrink", site) for site in sites[3:]]
    return tuple(rows)


def empty_grid(phase, rows, columns):
    shape = (len(rows), len(columns))
    return Grid(
        phase=phase,
        rows=rows,
        columns=tuple(columns),
        classes=torch.zeros(shape, dtype=torch.int8),
        magnitudes=torch.zeros(shape),
        ulps=torch.zeros(shape, dtype=torch.int64),
        origins=torch.zeros(shape, dtype=torch.int8),
        surviving=torch.zeros(shape, dtype=torch.int32),
    )


def busy_grid(phase, rows, columns, root_row, root_column, generator):
    """A grid as pairs have it: latent noise everywhere, survivors downstream of the root, one row not observed."""
    grid = empty_grid(phase, rows, columns)
    shape = grid.classes.shape
    latent = torch.rand(shape, generator=generator) < 0.5
    kv = torch.tensor([kind != "shrink" for kind, _ in rows])
    latent[kv] = False
    later = (torch.arange(shape[0])[:, None] > root_row) & (torch.arange(shape[1]) >= root_column)
    surviving = later & (torch.rand(shape, generator=generator) < 0.35)
    surviving[root_row, root_column] = True
    grid.classes[latent] = int(CoordinateClass.LATENT)
    grid.classes[surviving] = int(CoordinateClass.SURVIVING)
    scale = 10 ** (torch.rand(shape, generator=generator) * 3 - 9)
    growth = 1 + (torch.arange(shape[0])[:, None] - root_row).clamp(min=0) * 40.0
    grid.magnitudes[:] = torch.where(
        grid.classes > 0, scale * torch.where(surviving, growth, 1.0), 0
    )
    grid.ulps[:] = torch.where(grid.classes > 0, 1 + (scale * 1e9).long(), 0)
    grid.surviving[:] = surviving.int() * 3
    shrink = ~kv[:, None]
    grid.origins[latent & shrink] = 1
    grid.origins[surviving & shrink] = 2
    grid.origins[root_row, root_column] = 1
    grid.classes[3, shape[1] // 2 :] = int(CoordinateClass.NOT_OBSERVED)
    grid.magnitudes[3, shape[1] // 2 :] = 0
    return grid


def make_trace(name, pieces, *, prompt=PROMPT, manifest=None, complete=True, ids=None):
    prompt_ids = tuple(range(100, 100 + len(prompt)))
    ids = ids or [200 + number for number in range(len(pieces))]
    steps = []
    for number, token in enumerate(ids):
        steps.append(
            StepRecord(
                step=number,
                first_position=0 if number == 0 else len(prompt_ids) + number - 1,
                token_ids=prompt_ids if number == 0 else (ids[number - 1],),
                chosen=token,
                top_values=(17.25, 16.0),
                top_ids=(token, token + 1),
                tied=1,
                cache_digest="0" * 32,
                cache_digest_full="",
                frames=("shrink", "cache"),
            )
        )
    closing = Closing(
        complete=complete,
        stop_reason="end of sequence" if complete else "killed",
        steps=len(steps),
        text="".join(pieces),
        piece_texts=tuple(pieces),
        prompt_piece_texts=tuple(prompt),
        not_observed=(),
    )
    sections = manifest or {
        "model": {"name": "tiny-llama", "sha256": "ab" * 32, "dtype": "bfloat16"},
        "adapter": {"name": "tiny-lora", "rank": 16, "alpha": 32},
        "prompt": {"ids_sha256": "cd" * 32},
        "reduction": {"identity": "atomic:8/32", "schedule": f"simulated schedule, {name}"},
        "engine": {"name": "transformers", "device": "cpu"},
        "decoding": {"max_new_tokens": 64, "sampler": "greedy"},
        "environment": {"torch": "2.13.0", "threads": 1, "deterministic_algorithms": False},
        "recording": {"modules": False},
    }
    return Trace(MemorySource(f"{name}.trace", Manifest(sections), closing, steps))


COMMON = [" Mia", " starts", " with", " 12", " apples", ".", "\n", "She", " gives", " away", " 5"]
REFERENCE = [
    *COMMON,
    ",",
    " so",
    " 12",
    " -",
    " 5",
    " =",
    " 7",
    ".",
    "\n",
    "Final",
    " answer",
    ":",
    " 7",
]
CANDIDATE = [*COMMON, ".", "\n", "12", " -", " 5", " =", " 8", "\n", "Final", " answer", ":", " 8"]


def make_pair(
    outcome=Outcome.TOKEN,
    *,
    layers=4,
    prompt=PROMPT,
    reference_pieces=None,
    candidate_pieces=None,
    columns=None,
    **changes,
):
    """A pair with its diff. `changes` replace fields of the diff."""
    flipped = outcome is Outcome.TOKEN
    before = list(reference_pieces or REFERENCE)
    after = list(candidate_pieces or (CANDIDATE if flipped else before))
    same = outcome is Outcome.IDENTICAL
    step = next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), 0)
    last = step if flipped else len(before) - 1
    ids_after = [200 + n if n < step else 300 + n for n in range(len(after))] if flipped else None
    reference = make_trace("reference", before, prompt=prompt)
    candidate = make_trace("candidate", after, prompt=prompt, ids=ids_after)
    if same:
        candidate = make_trace(
            "candidate", after, prompt=prompt, manifest=dict(reference.manifest.sections)
        )
    root = row_difference()
    generator = torch.Generator().manual_seed(7)
    rows = grid_rows(layers)
    prefill, decode = range(columns or len(prompt)), range(1, (columns or last) + 1)
    if same:
        grids = {
            "prefill": empty_grid("prefill", rows, prefill),
            "decode": empty_grid("decode", rows, decode),
        }
    else:
        root_row = rows.index(("shrink", root.site))
        grids = {
            "prefill": busy_grid("prefill", rows, prefill, root_row, root.position, generator),
            "decode": busy_grid("decode", rows, decode, 0, 0, generator),
        }
        if outcome is Outcome.LATENT:
            for grid in grids.values():
                grid.classes.clamp_(max=1)
                grid.surviving.zero_()
    steps = tuple(
        StepComparison(
            step=number,
            reference_margin=0.0
            if number == 4
            else (0.125 if number == last else 0.5 + number % 5 * 1.7),
            candidate_margin=0.0625 if number == last else 0.5 + number % 5 * 1.7,
            reference_tied=2 if number == 4 else 1,
            candidate_tied=1,
            logits_differ=not same,
            largest_logit_difference=0.0 if same else 0.0625,
            shrink_latent=0 if same else 812,
            shrink_surviving=0 if outcome in (Outcome.IDENTICAL, Outcome.LATENT) else 9,
            shrink_elements=28 * 16,
            cache_differs=outcome in (Outcome.TOKEN, Outcome.SURVIVING),
        )
        for number in range(last + 1)
    )
    flip = (
        Flip(
            step=step,
            reference_token=TokenLogit(200 + step, before[step], 17.25, 17.125),
            candidate_token=TokenLogit(300 + step, after[step], 17.125, 17.1875),
            reference_margin=0.125,
            candidate_margin=0.0625,
            reference_tied=1,
            candidate_tied=1,
            decided_by_tie_break=(),
            tie_rule="lowest token id",
            tokens_after=(len(before) - step, len(after) - step),
        )
        if flipped
        else None
    )
    survives = outcome in (Outcome.TOKEN, Outcome.SURVIVING)
    latent = row_difference(
        coordinate_difference(0.5, 0.50000006, layer=0, module="self_attn.q_proj", position=0),
        order=0,
    )
    absorbed = row_difference(
        coordinate_difference(layer=1, module="mlp.gate_proj", position=3),
        fate=Fate.ABSORBED,
        order=20,
    )
    cache = (
        tuple(
            CacheDifference(
                layer=layer,
                step=0,
                keys=108 + layer,
                values=176,
                elements=2 * 64 * len(prompt),
                positions=(5, 7),
                largest=3.1e-4,
            )
            for layer in range(3, layers)
        )
        if survives
        else ()
    )
    diff = PairDiff(
        outcome=outcome,
        same_reduction=True,
        rounded_dtype="bfloat16",
        flip=flip,
        first_difference=None if same else latent,
        first_surviving=absorbed if survives else None,
        first_propagating=root if survives else None,
        first_variant=None,
        foreign_root=None,
        roots=(absorbed, root) if survives else (),
        root_rows=0 if same else 214,
        surviving_root_rows=2 if survives else 0,
        statistics=ShrinkStatistics(
            3584,
            0 if same else 2001,
            2 if survives else 0,
            16128,
            0 if same else 9120,
            41 if survives else 0,
        ),
        cache_differences=cache,
        steps=steps,
        grids=grids,
        propagation=PropagationSummary(
            (
                "From layer 2 mlp.up_proj the difference enters layer 2 mlp.down_proj.",
                "It reaches the K/V cache in layer 3.",
            ),
            nodes=311,
            reaches_flip=flipped,
            path=("layer 2 mlp.up_proj", "layer 3 K", "logits"),
            separable=False,
        )
        if survives
        else None,
        coverage=Coverage(
            steps_compared=last + 1,
            records_compared=1234,
            elements_compared=16128,
            not_observed=("modules between shrinks were not recorded (--modules)",),
            missing=(),
            observer_control="recorded and unrecorded runs agreed in 24 tokens and all logits digests.",
        ),
        manifest_differences=tuple(differing_keys(reference.manifest, candidate.manifest)),
        generated=(len(before), len(after)),
    )
    return SimpleNamespace(
        diff=dataclasses.replace(diff, **changes), reference=reference, candidate=candidate
    )


#: Texts that try to become more than text. Each script would set window.pwned.
HOSTILE = (
    "<script>window.pwned=1</script>",
    "</script><script>window.pwned=2</script>",
    "<!--<script>",
    "<img src=x onerror=window.pwned=3>",
    "\"'><svg onload=window.pwned=4>",
    "&lt;script&gt;window.pwned=5&lt;/script&gt;",
    '<a href="javascript:window.pwned=6">link</a>',
    "{{ 7*7 }}{% raw %}{# #}",
    "%{customdata}${window.pwned=7}$\\href{javascript:window.pwned=8}{x}$",
    "\u202eevil\u2066\u200b\ufeff",
    "\u2028\u2029\x00\x1b[31mred\x07\x85",
    "\ud800 lone \udfff",
    "]]></style><style>*{display:none}</style>",
    "A" * 20000,
    "[red]rich[/red]",
    "\r\n\t",
    "<base href=https://example.invalid/><meta http-equiv=refresh content=0>",
)


def make_hostile_pair():
    pair = make_pair(
        prompt=(*HOSTILE, " end"),
        reference_pieces=[*HOSTILE, "<b>x"],
        candidate_pieces=[*HOSTILE[:-1], "</mark><script>window.pwned=9</script>", HOSTILE[1]],
    )
    for trace, text in ((pair.reference, HOSTILE[1]), (pair.candidate, HOSTILE[3])):
        trace.source.name = text
        trace.source.manifest = Manifest(
            {"model": {"name": text, text: [text, {"x": text}]}, text: {"k": "\udc80"}}
        )
        trace.source.closing = dataclasses.replace(trace.closing, stop_reason=text)
    evil = Site(path="model.layers.1." + HOSTILE[3], layer=1, module=HOSTILE[3], slice=HOSTILE[6])
    diff = pair.diff
    grids = {}
    for name, grid in diff.grids.items():
        grids[name] = dataclasses.replace(grid, rows=(("shrink", evil), *grid.rows[1:]))
    coverage = dataclasses.replace(diff.coverage, not_observed=HOSTILE, missing=HOSTILE)
    pair.diff = dataclasses.replace(
        diff,
        grids=grids,
        coverage=coverage,
        manifest_differences=tuple(
            differing_keys(pair.reference.manifest, pair.candidate.manifest)
        ),
        roots=(dataclasses.replace(diff.roots[0], site=evil), *diff.roots[1:]),
        propagation=dataclasses.replace(diff.propagation, sentences=HOSTILE),
    )
    return pair


@pytest.fixture
def pairs():
    """The builders, as a namespace."""
    return SimpleNamespace(
        make=make_pair,
        hostile=make_hostile_pair,
        corpus=HOSTILE,
        coordinate=coordinate_difference,
        row=row_difference,
        grid=empty_grid,
        rows=grid_rows,
        trace=make_trace,
    )


@pytest.fixture(scope="session")
def made(load_neighbour):
    """The module that makes up investigations."""
    return load_neighbour(Path(__file__).parent / "made_up_interventions.py")
