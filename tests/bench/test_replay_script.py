"""examples/measure/shrink_replay.py on a CPU: real inputs, simulated orders of arrival."""

from __future__ import annotations

import json
import sys

import pytest
import torch


@pytest.fixture(scope="module")
def script(load_neighbour, repository_root):
    return load_neighbour(repository_root / "examples" / "measure" / "shrink_replay.py")


def test_differences_are_counted(script):
    """Calls, elements, rounding and sizes of what differs from the first execution."""
    first = torch.tensor([1.0, 2.0, 0.0, 4.0, 5.0])
    comparison = script.Comparison(first, torch.tensor([2, 3, 5]))
    comparison.add(first)
    assert (int(comparison.calls), int(comparison.elements)) == (0, 0)
    comparison.add(torch.tensor([1.0, 2.5, -0.0, 4.0, 5.0]))
    assert (int(comparison.calls), int(comparison.elements)) == (2, 2)
    assert int(comparison.surviving) == 2
    close = torch.nextafter(torch.tensor(4.0), torch.tensor(5.0))
    comparison.add(torch.stack([first[0], first[1], first[2], close, close]))
    assert (int(comparison.calls), int(comparison.elements)) == (3, 4)
    assert int(comparison.surviving) == 3
    assert float(comparison.largest) == pytest.approx(1.0)
    assert float(comparison.total) == pytest.approx(1.5)


def random_forward(script, phase="prefill"):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(shape, generator=generator).bfloat16()

    calls = [script.Call(draw(4, 576), [draw(16, 576) for _ in range(3)])]
    calls.append(script.Call(draw(4, 1536), [draw(8, 1536)]))
    return script.Forward(phase, calls)


def test_atomics_differ_and_the_others_repeat(script):
    """The counts add up, per phase, for a reduction of either sort."""
    forwards = [random_forward(script), random_forward(script, "first decode step")]
    for reduction in ("unsplit", "deterministic:8", "local:32"):
        for tally in script.replay(forwards, reduction, 3):
            assert (tally.calls, tally.comparisons) == (2, 4)
            assert tally.elements == 2 * (3 * 4 * 16 + 4 * 8)
            assert (tally.comparisons_differing, tally.elements_differing) == (0, 0)
            assert tally.largest_difference == 0.0
    for tally in script.replay(forwards, "atomic:8", 3):
        assert tally.comparisons_differing == 4
        assert 0 < tally.elements_differing < tally.elements
        assert 0.0 < tally.mean_difference < tally.largest_difference < 1e-3
        assert "100.000 % of 4 comparisons differ" in script.line_of(tally)


def test_the_bundled_model_end_to_end(script, tmp_path, monkeypatch, capsys):
    """Every site of both phases is replayed; q k v and gate up are one call each, as in vLLM."""
    arguments = ["--select", "0", "--executions", "2", "--reductions", "atomic:8", "unsplit"]
    monkeypatch.setattr(
        sys, "argv", ["replay", *arguments, "--device", "cpu", "--folder", str(tmp_path)]
    )
    assert script.main() == 0
    assert "did not repeat: 0" in capsys.readouterr().out
    found = json.loads((tmp_path / "replay.json").read_text())
    assert [(row["reduction"], row["phase"]) for row in found["rows"]] == [
        (reduction, phase) for reduction in ("atomic:8/32", "unsplit/64") for phase in script.PHASES
    ]
    assert {row["calls"] for row in found["rows"]} == {4 * 8}
    assert found["rows"][0]["comparisons_differing"] > 0
    assert found["rows"][2]["comparisons_differing"] == 0


def test_a_missing_model_is_one_line(script, tmp_path, monkeypatch, capsys):
    """Exit 2 and no file."""
    monkeypatch.setattr(
        sys, "argv", ["replay", "--model", str(tmp_path / "no"), "--folder", str(tmp_path / "out")]
    )
    assert script.main() == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
