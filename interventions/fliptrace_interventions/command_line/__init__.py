"""trace-intervene: a thin skin over the workbench, the searches and the report."""

from __future__ import annotations
