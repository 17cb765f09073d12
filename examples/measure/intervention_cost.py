"""What an intervention costs: beside re-running the prompt from scratch, and in memory over a thousand of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fliptrace.judgements import Screening
from fliptrace_interventions import CacheEdit, Edit, GivenValue, ReplayShrinks, ShrinkEdit, Source
from fliptrace_interventions.arms import ArmSettings, run_arm
from fliptrace_interventions.pushing import pushed_across
from fliptrace_interventions.searches.roots import root_rows
from fliptrace_interventions.searches.trials import Trials
from fliptrace_interventions.selection import resolve
from fliptrace_interventions.workbench import EXECUTIONS, Workbench

#: How many layers' caches are edited one by one.
LAYERS = 4


def speed(workbench: Workbench) -> dict[str, Any]:
    """Time all roots of a pair, and cache edits just before the flip, beside the same experiments from scratch.

    From scratch: each arm, edited and unedited, starts with the prompt and an empty cache, hands over the recipient's
    recorded shrinks up to its edit and runs to the flip step. Nothing is restored, shared or stopped early. Where the
    unedited arm loses the recipient's token neither way runs the edited one.
    """
    started = time.perf_counter()
    workbench.reconstruct()
    reconstruction = time.perf_counter() - started
    rows = root_rows(Trials(workbench))
    edits: list[tuple[str, Edit]] = [
        ("prefill root" if row.step == 0 else "decode root", ShrinkEdit.of_row(row)) for row in rows
    ]
    edits += [("cache just before the flip", edit) for edit in _cache_edits(workbench)[:LAYERS]]
    experiments = [
        _compare(workbench, kind, edit, who) for kind, edit in edits for who in EXECUTIONS
    ]
    kinds = dict.fromkeys(kind for kind, _ in edits)
    roots = [e for e in experiments if e["kind"].endswith("root")]
    return {
        "flip_step": workbench.target_step,
        "roots": len(rows),
        "roots_in_prefill": sum(row.step == 0 for row in rows),
        "reconstruction_seconds": reconstruction,
        "whole_search": _ratio(roots) if roots else None,
        "whole_search_with_reconstruction": _ratio(roots, reconstruction) if roots else None,
        "by_kind": {
            kind: {
                **_ratio([e for e in experiments if e["kind"] == kind]),
                "ratios": _quartiles([e["ratio"] for e in experiments if e["kind"] == kind]),
            }
            for kind in kinds
        },
        "experiments": experiments,
    }


def _cache_edits(workbench: Workbench) -> list[CacheEdit]:
    """Return the edits of one layer's cache each that change anything."""
    step = workbench.target_step
    layers = workbench.engine.cache_layers if step > 0 else ()
    edits = [CacheEdit(step, (layer,)) for layer in layers]
    return [edit for edit in edits if workbench.select((edit,)).differing]


def _compare(workbench: Workbench, kind: str, edit: Edit, recipient: str) -> dict[str, Any]:
    before, started = workbench.forwards, time.perf_counter()
    screening = workbench.screen((edit,), recipient)
    _finish(workbench)
    ours = time.perf_counter() - started
    forwards = workbench.forwards - before
    started = time.perf_counter()
    tokens, from_scratch = _from_scratch(workbench, edit, recipient)
    _finish(workbench)
    scratch = time.perf_counter() - started
    return {
        "kind": kind,
        "edit": edit.name,
        "recipient": recipient,
        "seconds": ours,
        "seconds_from_scratch": scratch,
        "ratio": scratch / ours,
        "forwards": forwards,
        "forwards_from_scratch": from_scratch,
        "stopped_early": screening.edited is not None
        and screening.edited.stopped_early_at is not None,
        "same_tokens": tokens == _tokens(screening),
    }


def _tokens(screening: Screening) -> tuple[int | None, ...]:
    return tuple(arm.token_id for arm in (screening.unedited, screening.edited) if arm is not None)


