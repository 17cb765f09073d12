"""Exporting metadata to Parquet: one row per record, for questions that a table answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fliptrace.numerics.digest import digest_hex
from fliptrace.store.creation import create_private
from fliptrace.trace import Frame, Kind, StepRecord, Trace

_STEPS_PER_GROUP = 64


def export_parquet(trace: Trace, path: str | Path) -> None:
    """Write one row per record: where it is and what it is, without its values. The manifest is file metadata.

    Columns: step, order (within the step's records of that kind), key, kind, dtype, shape, first_position,
    last_position (of the step's token rows), digest (32 hexadecimal digits, null for kinds that are digests), bytes.

    Args:
        trace: what to export.
        path: the file to create, readable by its owner only.

    Raises:
        InputError: the path exists, or its folder does not.
        StorageError: the file cannot be written.
        TraceCorruptError: a frame does not match its seal.
    """
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema(
        [
            pa.field("step", pa.int32()),
            pa.field("order", pa.int32()),
            pa.field("key", pa.string()),
            pa.field("kind", pa.string()),
            pa.field("dtype", pa.string()),
            pa.field("shape", pa.list_(pa.int64())),
            pa.field("first_position", pa.int64()),
            pa.field("last_position", pa.int64()),
            pa.field("digest", pa.string()),
            pa.field("bytes", pa.int64()),
        ],
        metadata={"manifest": trace.manifest.to_json()},
    )
    with create_private(Path(path)) as file, parquet.ParquetWriter(file, schema) as writer:
        for start in range(0, len(trace.steps), _STEPS_PER_GROUP):
            rows = [
                row
                for step in trace.steps[start : start + _STEPS_PER_GROUP]
                for row in _step_rows(trace, step)
            ]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))


def _step_rows(trace: Trace, step: StepRecord) -> Iterator[dict[str, Any]]:
    for name in step.frames:
        frame = trace.frame(step.step, Kind(name))
        if frame is not None:
            yield from _frame_rows(frame, step)


def _frame_rows(frame: Frame, step: StepRecord) -> Iterator[dict[str, Any]]:
    digests = None if frame.digests is None else frame.digests.tolist()
    for number, entry in enumerate(frame.layout.entries):
        yield {
            "step": frame.step,
            "order": number,
            "key": entry.key,
            "kind": frame.kind.value,
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "first_position": step.first_position,
            "last_position": step.first_position + len(step.token_ids) - 1,
            "digest": None if digests is None else digest_hex(digests[number]),
            "bytes": entry.size_bytes,
        }
