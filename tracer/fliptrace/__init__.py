"""fliptrace: find the rounding that flipped a token."""

from __future__ import annotations

__all__: list[str] = []
