"""vLLM's operator: what it must look like, and how another function takes its place.

The dispatcher is asked what is there; no version is compared. An override in the dispatcher reaches
eager calls, compiled graphs (which hold only the operator's name) and graph captures alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from fliptrace_kernels.vllm_plugin.errors import PluginError

ARGUMENTS: Final = (
    ("inputs", "Tensor"),
    ("lora_a_weights", "List[Tensor]"),
    ("output_tensor", "Tensor, written to"),
    ("token_lora_mapping", "Tensor"),
    ("token_indices_sorted_by_lora_ids", "Tensor"),
    ("num_tokens_per_lora", "Tensor"),
    ("lora_token_start_loc", "Tensor"),
    ("lora_ids", "Tensor"),
    ("no_lora_flag_cpu", "Tensor"),
    ("num_active_loras", "Tensor"),
    ("scaling", "float"),
)
"""Names and types that `vllm::lora_shrink` must have; it returns nothing."""


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator and the kind of device on which it is replaced.

    Attributes:
        namespace: such as 'vllm'.
        name: such as 'lora_shrink'.
        dispatch_key: such as 'CUDA'.
    """

    namespace: str = "vllm"
    name: str = "lora_shrink"
    dispatch_key: str = "CUDA"

    def __str__(self) -> str:
        """Return the qualified name, such as `vllm::lora_shrink`."""
        return f"{self.namespace}::{self.name}"

    def call(self, *arguments: object) -> None:
        """Call it as vLLM does, through the dispatcher."""
        getattr(getattr(torch.ops, self.namespace), self.name)(*arguments)

    def check(self) -> None:
        """Compare the operator with `ARGUMENTS`.

        Raises:
            PluginError: if it is missing, differs, or has no kernel for the dispatch key.
        """
        packet = getattr(getattr(torch.ops, self.namespace), self.name, None)
        overload = getattr(packet, "default", None)
        if overload is None:
            raise PluginError(
                f"the operator {self} is what FLIPTRACE_SHRINK replaces; this vLLM has no such "
                "operator. Unset FLIPTRACE_SHRINK, or use a vLLM that kernels/README.md names"
            )
        schema = overload._schema
        found = tuple((argument.name, _type_of(argument)) for argument in schema.arguments)
        if found != ARGUMENTS or schema.returns:
            raise PluginError(
                f"the operator {self} must take {_listed(ARGUMENTS)} and return nothing; this "
                f"vLLM has {schema}. Unset FLIPTRACE_SHRINK, or use a vLLM that "
                "kernels/README.md names"
            )
        if not torch._C._dispatch_has_kernel_for_dispatch_key(str(self), self.dispatch_key):
            raise PluginError(
                f"the operator {self} must have a kernel for {self.dispatch_key}, which "
                "FLIPTRACE_SHRINK replaces; here it has none. Unset FLIPTRACE_SHRINK, or run on "
                "an NVIDIA GPU"
            )

    def override(self, function: Callable[..., None]) -> torch.library.Library:
        """Make `function` the operator's kernel.

        Returns:
            The registration, to be kept.
        """
        library = torch.library.Library(self.namespace, "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            library.impl(self.name, function, self.dispatch_key, allow_override=True)
        return library


def _type_of(argument: Any) -> str:
    alias = argument.alias_info
    return f"{argument.type}{', written to' if alias is not None and alias.is_write else ''}"


def _listed(arguments: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in arguments)
