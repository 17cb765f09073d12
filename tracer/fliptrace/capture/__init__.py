"""Run a model step by step and record what it computes. The other branch, analysis, never imports this one."""

from __future__ import annotations
