"""Exceptions of the shrink reductions.

    FliptraceKernelsError
    ├── ReductionError (ValueError)     a reduction was named or used wrongly
    ├── ShrinkInputError (ValueError)   tensors of a call do not fit together
    └── LaunchError (RuntimeError)      the device code could not be started

Each message says what was required, what came and what to do next.
"""

from __future__ import annotations


class FliptraceKernelsError(Exception):
    """Any error raised by this package on purpose."""


class ReductionError(FliptraceKernelsError, ValueError):
    """Raised when a reduction is unknown, out of range, or asked for what it cannot do."""


class ShrinkInputError(FliptraceKernelsError, ValueError):
    """Raised when the tensors of a call do not fit together."""


class LaunchError(FliptraceKernelsError, RuntimeError):
    """Raised when a kernel cannot be compiled, loaded or started on this machine."""
