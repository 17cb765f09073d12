"""On the bundled model: one coordinate that flips the token is named among ten decoys that do not."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from fliptrace.pair import bundled_model, load_engine

PAIRS = 1
#: Prompts on which a cause is found soon on common processors; elsewhere others follow.
LIKELY = (11, 1, 4)


@pytest.fixture(scope="module")
def measure(repository_root):
    """The measuring script as a module; it imports its neighbours by their plain names."""
    folder = repository_root / "examples" / "measure"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location(
            "measure_interventions", folder / "interventions.py"
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(folder))


def test_the_planted_cause_is_named_and_no_decoy(measure):
    """Named, proved, the only sufficient one; taken back from the candidate, each coordinate does as was tried."""
    bundled = bundled_model()
    engine = load_engine(bundled.model, bundled.adapter, device="cpu")
    found = []
    for number in dict.fromkeys((*LIKELY, *range(len(bundled.prompts)))):
        row = measure.plant_and_search(engine, bundled.prompts[number].text, number, shams=2)
        found += [row] if row["planted"] else []
        if len(found) == PAIRS:
            break
    assert len(found) == PAIRS
    for row in found:
        assert row["checks"] == dict.fromkeys(row["checks"], True), row
        assert row["as_planted"]
        assert len(row["plant"]["decoys"]) >= 10
        assert row["decoys_named"] == 0


def test_the_script_says_what_it_does(repository_root):
    """Each subcommand of the measuring script has a help page."""
    script = repository_root / "examples" / "measure" / "interventions.py"
    shown = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    for command in ("planted", "record", "pairs", "speed", "memory"):
        assert command in shown.stdout


def test_rows_add_up(measure):
    """A pair's row holds the counts, and totals are those of the rows."""
    bundled = bundled_model()
    with measure.ft.load_pair(bundled.recorded_pair) as pair:
        engine = load_engine(bundled.model, bundled.adapter, device="cpu")
        bench = measure.Workbench(pair, engine, shams=1)
        story = measure.investigate(bench, budget=measure.Budget(runs=40))
        row = json.loads(json.dumps(measure.row_of(pair, story, "96")))
        assert measure.one_flipped_bit_breaks(engine, bench)
    total = measure.totals([row, row])
    assert total["pairs"] == 2
    assert total["reconstructed"] in (0, 2)
    assert total["roots"] == 2 * row["roots_in_pair"]
    assert row["gold"] == "96"
