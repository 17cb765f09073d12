"""Studies: how often a stack flips, how much it matters, and a one-minute check; each resumable and with its bounds.

A study is a list of items with ids; a row is appended when an item is done. Names are loaded on first use, so that
importing this package loads neither scipy, pyarrow, plotly nor ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fliptrace.lazy import lazy_names

if TYPE_CHECKING:
    from fliptrace.studies.batch import BatchStudy
    from fliptrace.studies.decide import DecideStudy
    from fliptrace.studies.engines import ModelSettings
    from fliptrace.studies.items import Item
    from fliptrace.studies.latency import LatencyStudy
    from fliptrace.studies.repeat import RepeatStudy
    from fliptrace.studies.replay import ReplayStudy
    from fliptrace.studies.running import StudyResult, run_study
    from fliptrace.studies.study import Report, Study, Worker
    from fliptrace.studies.tasks import Selection

_HOMES = {
    "BatchStudy": "batch",
    "DecideStudy": "decide",
    "Item": "items",
    "LatencyStudy": "latency",
    "ModelSettings": "engines",
    "RepeatStudy": "repeat",
    "ReplayStudy": "replay",
    "Report": "study",
    "Selection": "tasks",
    "Study": "study",
    "StudyResult": "running",
    "Worker": "study",
    "run_study": "running",
}

__all__ = [
    "BatchStudy",
    "DecideStudy",
    "Item",
    "LatencyStudy",
    "ModelSettings",
    "RepeatStudy",
    "ReplayStudy",
    "Report",
    "Selection",
    "Study",
    "StudyResult",
    "Worker",
    "run_study",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
