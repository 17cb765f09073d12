"""One recorded execution, as what it gives to experiments: copies of its tensors, checked to stay what they were."""

from __future__ import annotations

from torch import Tensor

from fliptrace.capture.engine import CacheLayer, Engine
from fliptrace.trace import Trace


class RecordedExecution:
    """A trace that belongs to an engine's model.

    Attributes:
        which: ``reference`` or ``candidate``.
        trace: the trace.
    """

    which: str
    trace: Trace

    def __init__(self, trace: Trace, engine: Engine, which: str = "reference") -> None:
        """Check that the trace belongs to the engine.

        Raises:
            InputError: redacted, cut short, or of another model, adapter, dtype, attention or set of sites.
        """
        raise NotImplementedError

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt's token ids."""
        raise NotImplementedError

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated token ids."""
        raise NotImplementedError

    def positions(self, step: int) -> range:
        """Absolute token positions of a step's rows."""
        raise NotImplementedError

    def shrink(self, step: int, site: int) -> Tensor:
        """Return a copy of a recorded shrink, FP32 [T, R], on the engine's device."""
        raise NotImplementedError

    def operand_digests(self, step: int, site: int) -> Tensor:
        """Return the row digests of a shrink's operand, int64 [T, 2], on the host."""
        raise NotImplementedError

    def cache_rows(self, step: int, layer: int) -> Tensor:
        """Return a copy of the rows that a step wrote: [2, T, kv_heads, head_dim]."""
        raise NotImplementedError

    def cache_before(self, step: int) -> tuple[CacheLayer, ...]:
        """Return a copy of the whole cache as it was before a step."""
        raise NotImplementedError

    def logits_digest(self, step: int) -> str:
        """Return the digest of a step's logits, 32 hexadecimal digits."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Return a hash of what the trace holds: the same for the same recording, wherever its file lies."""
        raise NotImplementedError

    def changes(self) -> tuple[str, ...]:
        """Name every tensor held here that is no longer what was read from the trace; none when all is well."""
        raise NotImplementedError
