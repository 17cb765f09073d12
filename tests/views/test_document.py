"""report.json validates against the published schema, and the schema refuses what is wrong."""

from __future__ import annotations

import copy
import json
import math
import re

import jsonschema
import pytest
import torch

from fliptrace.verdicts import ForeignRoot, Origin, Outcome
from fliptrace.views import plain_summary, report_json, report_schema


def document(pair, **options):
    return report_json(pair.diff, pair.reference, pair.candidate, **options)


def validator():
    jsonschema.Draft202012Validator.check_schema(report_schema())
    return jsonschema.Draft202012Validator(report_schema())


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_validates(pairs, outcome):
    """As written to disk and read again, strict JSON."""
    value = document(pairs.make(outcome), command="trace-pair --demo")
    text = json.dumps(value, allow_nan=False)
    assert next(iter(value)) == "verdict"
    validator().validate(json.loads(text))


@pytest.mark.parametrize("layers", [4, 60])
@pytest.mark.parametrize("outcome", list(Outcome))
def test_the_document_holds_what_the_terminal_prints(pairs, outcome, layers):
    """Every sentence, gist and heading, and the map character by character, can be told from the JSON alone."""
    pair = pairs.make(outcome, layers=layers)
    value = document(pair)
    printed = plain_summary(pair.diff, pair.reference, pair.candidate)
    lines = printed.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith("Map:")), None)
    assert (value["map"] is None) == (start is None) == (outcome is Outcome.IDENTICAL)
    if value["map"] is not None:
        lane = next(n for n, line in enumerate(lines) if line.startswith("  margin"))
        rows = value["map"]["rows"]
        drawn = [
            re.fullmatch(r"  (\S+(?: \S+)?) +(\S+)", line)
            for line in lines[lane - len(rows) : lane]
        ]
        assert [line[1] for line in drawn] == rows
        phases = value["map"]["phases"]
        assert [line[2] for line in drawn] == [
            "|".join(cells) for cells in zip(*(p["cells"] for p in phases), strict=True)
        ]
        assert lines[lane].endswith("|".join(phase["margins"] for phase in phases))
        assert [len(phase["columns"]) for phase in phases] == [
            len(phase["cells"][0]) for phase in phases
        ]
        used = {sign for phase in phases for line in phase["cells"] for sign in line}
        assert used <= set(value["map"]["characters"]["cells"])
        if value["diff"]["flip"] is not None:
            assert lines[lane + 1].rstrip().endswith("^")
            found = [p for p in phases if p["flip"] is not None]
            first, last = found[0]["columns"][found[0]["flip"]]
            assert first <= value["diff"]["flip"]["step"] <= last
    told = " ".join([value["verdict"]["sentence"], *(part["heading"] for part in value["story"])])
    told += " ".join(f"{part['gist']}. {' '.join(part['sentences'])}" for part in value["story"])
    for line in lines[: start if start is not None else len(lines)]:
        text = re.sub(r",? more$", "", line.strip())
        heading, colon, rest = text.partition(": ")
        parts = [heading, rest] if colon and f"{heading}{colon}{rest}" not in told else [text]
        assert all(part in told for part in parts if not part.endswith("in the report.)")), line


def test_hostile_texts_and_special_numbers_validate(pairs):
    """Lone surrogates are escaped; NaN and infinities are strings."""
    pair = pairs.hostile()
    validator().validate(json.loads(json.dumps(document(pair), allow_nan=False)))
    root = pairs.row(pairs.coordinate(math.nan, math.inf))
    value = document(pairs.make(first_propagating=root, roots=(root,)))
    assert value["diff"]["first_propagating"]["coordinates"][0]["reference"] == "NaN"
    validator().validate(json.loads(json.dumps(value, allow_nan=False)))
    foreign = ForeignRoot("logits", "token", 3, -1, Origin.UNLOCATED, "Equal logits, other choice.")
    validator().validate(document(pairs.make(foreign_root=foreign)))
    root = pairs.row(pairs.coordinate(1.0, 1.0000001, dtype=torch.float32))
    validator().validate(document(pairs.make(first_propagating=root)))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema_version",), 2),
        (("verdict", "outcome"), "deterministic"),
        (("surprise",), 1),
        (("diff", "flip", "step"), -1),
        (("diff", "flip", "decided_by_tie_break"), ["left"]),
        (("diff", "rounded_dtype"), "int8"),
        (("diff", "first_propagating", "coordinates", 0, "reference_bits"), "3c298000"),
        (("diff", "first_propagating", "coordinates", 0, "coordinate_class"), "equal"),
        (("diff", "grids", "prefill", "cells", "equal"), -3),
        (("diff", "generated"), [1]),
        (("executions", "reference", "manifest"), None),
        (("story",), []),
        (("story", 0, "gist"), None),
        (("map", "phases", 0, "cells", 0), "..x"),
        (("map", "phases", 0, "margins"), "5"),
        (("map", "phases", 1, "phase"), "warm-up"),
        (("map", "rows", 0), "0"),
        (("map", "merged", "layers"), 0),
    ],
)
def test_the_schema_refuses_planted_faults(pairs, path, value):
    """The constraints are real ones."""
    broken = copy.deepcopy(document(pairs.make()))
    place = broken
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert not validator().is_valid(broken)


def test_an_identical_verdict_excludes_a_flip(pairs):
    """The schema ties the verdict to what was found."""
    value = document(pairs.make())
    value["verdict"]["outcome"] = value["diff"]["outcome"] = "identical"
    assert not validator().is_valid(value)
