"""What the plugin raises.

    FliptraceKernelsError
    └── PluginError (RuntimeError)     the shrink that was asked for cannot be installed or run

vLLM logs a plugin that fails to load and goes on; what a loaded plugin raises stops the engine. So
this is raised from inside `register`, or from a worker that starts, and nothing falls back.
"""

from __future__ import annotations

from fliptrace_kernels.errors import FliptraceKernelsError


class PluginError(FliptraceKernelsError, RuntimeError):
    """Raised when vLLM cannot run the shrink that FLIPTRACE_SHRINK names."""
