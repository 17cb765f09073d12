"""report.json validates against the published schema, and the schema refuses what is wrong."""

from __future__ import annotations

import copy
import json
import math

import jsonschema
import pytest
import torch

from fliptrace.verdicts import ForeignRoot, Origin, Outcome
from fliptrace.views import report_json, report_schema


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
