"""LoRA layers whose outputs are sums over the ranks of a parallel group, and this rank's part of such a sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def sums_over_ranks(module: nn.Module) -> bool:
    """Tell whether ranks hold slices of K of a LoRA layer (row-parallel), and add up what each gives."""
    base: Any = getattr(module, "base_layer", None)
    return hasattr(base, "input_is_parallel") and int(getattr(module, "tp_size", 1)) > 1


class OutputHook:
    """Calls hook(module, arguments, output) with what a LoRA layer gives on this rank, until ``remove``.

    A row-parallel layer returns the sum over ranks; what this rank gives is what its ``apply`` returns.
    """

    def __init__(self, module: nn.Module, hook: Callable[[nn.Module, Any, Any], None]) -> None:
        """Put it on."""
        self._module: Any = module
        self._handle: Any = None
        if not sums_over_ranks(module):
            self._handle = module.register_forward_hook(hook)
            return
        own = self._module.apply

        def apply(*arguments: Any, **keywords: Any) -> Any:
            output = own(*arguments, **keywords)
            hook(module, arguments, output)
            return output

        # On this object only; its class stays as it is.
        vars(self._module)["apply"] = apply

    def remove(self) -> None:
        """Take it off; harmless when it is off."""
        if self._handle is not None:
            self._handle.remove()
        else:
            vars(self._module).pop("apply", None)
