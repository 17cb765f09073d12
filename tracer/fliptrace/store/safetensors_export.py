"""Exporting payloads to safetensors, for tools that know nothing of fliptrace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from fliptrace.store.creation import create_private
from fliptrace.trace import Kind, Trace


def export_safetensors(trace: Trace, path: str | Path, kinds: Sequence[Kind] | None = None) -> None:
    """Write records as tensors named ``<step>/<kind>/<key>``; manifest, steps and closing go into the header as JSON.

    The format needs all tensors at once, so this takes as much memory as the records that it exports.

    Args:
        trace: what to export.
        path: the file to create, readable by its owner only.
        kinds: what to export; all by default.

    Raises:
        InputError: the path exists, or its folder does not.
        StorageError: the file cannot be written.
        TraceCorruptError: a frame does not match its seal.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for step in trace.steps:
        for name in step.frames:
            kind = Kind(name)
            frame = trace.frame(step.step, kind) if kinds is None or kind in kinds else None
            if frame is None:
                continue
            for number, entry in enumerate(frame.layout.entries):
                tensors[f"{step.step}/{kind.value}/{entry.key}"] = frame.tensor(number)
    metadata = {
        "format": "pt",
        "manifest": trace.manifest.to_json(),
        "steps": json.dumps([step.to_json() for step in trace.steps]),
        "closing": json.dumps(asdict(trace.closing)),
    }
    with create_private(Path(path)) as file:
        save_file(tensors, file, metadata=metadata)
