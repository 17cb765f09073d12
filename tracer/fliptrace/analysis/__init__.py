"""Comparison of two traces, on stored bits alone: no model, no engine, no drawing."""

from __future__ import annotations

from fliptrace.analysis.diff import compare
from fliptrace.analysis.propagation import propagation_graph

__all__ = ["compare", "propagation_graph"]
