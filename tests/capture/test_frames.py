"""Bytes of tensors, as frames hold them."""

from __future__ import annotations

import pytest
import torch

from fliptrace.capture.frames import tensor_bytes

VALUES = torch.arange(24).reshape(2, 3, 4)
TENSORS = {
    "whole": VALUES,
    "turned": VALUES.transpose(0, 2),
    "every other": VALUES[:, :, ::2],
    "one": VALUES[1, 2, 3],
    "none": VALUES[:0],
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32]
)
def test_bytes_are_those_in_row_major_order(name, dtype):
    """Of every dtype that a record may have, however the tensor lies in memory, and where gradients are computed."""
    tensor = TENSORS[name].to(dtype)
    flat = tensor.contiguous().reshape(-1)
    expected = bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
    assert tensor_bytes(tensor) == expected
    if dtype.is_floating_point:
        assert tensor_bytes(tensor.requires_grad_()) == expected
