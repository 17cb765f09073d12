from __future__ import annotations

import json
import stat
import subprocess
import sys

import pytest
import torch

from fliptrace.errors import InputError
from fliptrace.manifest import Manifest
from fliptrace.numerics.digest import digest_hex
from fliptrace.store import export_parquet, export_safetensors, open_trace
from fliptrace.trace import Kind


def test_safetensors_holds_the_records(record, samples, tmp_path):
    """Every record comes back with its bits, and the header holds manifest, steps and closing."""
    from safetensors import safe_open

    trace = open_trace(record(tmp_path / "t"))
    out = tmp_path / "out.safetensors"
    export_safetensors(trace, out)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    with safe_open(out, "pt") as file:
        metadata = file.metadata()
        assert Manifest.from_json(metadata["manifest"]) == samples.MANIFEST
        assert json.loads(metadata["steps"])[2] == trace.steps[2].to_json()
        assert json.loads(metadata["closing"])["stop_reason"] == "max new tokens"
        assert len(file.keys()) == 3 * 11
        for step in range(3):
            for kind, layout in samples.LAYOUTS.items():
                for entry in layout.entries:
                    stored = file.get_tensor(f"{step}/{kind}/{entry.key}")
                    expected = trace.record(entry.key, kind, step)
                    assert (stored.dtype, stored.shape) == (expected.dtype, expected.shape)
                    assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8))
    export_safetensors(trace, tmp_path / "few", [Kind.CACHE])
    with safe_open(tmp_path / "few", "pt") as file:
        assert len(file.keys()) == 3 * 2


def test_parquet_lists_the_records(record, samples, tmp_path):
    """One row per record with its place, shape and digest, and no values."""
    from pyarrow import parquet

    trace = open_trace(record(tmp_path / "t", steps=70))
    out = tmp_path / "out.parquet"
    export_parquet(trace, out)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    table = parquet.read_table(out)
    assert Manifest.from_json(table.schema.metadata[b"manifest"].decode()) == samples.MANIFEST
    rows = table.to_pylist()
    assert len(rows) == 70 * 11
    assert rows[2] == {
        "step": 0,
        "order": 2,
        "key": "layers.2.q_proj",
        "kind": "shrink",
        "dtype": "float32",
        "shape": [1, 16],
        "first_position": 10,
        "last_position": 10,
        "digest": digest_hex(trace.frame(0, Kind.SHRINK).digests[2]),
        "bytes": 64,
    }
    assert {row["digest"] is None for row in rows if row["kind"] == "operand"} == {True}


def test_exports_replace_nothing_and_leave_no_halves(record, samples, tmp_path):
    """An existing file is refused; an export that fails is removed."""
    path = record(tmp_path / "t")
    with pytest.raises(InputError, match="exists and is not replaced"):
        export_parquet(open_trace(path), path)
    data = bytearray(path.read_bytes())
    data[data.index(samples.make_step(2)[1][2].payload)] ^= 1
    path.write_bytes(data)
    for export in (export_safetensors, export_parquet):
        with pytest.raises(ValueError, match="step 2, cache frame"):
            export(open_trace(path), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_pyarrow_and_safetensors_are_imported_only_to_export():
    """Importing the store loads neither."""
    code = "import sys, fliptrace.store; print({'pyarrow', 'safetensors'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
