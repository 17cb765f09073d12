"""Put a reduction in the place of vLLM's shrink, once per process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from fliptrace_kernels.vllm_plugin.errors import PluginError
from fliptrace_kernels.vllm_plugin.replacement import ShrinkReplacement
from fliptrace_kernels.vllm_plugin.settings import Settings
from fliptrace_kernels.vllm_plugin.shrink_operator import Operator


@dataclass(frozen=True, slots=True)
class Installation:
    """One operator, replaced.

    Attributes:
        operator: what was replaced.
        settings: by what.
        replacement: the function that runs now.
        registration: keeps it in place.
    """

    operator: Operator
    settings: Settings
    replacement: ShrinkReplacement
    registration: torch.library.Library

    def is_reached(self, device: torch.device) -> bool:
        """Ask the dispatcher whether a call for tensors on this device ends up here."""
        before = self.replacement.reached
        self.operator.call(*_call_without_rows(device))
        return self.replacement.reached == before + 1


_installed: Final[dict[Operator, Installation]] = {}


def install(settings: Settings, operator: Operator) -> Installation:
    """Replace an operator; what was installed before with the same settings stays.

    Nothing is allocated on a device, and CUDA is not initialised.

    Raises:
        PluginError: if the operator is not as expected, or other settings are in place.
    """
    found = _installed.get(operator)
    if found is not None:
        if found.settings != settings:
            raise PluginError(
                f"this process has already replaced {operator} by {found.settings.reduction} "
                f"(launches {'' if found.settings.count_launches else 'not '}counted), for good; "
                f"got {settings.reduction} "
                f"(launches {'' if settings.count_launches else 'not '}counted). Start another "
                "process"
            )
        return found
    operator.check()
    replacement = ShrinkReplacement(settings, operator.dispatch_key.lower())
    registration = operator.override(replacement)
    _installed[operator] = Installation(operator, settings, replacement, registration)
    return _installed[operator]


def installed(operator: Operator) -> Installation | None:
    """Return what is installed in the place of an operator."""
    return _installed.get(operator)


def _call_without_rows(device: torch.device) -> list[object]:
    """Arguments on which vLLM's own shrink does nothing either: no rows, and LoRA is off."""
    empty = torch.empty(0, dtype=torch.int32, device=device)
    return [
        torch.empty(0, 16, dtype=torch.bfloat16, device=device),
        [torch.empty(1, 1, 16, 16, dtype=torch.bfloat16, device=device)],
        torch.empty(1, 0, 16, dtype=torch.float32, device=device),
        *[empty] * 5,
        torch.ones(1, dtype=torch.bool),
        torch.ones(1, dtype=torch.int32),
        1.0,
    ]