def _from_scratch(
    workbench: Workbench, edit: Edit, recipient: str
) -> tuple[tuple[int | None, ...], int]:
    """Run both arms of an experiment from the prompt on; return their tokens and how many forwards they took."""
    own = workbench.execution(recipient)
    donor = workbench.execution("candidate" if recipient == "reference" else "reference")
    start = edit.first_step
    past = (ReplayShrinks(Source.RECIPIENT, (0, start - 1)),) if start else ()
    target = workbench.target_step
    selection, plan = resolve((*past, edit), own, donor, workbench.engine, target, "recorded")
    if selection.not_applicable:
        return (), 0
    tokens, forwards = [], 0
    with workbench.engine.reducing(workbench.reduction, None):
        for arm in (plan.unedited(), plan):
            run = run_arm(workbench.engine, arm, ArmSettings())
            choice = run.choice(target)
            tokens.append(None if choice is None else choice.token)
            forwards += run.forwards
            if tokens[0] != own.token_ids[target]:
                break
    return tuple(tokens), forwards


def _ratio(experiments: Sequence[dict[str, Any]], more: float = 0.0) -> dict[str, Any]:
    ours = sum(e["seconds"] for e in experiments) + more
    scratch = sum(e["seconds_from_scratch"] for e in experiments)
    return {
        "experiments": len(experiments),
        "seconds": ours,
        "seconds_from_scratch": scratch,
        "ratio": scratch / ours,
        "ratio_of_forwards": sum(e["forwards_from_scratch"] for e in experiments)
        / max(1, sum(e["forwards"] for e in experiments)),
        "stopped_early": sum(e["stopped_early"] for e in experiments),
        "same_tokens": all(e["same_tokens"] for e in experiments),
    }


def _quartiles(values: Sequence[float]) -> list[float]:
    """Return least, quartiles and largest."""
    inner = statistics.quantiles(values, n=4) if len(values) > 1 else list(values) * 3
    return [min(values), *inner, max(values)]


def _finish(workbench: Workbench) -> None:
    if workbench.engine.device.type == "cuda":
        torch.cuda.synchronize(workbench.engine.device)


def memory(workbench: Workbench, count: int, every: int) -> dict[str, Any]:
    """Screen many different edits and watch the process: resident memory, and what torch holds on a GPU."""
    samples: list[tuple[int, float, float]] = []
    started = time.perf_counter()
    for number, (edits, recipient) in enumerate(_different_edits(workbench, count)):
        if number % every == 0:
            samples.append((number, *_held(workbench)))
        workbench.screen(edits, recipient)
    samples.append((count, *_held(workbench)))
    # Arms that are remembered, and buffers of libraries, fill up in the beginning.
    settled = [sample for sample in samples if sample[0] >= count // 4]
    return {
        "interventions": count,
        "samples_resident_mib_gpu_mib": samples,
        "growth_mib_after_the_first_quarter": settled[-1][1] - settled[0][1],
        "gpu_growth_mib_after_the_first_quarter": settled[-1][2] - settled[0][2],
        "seconds": time.perf_counter() - started,
    }


def _different_edits(workbench: Workbench, count: int) -> Iterator[tuple[tuple[Edit, ...], str]]:
    """Yield edits of all kinds in the last steps before the flip: pushed coordinates, and parts of the cache."""
    choose = random.Random(1)
    engine, target = workbench.engine, workbench.target_step
    for number in range(count):
        recipient = EXECUTIONS[number % 2]
        step = choose.randint(max(0, target - 2), target)
        if number % 5 == 4 and step > 0:
            layer = choose.choice(engine.cache_layers)
            yield (CacheEdit(step, (layer,)),), recipient
            continue
        own = workbench.execution(recipient)
        site = choose.randrange(len(engine.sites))
        shrink = own.shrink(step, site).cpu()
        row, rank = (choose.randrange(size) for size in shrink.shape)
        value = pushed_across(shrink[row, rank], choose.randint(1, 4), engine.dtype)
        if value is None:
            value = shrink[row, rank] * 2
        bits = int(value.view(torch.int32)) & 0xFFFFFFFF
        position = own.positions(step)[row]
        path = engine.sites[site].path
        edit = ShrinkEdit(path, step, (position,), (rank,), GivenValue(bits), expect=1)
        yield (edit,), recipient


def _held(workbench: Workbench) -> tuple[float, float]:
    """Return resident memory and allocated GPU memory in MiB."""
    status = Path("/proc/self/status").read_text("ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    device = workbench.engine.device
    gpu = torch.cuda.memory_allocated(device) / 2**20 if device.type == "cuda" else 0.0
    return int(line.split()[1]) / 1024, gpu
