"""Search a pair for what flipped its token: roots, coordinates, sets, layers, the first step, past against present."""

from __future__ import annotations

from fliptrace_interventions.searches.investigation import investigate

__all__ = ["investigate"]
