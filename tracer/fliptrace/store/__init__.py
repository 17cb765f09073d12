"""The store: one file per trace, written while an execution runs and checked whenever it is read."""

from __future__ import annotations

from fliptrace.store.copying import copy_trace
from fliptrace.store.pairing import PairedReader, StepPair, paired_steps
from fliptrace.store.parquet_export import export_parquet
from fliptrace.store.reader import TraceReader, open_trace
from fliptrace.store.safetensors_export import export_safetensors
from fliptrace.store.verification import verify_trace
from fliptrace.store.writer import TraceWriter

__all__ = [
    "PairedReader",
    "StepPair",
    "TraceReader",
    "TraceWriter",
    "copy_trace",
    "export_parquet",
    "export_safetensors",
    "open_trace",
    "paired_steps",
    "verify_trace",
]
