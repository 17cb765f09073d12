"""docs/recipes.md is executed: what it shows must run as it stands, in the order in which it stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "recipes.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
MARK = "\n=== block\n"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """What each block printed, and the folder in which they ran, one after another in one process."""
    folder = tmp_path_factory.mktemp("recipes")
    blocks = BLOCK.findall(PAGE.read_text("utf-8"))
    program = f"print({MARK!r}, end='')\n".join(blocks)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(MARK)
    assert len(printed) == len(blocks)
    return blocks, printed, folder


def output_of(executed, word):
    """What the block that holds a word printed."""
    blocks, printed, _ = executed
    (number,) = [n for n, block in enumerate(blocks) if word in block]
    return printed[number]


def test_every_recipe_runs(executed):
    """The workbench, all edits and all results; files are where the page says."""
    _, _, folder = executed
    assert {path.name for path in folder.iterdir()} >= {"edits.json", "pair", "cause.html"} or (
        "Void" in output_of(executed, "investigate(")
    )
    assert "refused:" in output_of(executed, "100_000")
    document = json.loads((folder / "pair" / "report.json").read_text("utf-8"))
    assert document["interventions"]["investigation"] is not None
    assert len(document["interventions"]["claims"]) == 1


def test_the_paper_s_experiments_come_out_as_on_the_page(executed):
    """Reconstruction, the cache before the flip, one coordinate, and the answer; or all void on another processor."""
    replayed = output_of(executed, "workbench.reconstruct()")
    if replayed.count("bit-equal") != 2:
        assert output_of(executed, "cache = CacheEdit").startswith("void")
        assert "Void" in output_of(executed, "investigate(")
        return
    assert output_of(executed, "cache = CacheEdit").startswith("sufficient")
    screened = output_of(executed, "found = []")
    assert (
        "layer 0 self_attn.q_proj, step 17, token position 53, rank index 1 reference sufficient"
        in screened
    )
    assert output_of(executed, "recipient = found[0]").startswith("sufficient")
    assert output_of(executed, "unedited=unedited").split() == (
        "unedited: 137 correct edited: 147 wrong".split()
    )
    assert output_of(executed, "investigate(").startswith("One FP32 value is enough")


def test_links_lead_somewhere():
    """Every relative link of the page points at a file."""
    links = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text("utf-8"))
    missing = [link for link in links if not (PAGE.parent / link).exists()]
    assert links
    assert not missing
