"""What ran, and how long the search for the candidate was, as sentences.

Both come from the manifests, which may be old, foreign or redacted: what a manifest does not say is left out, never
guessed. How often runs agreed is told with its bound and with what was compared only by tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fliptrace.manifest import ran_in_other_batches
from fliptrace.verdicts import Outcome
from fliptrace.views.escaping import shorten, visible
from fliptrace.views.wording import count, plain

if TYPE_CHECKING:
    from fliptrace.trace import Trace
    from fliptrace.verdicts import PairDiff

#: What may differ between the manifests of a reference and of a candidate that one search recorded.
_OF_A_SEARCH = ("reduction", "recording.attempt")
#: What ends a search: the outcomes of the candidate that is then kept.
_ENDS = {
    "token": (Outcome.TOKEN,),
    "surviving": (Outcome.TOKEN, Outcome.SURVIVING),
    "any": (Outcome.TOKEN, Outcome.SURVIVING, Outcome.LATENT),
}
#: What a search looks for: what a candidate does that has it, and what none did.
_SOUGHT = {
    "token": ("choose another token", "chose another token"),
    "surviving": ("show a surviving difference", "showed a surviving difference"),
    "any": ("show a difference", "showed a difference"),
}


@dataclass(frozen=True, slots=True)
class Search:
    """How the candidate was found.

    Attributes:
        attempt: the candidate was this one, counted from 1.
        allowed: how many candidates were allowed; None where the trace does not say.
        until: what would end the search: ``token``, ``surviving`` or ``any``; None where the trace does not say.
    """

    attempt: int
    allowed: int | None
    until: str | None

    @property
    def runs(self) -> int:
        """How many executions ran, the reference included."""
        return self.attempt + 1

    @property
    def compared_all(self) -> bool:
        """Every candidate was compared record by record, not only the last."""
        return self.attempt == 1 or self.until in ("surviving", "any")

    @property
    def bound(self) -> float:
        """Exact one-sided 95% binomial upper bound on the chance to differ, after no difference in all attempts."""
        return 1.0 - math.pow(0.05, 1.0 / self.attempt)


def search_of(diff: PairDiff, reference: Trace, candidate: Trace) -> Search | None:
    """Read how the candidate was found; None where no one search is known to have recorded both whole.

    Args:
        diff: what was found, for the manifest keys that differ.
        reference: the reference's trace.
        candidate: the same of the candidate.
    """
    attempt = _whole(candidate.manifest.get("recording.attempt"))
    if not (reference.closing.complete and candidate.closing.complete):
        return None
    if not attempt or _whole(reference.manifest.get("recording.attempt")) != 0:
        return None
    for key, _, _ in diff.manifest_differences:
        if key not in _OF_A_SEARCH and key.split(".", 1)[0] not in _OF_A_SEARCH:
            return None
    first = _whole(reference.manifest.get("reduction.seed"))
    seed = _whole(candidate.manifest.get("reduction.seed"))
    if first is not None and seed is not None and seed - first != attempt:
        return None
    allowed = _whole(candidate.manifest.get("recording.attempts_allowed"))
    until = candidate.manifest.get("recording.until")
    return Search(
        attempt,
        allowed if allowed is not None and allowed >= attempt else None,
        until if isinstance(until, str) and until in _ENDS else None,
    )


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def ran_sentences(reference: Trace, candidate: Trace) -> tuple[str, ...]:
    """Say what ran: model, adapter, type, device and reduction, and who ordered the arrivals."""
    before, after = _settings(reference), _settings(candidate)
    reductions = [_said(trace, "reduction.identity") for trace in (reference, candidate)]
    sentences = []
    if before == after:
        same = reductions[0] == reductions[1]
        reduction = f", reduction {reductions[0]}" if same and reductions[0] else ""
        if before or reduction:
            sentences.append(f"Both executions: {before or 'not recorded'}{reduction}.")
        if not same:
            names = [name or "not recorded" for name in reductions]
            sentences.append(f"Reductions: reference {names[0]}, candidate {names[1]}.")
        if ran_in_other_batches(reference.manifest, candidate.manifest):
            sentences.append("Their batches differed: other neighbours, or in other places.")
    else:
        for name, settings, reduction in zip(
            ("Reference", "Candidate"), (before, after), reductions, strict=True
        ):
            using = f", reduction {reduction}" if reduction else ""
            sentences.append(f"{name}: {settings or 'not recorded'}{using}.")
    return (*sentences, *_arrivals(reference, candidate))


def _settings(trace: Trace) -> str:
    """Return ``model (LlamaForCausalLM, 8 layers) + adapter (rank 16), bfloat16, on CPU (…), engine transformers``."""
    layers = _whole(trace.manifest.get("model.layers"))
    model = _detailed(
        _said(trace, "model.name"),
        _said(trace, "model.architecture"),
        count(layers, "layer") if layers is not None else "",
    )
    rank = _said(trace, "adapter.rank")
    adapter = _detailed(_said(trace, "adapter.name"), f"rank {rank}" if rank else "")
    engine = _said(trace, "engine.name")
    ranks = _whole(trace.manifest.get("engine.tensor_parallel.ranks"))
    neighbours = _whole(trace.manifest.get("engine.neighbours.count"))
    parts = [
        " + ".join(part for part in (model, adapter) if part),
        _said(trace, "model.dtype"),
        _device(trace),
        f"engine {engine}" if engine else "",
        count(ranks, "rank") if ranks is not None else "",
        f"in a batch with {count(neighbours, 'neighbour')}" if neighbours is not None else "",
    ]
    return ", ".join(part for part in parts if part)


def _device(trace: Trace) -> str:
    device = _said(trace, "environment.device")
    if device == "cpu":
        return _detailed("on the CPU", _said(trace, "environment.processor"))
    gpu = _said(trace, "environment.gpu.name")
    return _detailed(f"on {device or 'a GPU'}", gpu) if device or gpu else ""


def _detailed(name: str, *details: str) -> str:
    known = [detail for detail in details if detail]
    return f"{name} ({', '.join(known)})" if name and known else name or ", ".join(known)


def _said(trace: Trace, key: str) -> str:
    value = trace.manifest.get(key)
    return "" if value is None else visible(shorten(plain(value), 80))


def _arrivals(reference: Trace, candidate: Trace) -> tuple[str, ...]:
    """Say who decided the order in which partial sums arrived, where that order is open."""
    schedules = [_said(trace, "reduction.schedule") for trace in (reference, candidate)]
    simulated = [schedule.startswith("simulated") for schedule in schedules]
    if any(simulated):
        seeds = [
            _said(trace, "reduction.seed")
            for trace, made_up in zip((reference, candidate), simulated, strict=True)
            if made_up
        ]
        noun = "seed" if len(seeds) == 1 else "seeds"
        named = f" (schedule {noun} {' and '.join(seeds)})" if all(seeds) else ""
        who = "" if all(simulated) else " of the " + ("reference" if simulated[0] else "candidate")
        return (
            f"Arrival orders{who} were simulated on a CPU{named}; on a GPU the hardware decides them.",
        )
    if "hardware" in schedules:
        return ("The GPU's hardware decided the arrival orders; they were not recorded.",)
    return ()


def search_sentences(diff: PairDiff, search: Search | None) -> tuple[str, ...]:
    """Say which candidate this is, what the search looked for, and in how many runs the tokens agreed."""
    if search is None:
        return ()
    limit = f" of at most {search.allowed:,}" if search.allowed is not None else ""
    does, did = _SOUGHT[search.until or "token"]
    if diff.outcome not in _ENDS[search.until or "token"]:
        none = f"and did not {does}" if search.attempt == 1 else f"and none {did}"
        told = f"Search: {count(search.attempt, 'candidate')}{limit} ran {none}."
    elif search.attempt == 1:
        told = f"Search: candidate 1{limit} {did} at once."
    else:
        told = f"Search: candidate {search.attempt:,}{limit} was the first to {does}."
    sentences = [told]
    if diff.outcome is not Outcome.TOKEN:
        sentences.append(f"The same tokens in {search.runs:,} runs, the reference included.")
    return tuple(sentences)


def compared_sentence(search: Search | None) -> str:
    """Say which candidates were compared record by record; "" where there is but one."""
    if search is None or search.attempt == 1:
        return ""
    if search.compared_all:
        return f"All {search.attempt:,} candidates were compared record by record; the last is shown here."
    if search.until == "token":
        return "Only this last candidate was compared record by record, those before it by tokens only."
    return (
        "Only this last candidate is compared here; whether those before it were compared record by record was "
        "not recorded."
    )


def bound_sentence(diff: PairDiff, search: Search | None, *, other_batches: bool) -> str:
    """Say how little agreeing runs prove; "" after a flip, or without a search after any difference.

    Args:
        diff: what was found.
        search: how the candidate was found.
        other_batches: the two ran in different batches.
    """
    if diff.outcome is Outcome.TOKEN:
        return ""
    identical = diff.outcome is Outcome.IDENTICAL
    if search is None:
        if not identical:
            return ""
        runs, comparisons, bound = 2, 1, 0.95
    else:
        runs, comparisons, bound = search.runs, search.attempt, search.bound
    if identical and (search is None or search.attempt == 1 or search.until == "any"):
        where = " in different batches" if other_batches else ""
        what, doubt = f"Repeatable in {runs:,} runs{where}", "differ"
    elif (
        search is not None and search.until == "surviving" and diff.outcome is not Outcome.SURVIVING
    ):
        what, doubt = f"No surviving difference in {runs:,} runs", "show one"
    else:
        what, doubt = f"The same tokens in {runs:,} runs", "choose another token"
    compared = (
        "one comparison, which says little"
        if comparisons == 1
        else f"{comparisons:,} comparisons with the reference"
    )
    return f"{what} is {compared}: at 95% confidence up to {100 * bound:.3g}% of further runs could still {doubt}."
