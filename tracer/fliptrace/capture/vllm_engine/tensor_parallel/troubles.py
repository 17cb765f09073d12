"""A rank's failure, as the exception that it was."""

from __future__ import annotations

from fliptrace import errors
from fliptrace.capture.vllm_engine.tensor_parallel.messages import Failed


def error_of(failed: Failed, rank: int, count: int) -> errors.FliptraceError:
    """Return the exception; one that is not fliptrace's own is a RecordingError that names it."""
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.FliptraceError):
        return kind(f"{failed.text} (rank {rank} of {count})")
    return errors.RecordingError(
        f"rank {rank} of {count} failed ({failed.kind}: {failed.text[:400]}); load the engine again if it fails once "
        "more"
    )
