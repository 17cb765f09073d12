"""In which order a forward calls the sites and caches: an observer that notes nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class OrderObserver:
    """Notes the order of calls.

    Attributes:
        sites: numbers of the sites whose shrinks ran, in order; cache_layers likewise of layers that cached rows.
    """

    def __init__(self) -> None:
        """Note nothing yet."""
        self.sites: list[int] = []
        self.cache_layers: list[int] = []

    def begin_step(self, step: int, first_position: int, token_ids: Sequence[int]) -> None:
        """Nothing to note."""

    def shrink(self, site: int, operand: Tensor, output: Tensor, launch: str) -> None:
        """Note the site."""
        self.sites.append(site)

    def projection(self, site: int, output: Tensor) -> None:
        """Nothing to note."""

    def cache_rows(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Note the layer."""
        self.cache_layers.append(layer)

    def operation(self, key: str, is_module: bool, inputs: Tensor, outputs: Tensor) -> None:
        """Nothing to note."""

    def end_step(self, logits: Tensor) -> None:
        """Nothing to note."""
