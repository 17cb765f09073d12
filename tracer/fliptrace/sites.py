"""Places in a network and coordinates in its records.

A site is a LoRA shrink's place: layer, module, slice, rank of a parallel group. A coordinate adds the step, the token
position and the rank index. Steps count from 0 (the prefill); step s yields generated token s. Positions are absolute
token positions, 0-based.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.(.+)$")
#: Ends of paths by which engines that fuse projections or run on several ranks keep paths unique.
_SLICE = re.compile(r"^(.+)\[([^\[\]]+)\]$")
_RANK = re.compile(r"^(.+)@rank(\d+)$")


def split_path(path: str) -> tuple[str, str | None, int | None]:
    """Split a path into the module's own, the slice and the rank of a parallel group, None where it names none."""
    rank = None
    if on_rank := _RANK.match(path):
        path, rank = on_rank.group(1), int(on_rank.group(2))
    if sliced := _SLICE.match(path):
        return sliced.group(1), sliced.group(2), rank
    return path, None, rank


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the network at which a shrink runs.

    Attributes:
        path: the full module path in the model, unique within an engine; the key under which records are stored.
        layer: 0-based layer number, None outside the layer stack.
        module: the path within the layer (``mlp.up_proj``), or the whole path outside the stack.
        slice: which of the fused projections, None where the engine keeps each as a site of its own.
        parallel_rank: rank within the tensor-parallel group.
    """

    path: str
    layer: int | None
    module: str
    slice: str | None = None
    parallel_rank: int = 0

    @classmethod
    def from_path(cls, path: str, *, slice: str | None = None, parallel_rank: int = 0) -> Site:  # noqa: A002
        """Build a site from a module path such as ``model.layers.2.mlp.up_proj``.

        A fused projection names its slice at the end, ``...mlp.gate_up_proj[up_proj]``, and a rank of a parallel group
        itself after that, ``...@rank1``; both are read from the path.
        """
        module, own_slice, rank = split_path(path)
        slice = slice if own_slice is None else own_slice  # noqa: A001
        parallel_rank = parallel_rank if rank is None else rank
        match = _LAYER.search(module)
        layer, module = (int(match.group(1)), match.group(2)) if match else (None, module)
        return cls(path=path, layer=layer, module=module, slice=slice, parallel_rank=parallel_rank)

    @property
    def part(self) -> str:
        """The module with its slice and rank, without the layer: ``self_attn.qkv_proj[k_proj]``."""
        where = f"{self.module}[{self.slice}]" if self.slice else self.module
        named = self.parallel_rank or split_path(self.path)[2] is not None
        return f"{where} (rank {self.parallel_rank})" if named else where

    @property
    def name(self) -> str:
        """The name that people read: ``layer 2 mlp.up_proj``."""
        return f"layer {self.layer} {self.part}" if self.layer is not None else self.part


@dataclass(frozen=True, slots=True)
class Coordinate:
    """One element of one shrink record.

    Attributes:
        site: where.
        step: 0 for the prefill, s for the forward that yields generated token s.
        position: absolute token position of the row.
        rank_index: index into the LoRA rank, 0-based.
    """

    site: Site
    step: int
    position: int
    rank_index: int

    @property
    def name(self) -> str:
        """The name that people read."""
        phase = "prefill" if self.step == 0 else f"step {self.step}"
        return f"{self.site.name}, {phase}, token position {self.position}, rank index {self.rank_index}"
