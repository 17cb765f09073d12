"""Every exception that fliptrace raises on purpose, in one tree.

    FliptraceError
    ├── InputError (ValueError)            what the caller gave cannot be used
    │   ├── UnsupportedModelError          the engine cannot trace this model or adapter faithfully
    │   └── TraceMismatchError             two traces that cannot be compared
    ├── SiteNotFoundError (LookupError)    no such site, step or record in a trace
    ├── RecordingError (RuntimeError)      an execution could not be recorded faithfully
    │   └── ObserverEffectError            recording changed the execution; the experiment is void
    ├── StorageError (OSError)             a trace could not be written
    └── TraceReadError (ValueError)        a trace cannot be read
        ├── TraceVersionError              it was written under another schema version
        └── TraceCorruptError              what is stored does not match its seal

A message says what was required, what came, where, and what to do next. The command line prints it as one line and
exits with 2; library callers get the exception.
"""

from __future__ import annotations


class FliptraceError(Exception):
    """The root of every exception that fliptrace raises on purpose."""


class InputError(FliptraceError, ValueError):
    """Raised when something that the caller gave cannot be used."""


class UnsupportedModelError(InputError):
    """Raised when an engine cannot trace a model or adapter faithfully."""


class TraceMismatchError(InputError):
    """Raised when two traces cannot be compared: other prompt, model, adapter or layout."""


class SiteNotFoundError(FliptraceError, LookupError):
    """Raised when a trace holds no such site, step or record."""


class RecordingError(FliptraceError, RuntimeError):
    """Raised when an execution could not be recorded faithfully: a silent site, NaN logits, a changed cache."""


class ObserverEffectError(RecordingError):
    """Raised when a recorded and an unrecorded run disagree, so that nothing recorded can be trusted (exit code 3)."""


class StorageError(FliptraceError, OSError):
    """Raised when a trace could not be written: disk full, no permission. What was acknowledged stays readable."""


class TraceReadError(FliptraceError, ValueError):
    """Raised when a file is not a readable trace."""


class TraceVersionError(TraceReadError):
    """Raised when a trace was written under another schema version."""


class TraceCorruptError(TraceReadError):
    """Raised when stored bytes do not match their seal; the message names the row."""
