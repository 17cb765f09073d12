"""A tap on an operator with vLLM's signature: shown after whatever shrink runs, gone when it is removed."""

from __future__ import annotations

import pytest
import torch

from fliptrace_kernels import parse_reduction
from fliptrace_kernels.vllm_plugin.errors import PluginError
from fliptrace_kernels.vllm_plugin.installation import install
from fliptrace_kernels.vllm_plugin.settings import Settings
from fliptrace_kernels.vllm_plugin.tap import tap_operator, without_logits

SHAPE = {"rows": 7, "size": 100, "rank": 8, "slices": 3, "adapters": 2}


def call(operators, operator, *, no_lora=False, **changes):
    x, weights, output, mapping = operators.tensors(**SHAPE | changes)
    operator.call(x, weights, output, *operators.metadata(mapping, 2, no_lora=no_lora), 1.0)
    return x, weights, output, mapping


@pytest.mark.parametrize("replaced", [False, True])
def test_it_is_shown_what_ran(operators, replaced):
    """After vLLM's own shrink and after the plugin's: operands, weights, finished shrinks and mapping."""
    operator = operators.define()
    installation = None
    if replaced:
        installation = install(Settings(parse_reduction("unsplit")), operator)
    plain = call(operators, operator)[2]
    shown = []
    tap = tap_operator(operator, operators.mark, lambda *given: shown.append(given))
    x, weights, output, mapping = call(operators, operator)
    ((operands, stacked, shrinks, adapters),) = shown
    assert torch.equal(output.view(torch.int32), plain.view(torch.int32))
    assert bool((output == -7).all()) is not replaced
    assert (operands.data_ptr(), adapters.data_ptr()) == (x.data_ptr(), mapping.data_ptr())
    assert [a.data_ptr() for a in stacked] == [a.data_ptr() for a in weights]
    assert shrinks.data_ptr() == output.data_ptr()
    if installation is not None:
        assert installation.is_reached(torch.device("cpu"))
        assert install(installation.settings, operator) is installation
        call(operators, operator)
        assert len(shown) == 2
    tap.remove()
    tap.remove()
    count = len(shown)
    assert torch.equal(call(operators, operator)[2].view(torch.int32), plain.view(torch.int32))
    assert len(shown) == count


def test_what_did_not_run_is_not_shown(operators):
    """No rows, or no row with an adapter."""
    operator = operators.define()
    shown = []
    tap = tap_operator(operator, operators.mark, lambda *given: shown.append(given))
    call(operators, operator, no_lora=True)
    call(operators, operator, rows=0)
    assert shown == []
    call(operators, operator)
    assert len(shown) == 1
    tap.remove()


def test_another_operator_is_refused(operators):
    """Its arguments are compared before anything is replaced."""
    operator = operators.define("(Tensor inputs) -> ()")
    with pytest.raises(PluginError, match="must take"):
        tap_operator(operator, operators.mark, print)


def test_the_logits_are_not_shown(operators):
    """Their shrink goes through the same operator, with requests for rows."""
    operator = operators.define()

    class Wrapper:
        def add_lora_logits(self, fails=False):
            call(operators, operator)
            if fails:
                raise RuntimeError("no memory")

    own, shown = Wrapper.add_lora_logits, []
    show, restore = without_logits(Wrapper, lambda *given: shown.append(given))
    tap = tap_operator(operator, operators.mark, show)
    Wrapper().add_lora_logits()
    with pytest.raises(RuntimeError):
        Wrapper().add_lora_logits(fails=True)
    assert shown == []
    call(operators, operator)
    assert len(shown) == 1
    tap.remove()
    restore()
    assert Wrapper.add_lora_logits is own
