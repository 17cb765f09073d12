"""What the environment asks of the plugin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fliptrace_kernels.errors import ReductionError
from fliptrace_kernels.reduction import Reduction, parse_reduction
from fliptrace_kernels.vllm_plugin import COUNT_VARIABLE, SHRINK_VARIABLE
from fliptrace_kernels.vllm_plugin.errors import PluginError


@dataclass(frozen=True, slots=True)
class Settings:
    """What to install.

    Attributes:
        reduction: how every shrink sums.
        count_launches: whether the kernels count their launches on the device.
    """

    reduction: Reduction
    count_launches: bool = False


def read(environment: Mapping[str, str]) -> Settings | None:
    """Read the settings; None while FLIPTRACE_SHRINK is unset or empty.

    Raises:
        PluginError: if a value is not one that the variable takes.
    """
    name = environment.get(SHRINK_VARIABLE, "").strip()
    if not name:
        return None
    try:
        reduction = parse_reduction(name)
    except ReductionError as error:
        raise PluginError(f"{SHRINK_VARIABLE} must name a reduction: {error}") from error
    count = environment.get(COUNT_VARIABLE, "").strip()
    if count not in ("", "0", "1"):
        raise PluginError(f"{COUNT_VARIABLE} must be 0 or 1; got {count!r}")
    return Settings(reduction, count == "1")
