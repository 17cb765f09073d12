"""Substitute recorded values into an execution, continue it, and judge whether the output changes."""

from __future__ import annotations

from fliptrace_interventions.budget import Budget
from fliptrace_interventions.displays import register as _register_displays
from fliptrace_interventions.edits import (
    CacheEdit,
    CachePart,
    Edit,
    ForcedTokens,
    GivenValue,
    ReplayShrinks,
    ShrinkEdit,
    Source,
    edits_from_json,
    edits_to_json,
)
from fliptrace_interventions.journal import Journal
from fliptrace_interventions.outcomes import gsm8k_answer
from fliptrace_interventions.recorded import RecordedExecution
from fliptrace_interventions.report import add_to_report
from fliptrace_interventions.reproducer import export_reproducer, find_root
from fliptrace_interventions.searches import investigate
from fliptrace_interventions.selection import Selection
from fliptrace_interventions.workbench import Workbench

_register_displays()

__all__ = [
    "Budget",
    "CacheEdit",
    "CachePart",
    "Edit",
    "ForcedTokens",
    "GivenValue",
    "Journal",
    "RecordedExecution",
    "ReplayShrinks",
    "Selection",
    "ShrinkEdit",
    "Source",
    "Workbench",
    "add_to_report",
    "edits_from_json",
    "edits_to_json",
    "export_reproducer",
    "find_root",
    "gsm8k_answer",
    "investigate",
]
