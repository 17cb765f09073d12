"""Frames of what is not kept site by site: recurrent state, logits, and the digests of modules and operations.

Also the layouts of a decode step's frames, and the bytes of a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fliptrace.capture.arena import Slot
from fliptrace.capture.engine import StateTensor
from fliptrace.trace import Frame, Kind, Layout, LayoutEntry, dtype_name

TOP_LOGITS = 64
#: Layouts of operations that are remembered: prefill and decode, modules and operations, inputs and outputs.
_LAYOUTS_KEPT = 8


def top_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the TOP_LOGITS largest logits with their token ids, on the device, in no promised order among equals."""
    values, ids = logits.topk(min(TOP_LOGITS, logits.shape[0]))
    return values, ids


def logits_frames(step: int, values: Tensor, ids: Tensor, digest: Tensor) -> list[Frame]:
    """Build the three frames of a logits row, largest first and the lowest id first among equals."""
    numbers, names = values.float().tolist(), ids.tolist()
    order = sorted(range(len(names)), key=lambda place: (-numbers[place], names[place]))
    return [
        Frame(step, kind, _logits_layout(row.dtype, tuple(row.shape)), payload)
        for kind, row, payload in (
            (Kind.LOGITS_TOP, values, host_array(values)[order].tobytes()),
            (Kind.LOGITS_TOP_IDS, ids, host_array(ids)[order].tobytes()),
            (Kind.LOGITS_DIGEST, digest, tensor_bytes(digest)),
        )
    ]


def state_frame(
    step: int, states: Sequence[StateTensor], digests: Tensor, *, whole: bool = True
) -> Frame:
    """Build the frame of the recurrent state after a step.

    Args:
        step: its number.
        states: copies, on any device.
        digests: int64 [states, 2], taken where the tensors lie.
        whole: keep the tensors; else the digests alone.
    """
    if not whole:
        entries = tuple(LayoutEntry(state.key, "int64", (1, 2)) for state in states)
        return Frame(step, Kind.STATE_DIGEST, Layout(entries), tensor_bytes(digests.cpu()))
    layout = Layout(
        tuple(
            LayoutEntry(state.key, dtype_name(state.values.dtype), tuple(state.values.shape))
            for state in states
        )
    )
    payload = b"".join(tensor_bytes(state.values.cpu()) for state in states)
    return Frame(step, Kind.STATE, layout, payload, digests.cpu())


def single_frame(step: int, kind: Kind, tensor: Tensor) -> Frame:
    """Build a frame of one record under the key ``logits``."""
    return Frame(
        step, kind, _logits_layout(tensor.dtype, tuple(tensor.shape)), tensor_bytes(tensor)
    )


@functools.lru_cache(maxsize=16)
def _logits_layout(dtype: torch.dtype, shape: tuple[int, ...]) -> Layout:
    """Return one layout for all steps: the store knows a layout again by its identity."""
    return Layout((LayoutEntry("logits", dtype_name(dtype), shape),))


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return a host tensor's bytes in row-major order."""
    data: bytes = host_array(tensor).tobytes()
    return data


def host_array(tensor: Tensor) -> Any:
    """View a host tensor as a NumPy array: BF16, which NumPy lacks, as 16-bit integers.

    The store's thread takes tensors apart by it: each operation of PyTorch hands Python's lock to the thread that runs
    the model, and taking it back costs both more than the operation.
    """
    if tensor.requires_grad:  # from an engine that computes gradients
        tensor = tensor.detach()
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def decode_layouts(
    sites: Sequence[str], cache_layers: Sequence[int], slots: Sequence[Sequence[Slot]]
) -> dict[Kind, Layout]:
    """Return the layouts of a decode step's frames, those of shrinks without launches.

    Args:
        sites: names.
        cache_layers: numbers.
        slots: of the shrinks, of keys and values per cache layer, and of the operands.
    """
    shrinks, caches, operands = slots
    digests = Layout(tuple(LayoutEntry(key, "int64", (1, 2)) for key in sites))
    return {
        Kind.SHRINK: Layout(
            tuple(
                LayoutEntry(key, dtype_name(slot.dtype), slot.shape)
                for key, slot in zip(sites, shrinks, strict=True)
            )
        ),
        Kind.OPERAND: digests,
        Kind.PROJECTION: digests,
        Kind.CACHE: Layout(
            tuple(
                LayoutEntry(
                    f"cache.{layer}", dtype_name(slot.dtype), (2, 1, slot.shape[0], slot.shape[2])
                )
                for layer, slot in zip(cache_layers, caches[::2], strict=True)
            )
        ),
        Kind.OPERAND_VALUES: Layout(
            tuple(
                LayoutEntry(key, dtype_name(slot.dtype), (1, slot.shape[2]))
                for key, slot in zip(sites, operands, strict=True)
            )
        ),
    }


class OperationLayouts:
    """Layouts of module and operation digests, remembered: they are the same in every decode step."""

    def __init__(self) -> None:
        """Start with none."""
        self._layouts: dict[tuple[tuple[str, int], ...], Layout] = {}

    def layout(self, keys: tuple[tuple[str, int], ...]) -> Layout:
        """Return the layout of records int64 [rows, 2], given as (key, rows) in execution order."""
        found = self._layouts.get(keys)
        if found is None:
            found = Layout(tuple(LayoutEntry(key, "int64", (rows, 2)) for key, rows in keys))
            self._layouts = (
                {**self._layouts, keys: found}
                if len(self._layouts) < _LAYOUTS_KEPT
                else {keys: found}
            )
        return found


def operation_frames(
    step: int, operations: Sequence[tuple[str, bool, Tensor, Tensor]], layouts: OperationLayouts
) -> list[Frame]:
    """Build the frames of module and operation digests, each in the order in which things ran."""
    frames = []
    for is_module, kinds in (
        (True, (Kind.MODULE_INPUT, Kind.MODULE_OUTPUT)),
        (False, (Kind.OPERATION_INPUT, Kind.OPERATION_OUTPUT)),
    ):
        chosen = [operation for operation in operations if operation[1] is is_module]
        if not chosen:
            continue
        inputs, outputs = (
            [operation[2] for operation in chosen],
            [operation[3] for operation in chosen],
        )
        for kind, tensors in zip(kinds, (inputs, outputs), strict=True):
            keys = tuple(
                (operation[0], tensor.shape[0])
                for operation, tensor in zip(chosen, tensors, strict=True)
            )
            frames.append(
                Frame(step, kind, layouts.layout(keys), tensor_bytes(torch.cat(tensors).cpu()))
            )
    return frames
