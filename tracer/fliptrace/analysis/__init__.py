"""Comparison of two traces, on stored bits alone: no model, no engine, no drawing."""

from __future__ import annotations

from fliptrace.analysis.diff import compare
from fliptrace.analysis.propagation import propagation_graph
from fliptrace.analysis.separation import Separation, separate, separate_all

__all__ = ["Separation", "compare", "propagation_graph", "separate", "separate_all"]
