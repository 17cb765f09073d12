"""Copies asked of the CUDA runtime: the bits that PyTorch's copies give, in the order of the stream."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from fliptrace.capture.device_copy import find_device_copy

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_bits_arrive_in_the_order_of_the_stream(dtype):
    """What was written before on the stream is copied, what is written after is not; on a side stream, too."""
    copy = find_device_copy(torch.device("cuda"))
    assert copy is not None
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            source = torch.zeros(4099, device="cuda", dtype=dtype)
            targets = torch.zeros((64, 4099), device="cuda", dtype=dtype)
            for number in range(64):
                source.fill_(number)
                copy(targets[number].data_ptr(), source)
            expected = torch.arange(64, device="cuda").to(dtype).unsqueeze(1).expand_as(targets)
            assert torch.equal(targets, expected)


def test_other_devices_have_none():
    """PyTorch's own copy serves them."""
    assert find_device_copy(torch.device("cpu")) is None
