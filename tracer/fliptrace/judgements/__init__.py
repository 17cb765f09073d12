"""What a substitution experiment found, as plain values: the language between interventions, views and files.

Nothing here computes; fliptrace_interventions fills these values and fliptrace.views shows them. Each value turns into
JSON and back (``to_json``, ``from_json``) without loss: an investigation is kept beside its pair and shown again later.
An edit appears here as the JSON that ``fliptrace_interventions.edits`` reads and writes.
"""

from __future__ import annotations

from fliptrace.judgements.claims import (
    CAVEAT,
    Arm,
    Control,
    DirectionResult,
    Footprint,
    FootprintLayer,
    Judgement,
    Receipt,
    Screening,
    Specificity,
    Verdict,
)
from fliptrace.judgements.documents import SCHEMA_VERSION, Value
from fliptrace.judgements.findings import (
    CachePartNeed,
    CoordinateResult,
    FirstCacheStep,
    Investigation,
    LayerNeed,
    MinimalSet,
    Reconstruction,
    RootResult,
    TwoByTwo,
)

__all__ = [
    "CAVEAT",
    "SCHEMA_VERSION",
    "Arm",
    "CachePartNeed",
    "Control",
    "CoordinateResult",
    "DirectionResult",
    "FirstCacheStep",
    "Footprint",
    "FootprintLayer",
    "Investigation",
    "Judgement",
    "LayerNeed",
    "MinimalSet",
    "Receipt",
    "Reconstruction",
    "RootResult",
    "Screening",
    "Specificity",
    "TwoByTwo",
    "Value",
    "Verdict",
]
