"""The parts of examples/measure/shrink_memcheck.py that need no GPU."""

from __future__ import annotations

import importlib
import sys

import pytest

START = "========= COMPUTE-SANITIZER\n"
API = """\
========= Program hit CUDA_ERROR_NOT_FOUND (error 500) due to "named symbol not found" on \
CUDA API call to cuGetProcAddress_v2.
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame:  [0x2c1d4b] in libcuda.so.1
=========
"""
MEMORY = """\
========= Invalid __global__ read of size 2 bytes
=========     at lora_shrink_unsplit+0x160 in triton_kernels.py:6
=========     by thread (0,0,0) in block (0,0,0)
=========     Access to 0x7fb6ff000001 is out of bounds
=========
"""


@pytest.fixture(scope="module")
def script(repository_root):
    pytest.importorskip("triton", reason="the script imports the Triton kernels")
    folder = str(repository_root / "examples/measure")
    sys.path.insert(0, folder)
    names = ("shrink_memcheck", "shrink_stress", "shrink_mutants")
    yield importlib.import_module(names[0])
    sys.path.remove(folder)
    for name in names:
        sys.modules.pop(name, None)


def test_api_errors_are_told_from_memory_errors(script):
    """Both counts, what each consists of, and the sum that the sanitizer gives."""
    found = script.read_log(START + API + MEMORY + API + "========= ERROR SUMMARY: 3 errors\n")
    assert found.total == 3
    assert found.memory_errors == 1
    assert found.memory == ["Invalid __global__ read of size 2 bytes"]
    (error,) = found.api
    assert error.startswith("cuGetProcAddress_v2: CUDA_ERROR_NOT_FOUND (error 500)")
    assert found.api.total() == 2


def test_a_clean_log_is_clean(script):
    """No errors are none of either kind."""
    found = script.read_log(START + "========= ERROR SUMMARY: 0 errors\n")
    assert (found.memory_errors, found.api.total(), found.memory) == (0, 0, [])


@pytest.mark.parametrize("total", [1, 4])
def test_an_error_that_the_log_does_not_explain_counts(script, total):
    """Errors beyond the listed ones, or listed beyond the sum, are memory errors until shown otherwise."""
    text = START + API + API + MEMORY + f"========= ERROR SUMMARY: {total} errors\n"
    assert script.read_log(text).memory_errors == max(1, total - 2)


@pytest.mark.parametrize("text", ["", START + API, START + "========= Error: no exit code.\n"])
def test_a_log_without_its_end_is_no_result(script, text):
    """A sanitizer that did not finish has found nothing out."""
    with pytest.raises(ValueError, match="did not finish"):
        script.read_log(text)
