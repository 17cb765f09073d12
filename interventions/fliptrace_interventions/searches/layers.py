"""Take a cache substitution apart: which layers, keys, values or states are enough alone, and which are needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fliptrace.judgements import CachePartNeed, LayerNeed
from fliptrace_interventions.budget import BudgetSpentError
from fliptrace_interventions.edits import CacheEdit, CachePart, Edit
from fliptrace_interventions.searches.trials import Trials
from fliptrace_interventions.workbench import EXECUTIONS


@dataclass(frozen=True, slots=True)
class CacheByLayer:
    """What was found of layers, and of keys, values and state apart; spent: why it ended early, "" when it did not."""

    layers: tuple[LayerNeed, ...]
    parts: tuple[CachePartNeed, ...]
    spent: str


def take_cache_apart(trials: Trials) -> CacheByLayer:
    """Substitute the cache before the target step layer by layer, in both directions.

    ``sufficient_alone``: the donor's cache of this layer, the recipient's of all others. ``needed``: the recipient's
    cache of this layer, the donor's of all others; only where the whole cache gives the donor's token. Then the same
    for keys, values and recurrent state: of all layers, and of each layer that is enough or needed. Layers whose
    incoming cache is bit-equal in both executions can do nothing and are left out.

    Args:
        trials: runs them.
    """
    layers: list[LayerNeed] = []
    parts: list[CachePartNeed] = []
    spent = ""
    try:
        for recipient in EXECUTIONS:
            _Direction(trials, recipient).run(layers, parts)
    except BudgetSpentError as error:
        spent = str(error)
    return CacheByLayer(tuple(layers), tuple(parts), spent)


class _Direction:
    """The experiments in one execution."""

    def __init__(self, trials: Trials, recipient: str) -> None:
        self.trials, self.recipient = trials, recipient
        self.step = trials.workbench.target_step
        engine = trials.workbench.engine
        self.keepers = {
            CachePart.KEYS: set(engine.cache_layers),
            CachePart.VALUES: set(engine.cache_layers),
            CachePart.STATE: {layer for layer, _ in engine.state_keys},
        }
        counts = {
            layer: self._differing(layer) for layer in sorted(set().union(*self.keepers.values()))
        }
        self.differing = {layer: count for layer, count in counts.items() if count}

    def run(self, layers: list[LayerNeed], parts: list[CachePartNeed]) -> None:
        """Append what is found, so that it is there when the budget ends."""
        if not self.differing:
            return
        whole = self._flips(CacheEdit(self.step))
        found = []
        for number, (layer, differing) in enumerate(self.differing.items()):
            self.trials.report(f"cache by layer, {self.recipient}", number, len(self.differing))
            alone = self._flips(CacheEdit(self.step, (layer,)))
            needed = not self._flips(*self._others(layer)) if whole else None
            found.append(LayerNeed(layer, self.recipient, alone, needed, differing))
            layers.append(found[-1])
        parts += self._parts(tuple(self.differing), whole)
        for need in found:
            if need.sufficient_alone or need.needed:
                parts += self._parts((need.layer,), whole)

    def _parts(self, chosen: tuple[int, ...], whole: bool) -> Iterator[CachePartNeed]:
        """Try keys, values and recurrent state of some layers."""
        for part in self.keepers:
            keeping = self._keeping(chosen, part)
            differing = sum(self._differing(layer, part) for layer in keeping)
            if not differing:
                continue
            alone = self._flips(CacheEdit(self.step, keeping, part))
            rest: tuple[Edit, ...] = tuple(
                CacheEdit(self.step, (layer,)) for layer in self.differing if layer not in chosen
            )
            for other in self.keepers:
                others = self._keeping(chosen, other) if other is not part else ()
                if any(self._differing(layer, other) for layer in others):
                    rest = (*rest, CacheEdit(self.step, others, other))
            needed = None
            if whole:
                needed = not (rest and self._flips(*rest))
            yield CachePartNeed(part.value, keeping, self.recipient, alone, needed, differing)

    def _keeping(self, chosen: tuple[int, ...], part: CachePart) -> tuple[int, ...]:
        return tuple(layer for layer in chosen if layer in self.keepers[part])

    def _others(self, layer: int) -> tuple[Edit, ...]:
        rest = tuple(other for other in self.differing if other != layer)
        return (CacheEdit(self.step, rest),) if rest else ()

    def _flips(self, *edits: Edit) -> bool:
        """Nothing edited is the unedited arm, which does not flip."""
        return bool(edits) and self.trials.screen(edits, self.recipient).gives_donor_token

    def _differing(self, layer: int, part: CachePart = CachePart.WHOLE) -> int:
        edit = CacheEdit(self.step, (layer,), part)
        return self.trials.workbench.select((edit,), self.recipient).differing
