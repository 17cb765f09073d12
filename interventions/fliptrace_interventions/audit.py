"""What really arrived: digests taken inside the consumers of shrinks and caches, and of a step's whole state.

Digests stay where the tensors live until a step is over, then all come to the host at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fliptrace.capture.engine import StateTensor
from fliptrace.numerics import digest_hex, digest_rows, digest_tensor
from fliptrace_interventions.digests import digest_of_layers


@dataclass(frozen=True, slots=True)
class StepState:
    """Everything that later steps can depend on, and the step's logits, as digests of 32 hexadecimal digits.

    Attributes:
        residual: the residual stream of all rows at the end of the layer stack; "" where the engine did not say.
        rows: every key and value row that the step wrote, all layers.
        states: the recurrent state that the step left, all layers; of nothing where the model keeps none.
        logits: the last row's logits.
    """

    residual: str
    rows: str
    states: str
    logits: str

    def is_equal(self, other: StepState) -> bool:
        """Tell whether both are known and bit-equal."""
        return bool(self.residual) and self == other


@dataclass
class Expectation:
    """What to watch in one step.

    Attributes:
        step: its number; rows: how many token rows it has.
        sites: edited sites.
        all_sites: digest the shrinks of all sites together: a replay.
        caches: layers whose cached rows (those from before the step) are digested.
        states: (layer, name) of recurrent states that are digested as the step found them.
        tokens: digest the token ids that the embedding gets.
    """

    step: int
    rows: int
    sites: Collection[int] = ()
    all_sites: bool = False
    caches: Collection[int] = ()
    states: Collection[tuple[int, str]] = ()
    tokens: bool = False


@dataclass
class StepAudit:
    """What arrived in one step; digests on the engine's device.

    Attributes:
        shrinks: per edited site; caches: per layer; states: per layer and name.
        residual: None when it was not reported.
        replayed: copies of all shrinks, in order.
        rows: per layer the rows written, [2, T, kv_heads, head_dim], copied.
        tokens: digest of the token ids [T], int64, None when they were not watched or never arrived.
    """

    shrinks: dict[int, Tensor] = field(default_factory=dict)
    caches: dict[int, Tensor] = field(default_factory=dict)
    states: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    residual: Tensor | None = None
    replayed: list[Tensor] = field(default_factory=list)
    rows: dict[int, Tensor] = field(default_factory=dict)
    tokens: Tensor | None = None


class ArmAudit:
    """Watches the forwards of one arm, step by step: the engine's ConsumptionAudit."""

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._expected = Expectation(-1, 0)
        self._step = StepAudit()

    def begin(self, expected: Expectation) -> None:
        """A forward is about to run."""
        self._expected, self._step = expected, StepAudit()

    def tokens_consumed(self, token_ids: Tensor) -> None:
        """See ConsumptionAudit."""
        if self._expected.tokens:
            self._step.tokens = digest_tensor(token_ids)

    def shrink_consumed(self, site: int, z: Tensor) -> None:
        """See ConsumptionAudit."""
        if site in self._expected.sites:
            self._step.shrinks[site] = digest_tensor(z)
        if self._expected.all_sites:
            self._step.replayed.append(z.detach().clone())

    def needs_cached_rows(self, layer: int) -> bool:
        """See ConsumptionAudit."""
        return layer in self._expected.caches

    def cache_consumed(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See ConsumptionAudit."""
        new = self._expected.rows
        self._step.rows[layer] = canonical_rows(keys[:, -new:], values[:, -new:])
        if layer in self._expected.caches:
            self._step.caches[layer] = digest_tensor(
                canonical_rows(keys[:, :-new], values[:, :-new])
            )

    def state_consumed(self, layer: int, name: str, values: Tensor) -> None:
        """See ConsumptionAudit. What a layer looked at first counts: it may change it and look again."""
        if (layer, name) in self._expected.states and (layer, name) not in self._step.states:
            self._step.states[layer, name] = digest_tensor(values)

    def residual(self, values: Tensor) -> None:
        """See ConsumptionAudit."""
        self._step.residual = digest_tensor(values)

    def finish(
        self, logits: Tensor, states: Sequence[StateTensor] = ()
    ) -> tuple[StepAudit, StepState]:
        """Return what arrived, and the state that the step left.

        Args:
            logits: the last row's.
            states: the engine's recurrent state after the step.
        """
        step = self._step
        # Between two steps a state may be replayed on the engine, which must not reach what is returned here.
        self._step = StepAudit()
        unknown = torch.zeros(2, dtype=torch.int64, device=logits.device)
        kept = {number: state.values for number, state in enumerate(states)}
        residual, rows, recurrent, last = torch.stack(
            (
                unknown if step.residual is None else step.residual,
                digest_of_layers(step.rows) if step.rows else unknown,
                digest_of_layers(kept) if kept else unknown,
                digest_rows(logits.unsqueeze(0))[0],
            )
        ).tolist()
        return step, StepState(
            "" if step.residual is None else digest_hex(residual),
            digest_hex(rows),
            digest_hex(recurrent),
            digest_hex(last),
        )


def canonical_rows(keys: Tensor, values: Tensor) -> Tensor:
    """Copy keys and values [kv_heads, T, head_dim] into canonical form [2, T, kv_heads, head_dim]."""
    return torch.stack((keys, values)).transpose(1, 2).contiguous()
