"""A reproducer shows its root again in a process of its own, without the model and without this project installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fliptrace.errors import InputError
from fliptrace.numerics import round_to
from fliptrace.trace import Kind
from fliptrace_interventions import export_reproducer, find_root
from fliptrace_interventions.reproducer import LARGEST_BYTES, root_name


@pytest.fixture(scope="module")
def traced(load, tiny, tmp_path_factory):
    """A pair of real schedules with surviving roots, on a tiny Llama, and its engine."""
    from fliptrace.pair import trace_pair

    engine = load("llama")
    for seed in range(40):
        prompt = " ".join(f"w{token}" for token in tiny.prompt_ids(40, seed=seed))
        pair = trace_pair(
            engine,
            prompt=prompt,
            seed=seed,
            attempts=1,
            max_new_tokens=4,
            observer_control=False,
            until="surviving",
            directory=tmp_path_factory.mktemp("traced") / "pair",
        )
        if pair.diff.roots:
            return pair, engine
        pair.close()
    raise AssertionError("no schedule gave a surviving root; trace longer prompts")


def run_script(folder, *arguments):
    """Run a reproducer's script as whoever got it by mail would: nothing of ours on the path."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-I", str(folder / "reproduce.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd="/",
        env=environment,
    )


def test_the_script_shows_the_difference_again(traced, tmp_path):
    """Both recorded rows come out bit by bit from the recorded schedules; fixed orders give one value; below 1 MB."""
    pair, engine = traced
    script = export_reproducer(pair, engine, pair.diff.roots[0], tmp_path / "root")
    folder = shutil.move(script.parent, tmp_path / "mailed")
    done = run_script(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit-equal to the recorded: True" in done.stdout
    assert "atomic:8/32: 2 different in 2 runs" in done.stdout
    assert "unsplit: 1 different in 2 runs" in done.stdout
    assert "deterministic:8: 1 different in 2 runs" in done.stdout
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < LARGEST_BYTES
    assert not {path.suffix for path in files} - {".py", ".json", ".bin", ".pyc"}


def test_the_case_says_what_ran(traced, tmp_path):
    """Observed outputs as recorded, which differ after rounding; launch, seeds, call, machine and A itself."""
    pair, engine = traced
    row = pair.diff.roots[0]
    folder = export_reproducer(pair, engine, row, tmp_path / "root").parent
    case = json.loads((folder / "case.json").read_text("utf-8"))
    for name, trace in (("reference", pair.reference), ("candidate", pair.candidate)):
        recorded = trace.record(row.site.path, Kind.SHRINK, row.step)[case["row"]]
        bits = [f"0x{value & 0xFFFFFFFF:08x}" for value in recorded.view(torch.int32).tolist()]
        assert case["observed"][name] == bits
        assert "operand_strides" in case["launch"][name]
        assert case["recorded_on"][name]["environment.versions"]["torch"]
    values = [
        torch.tensor(int(case["observed"][name][case["column"]], 16)).to(torch.int32)
        for name in ("reference", "candidate")
    ]
    rounded = [round_to(value.view(torch.float32), engine.dtype) for value in values]
    assert rounded[0].view(torch.int16) != rounded[1].view(torch.int16)
    assert case["reduction"] == "atomic:8/32"
    assert len(case["seeds"]) == 2
    size = len(case["kept_rows"]) + len(case["kept_ranks"])
    assert (folder / "operands.bin").stat().st_size == size * case["k"] * 2
    stored = torch.frombuffer(
        bytearray((folder / "operands.bin").read_bytes()), dtype=engine.dtype
    ).view(size, -1)
    site = [entry.path for entry in engine.sites].index(row.site.path)
    weight = engine.shrink_weight(site)
    assert torch.equal(stored[-weight.shape[0] :], weight)


def test_a_wrong_operand_does_not_show_it(traced, tmp_path):
    """One changed bit of x: the script says so and exits with 1."""
    pair, engine = traced
    row = pair.diff.roots[0]
    folder = export_reproducer(pair, engine, row, tmp_path / "root").parent
    case = json.loads((folder / "case.json").read_text("utf-8"))
    data = bytearray((folder / "operands.bin").read_bytes())
    # The sign of every element of the root's row.
    start = case["kept_rows"].index(case["row"]) * case["k"] * 2
    for place in range(start + 1, start + case["k"] * 2, 2):
        data[place] ^= 0x80
    (folder / "operands.bin").write_bytes(bytes(data))
    done = run_script(folder)
    assert done.returncode == 1, done.stdout
    assert "did not show" in done.stdout


def test_recorded_on_a_gpu_it_tries_many_orders(traced, tmp_path):
    """Without recorded schedules the CPU shows that orders of arrival alone change the output."""
    pair, engine = traced
    folder = export_reproducer(pair, engine, pair.diff.roots[0], tmp_path / "root").parent
    case = json.loads((folder / "case.json").read_text("utf-8"))
    (folder / "case.json").write_text(json.dumps(case | {"seeds": None}), "utf-8")
    done = run_script(folder)
    assert done.returncode == 0, done.stdout
    assert "different in 200 runs" in done.stdout


def test_big_operands_are_cut_to_what_computes_the_root(traced, tmp_path, monkeypatch):
    """To the tile, then to the row and rank; what is left gives the same bits."""
    from fliptrace_interventions import reproducer

    pair, engine = traced
    row = pair.diff.roots[-1]
    for limits, most in (((3000, 8000), (16, 16)), ((1, 1), (1, 1))):
        monkeypatch.setattr(reproducer, "_INPUT_BYTES", limits[0])
        monkeypatch.setattr(reproducer, "_OPERAND_BYTES", limits[1])
        folder = export_reproducer(pair, engine, row, tmp_path / f"cut-{most[0]}").parent
        case = json.loads((folder / "case.json").read_text("utf-8"))
        assert len(case["kept_rows"]) <= most[0]
        assert len(case["kept_ranks"]) <= most[1]
        assert case["row"] in case["kept_rows"]
        done = run_script(folder)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "bit-equal to the recorded: True" in done.stdout


def test_roots_are_found_by_number_and_by_name(traced):
    """Path, name or the end of either; the step as a number or prefill; what fits several rows is refused."""
    pair, _ = traced
    diff = pair.diff
    for number, row in enumerate(diff.roots, start=1):
        assert find_root(diff, str(number)) is row
        assert find_root(diff, root_name(row)) is row
        assert find_root(diff, f"{row.site.name}:{row.step}:{row.position}") is row
    first = diff.roots[0]
    if first.step == 0:
        assert find_root(diff, f"{first.site.path}:prefill:{first.position}") is first
    twin = type(first)(**{name: getattr(first, name) for name in first.__slots__})
    object.__setattr__(twin, "site", type(first.site).from_path(f"other.{first.site.path}"))
    both = type(diff)(**{**vars(diff), "roots": (first, twin)})
    with pytest.raises(InputError, match="names 2 roots"):
        find_root(both, f"{first.site.module}:{first.step}:{first.position}")
    none = type(diff)(**{**vars(diff), "roots": ()})
    with pytest.raises(InputError, match="no surviving root"):
        find_root(none, "1")
