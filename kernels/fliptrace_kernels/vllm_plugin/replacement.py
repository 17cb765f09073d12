"""The function that takes the place of vLLM's shrink.

Python runs here once per eager call, and once per captured graph: a replay repeats the kernels
alone. What does not change from call to call is checked when a set of weights is first seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from fliptrace_kernels.dispatch import launch_configuration, lora_shrink
from fliptrace_kernels.reduction import Reduction
from fliptrace_kernels.vllm_plugin.errors import PluginError
from fliptrace_kernels.vllm_plugin.settings import Settings

_DTYPES: Final = (torch.bfloat16, torch.float16)


Run = Callable[[Tensor, list[Tensor], Tensor, float, Tensor, Tensor | None], object]
"""Starts one shrink: inputs, weights, mapping, scale, output, counter of launches."""


class ShrinkReplacement:
    """vLLM's operator, run as one of this package's reductions.

    Attributes:
        reduction: how every shrink sums.
        device_type: where it runs, 'cuda' or 'cpu'.
        counts: whether the kernels count their launches.
        reached: empty calls so far; `Installation.is_reached` makes them.
    """

    __slots__ = ("_counter", "_run", "_seen", "counts", "device_type", "reached", "reduction")

    def __init__(self, settings: Settings, device_type: str) -> None:
        self.reduction: Final = settings.reduction
        self.device_type: Final = device_type
        self.counts: Final = settings.count_launches and device_type == "cuda"
        self.reached = 0
        self._counter: Tensor | None = None
        self._run = _run_of(self.reduction, device_type)
        self._seen: set[tuple[object, ...]] = set()

    @property
    def kernel(self) -> str:
        """Name of the kernel, as a profiler shows it. It depends on no shape."""
        shape = (1, 1024), [(16, 1024)]
        found = launch_configuration(*shape, torch.bfloat16, self.device_type, self.reduction)
        return str(found["kernel"])

    @property
    def layers(self) -> int:
        """How many sets of weights have been seen: one per LoRA layer that ran."""
        return len(self._seen)

    def launches(self) -> int | None:
        """Wait for the device and read how many kernels ran; None if nobody counts."""
        if not self.counts:
            return None
        if self._counter is None:
            return 0
        torch.cuda.synchronize(self._counter.device)
        return int(self._counter.item())

    def __call__(
        self,
        inputs: Tensor,
        lora_a_weights: Sequence[Tensor],
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
        """Run one shrink.

        Args:
            inputs: [M, K], BF16 or FP16.
            lora_a_weights: per slice [adapters, 1, R, K], dtype of inputs.
            output_tensor: [slices, M, R], FP32; every element is written.
            token_lora_mapping: adapter of each row, [M], int32; -1 for none.
            token_indices_sorted_by_lora_ids: not used, as the four that follow: rows are found by
                their adapter.
            num_tokens_per_lora: not used.
            lora_token_start_loc: not used.
            lora_ids: not used.
            no_lora_flag_cpu: [1], bool, on the CPU. If it is set, output_tensor stays as it is, as
                vLLM's own shrink and expand have it. Under a graph it was read at capture.
            num_active_loras: not used.
            scaling: factor on the sum.

        Raises:
            PluginError: if the tensors are not what vLLM's operator takes.
        """
        rows = inputs.shape[0]
        if rows == 0:
            self.reached += 1
            return
        if no_lora_flag_cpu.item():
            return
        seen = (
            inputs.dtype,
            inputs.shape[1],
            output_tensor.shape[0],
            output_tensor.shape[2],
            # Memory may come back as weights of another shape.
            *[(weight.data_ptr(), weight.shape) for weight in lora_a_weights],
        )
        if seen not in self._seen:
            _check(inputs, lora_a_weights, output_tensor, token_lora_mapping)
            self._prepare(inputs, lora_a_weights)
            self._seen.add(seen)
        if output_tensor.shape[1] != rows or token_lora_mapping.shape[0] != rows:
            raise PluginError(
                f"a shrink of {rows} rows must have as many outputs and adapter indices; got "
                f"{output_tensor.shape[1]} and {token_lora_mapping.shape[0]}. Please report this"
            )
        self._run(
            inputs,
            [weight.squeeze(1) for weight in lora_a_weights],
            token_lora_mapping,
            scaling,
            output_tensor,
            self._counter,
        )

    def _prepare(self, inputs: Tensor, weights: Sequence[Tensor]) -> None:
        """Do what a capture must not do, the first time that a layer runs.

        vLLM runs every layer before it captures anything: in `profile_run`, and again right before
        each capture with the shapes that are then captured.
        """
        if self.device_type != "cuda":
            return
        if torch.cuda.is_current_stream_capturing():
            raise PluginError(
                "a LoRA layer must run once before it is captured, as vLLM's warm-up sees to; one "
                "was first seen during a capture. Please report this, and pass enforce_eager=True"
            )
        if self.counts and self._counter is None:
            self._counter = torch.zeros(1, dtype=torch.int64, device=inputs.device)
        if self.reduction.kind == "local":
            # Its kernels differ between few and many rows. The Triton kernels do not.
            from fliptrace_kernels import local

            adapters, _, rank, size = weights[0].shape
            local.prepare(
                size=size,
                rank=rank,
                slices=len(weights),
                dtype=inputs.dtype,
                splits=self.reduction.splits,
                adapters=adapters,
                index=inputs.get_device(),
            )


def _run_of(reduction: Reduction, device_type: str) -> Run:
    """Choose what starts a shrink, below the checks of the public call."""
    if device_type != "cuda":
        # Where the plugin itself is tested.
        return lambda x, weights, mapping, scale, out, _: lora_shrink(
            x, weights, mapping, reduction=reduction, scale=scale, out=out
        )
    if reduction.kind == "local":
        from fliptrace_kernels import local

        splits = reduction.splits
        return lambda x, weights, mapping, scale, out, counter: local.shrink(
            x, weights, mapping, splits, scale, out, launch_counter=counter
        )
    from fliptrace_kernels import triton_shrink

    return lambda x, weights, mapping, scale, out, counter: triton_shrink.shrink(
        x,
        weights,
        mapping,
        reduction.for_rows(x.shape[0]),
        scale,
        out,
        launch_counter=counter,
    )


def _check(inputs: Tensor, weights: Sequence[Tensor], output: Tensor, mapping: Tensor) -> None:
    """Check what stays the same from call to call."""
    if not weights or any(
        weight.ndim != 4
        or weight.shape[1] != 1
        or weight.shape != weights[0].shape
        or weight.dtype != inputs.dtype
        or not weight.is_contiguous()
        for weight in weights
    ):
        raise PluginError(
            "lora_a_weights must all be contiguous [adapters, 1, R, K], as large as the first and "
            f"of the inputs' dtype {inputs.dtype}; got "
            f"{[(list(weight.shape), weight.dtype) for weight in weights]}"
        )
    rank, size = weights[0].shape[2:]
    if inputs.ndim != 2 or inputs.shape[1] != size or inputs.dtype not in _DTYPES:
        raise PluginError(
            f"inputs must be [rows, {size}], bfloat16 or float16; got {list(inputs.shape)}, "
            f"{inputs.dtype}"
        )
    if (
        output.ndim != 3
        or (output.shape[0], output.shape[2]) != (len(weights), rank)
        or output.dtype != torch.float32
    ):
        raise PluginError(
            f"output_tensor must be float32 [{len(weights)}, rows, {rank}]; "
            f"got {output.dtype} {list(output.shape)}"
        )
    if mapping.ndim != 1 or mapping.dtype != torch.int32:
        raise PluginError(
            f"token_lora_mapping must be int32 [rows]; got {mapping.dtype} {list(mapping.shape)}"
        )
