"""Record two executions of a LoRA model and name the first difference that survives rounding."""

from __future__ import annotations

__all__: list[str] = []
