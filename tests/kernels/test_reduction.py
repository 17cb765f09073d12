from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fliptrace_kernels import Reduction, ReductionError, parse_reduction


@pytest.mark.parametrize(
    ("text", "identity"),
    [
        ("atomic:8", "atomic:8/32"),
        ("atomic:8/128", "atomic:8/128"),
        ("unsplit", "unsplit/64"),
        ("unsplit:1", "unsplit/64"),
        ("unsplit/32", "unsplit/32"),
        ("deterministic:8", "deterministic:8/32"),
        (" deterministic:64/1024 ", "deterministic:64/1024"),
        ("deterministic:8/256", "deterministic:8/256"),
        ("tree:8", "tree:8/32"),
        ("tree:64/128", "tree:64/128"),
        ("local", "local:32/32"),
        ("local:8", "local:8/32"),
        ("local:64/32", "local:64/32"),
        ("atomic:vllm", "atomic:vllm"),
        ("atomic_sk8", "atomic:8/32"),
        ("sk1", "unsplit/64"),
        ("det_sk8", "deterministic:8/32"),
    ],
)
def test_names_give_identities(text, identity):
    """Short forms, long forms and the paper's names give the long identity."""
    assert str(parse_reduction(text)) == identity


@pytest.mark.parametrize(
    "text",
    [
        "",
        "atomic",
        "deterministic",
        "atomic:",
        "atomic:0",
        "atomic:65",
        "atomic:-8",
        "atomic:8/",
        "atomic:8/31",
        "atomic:8/8",
        "atomic:8/2048",
        "atomic:8/32/32",
        "unsplit:2",
        "tree",
        "tree:1",
        "tree:6",
        "local:4",
        "local:24",
        "local:32/64",
        "vllm",
        "vllm:64/256",
        "atomic:vllm/32",
        "Atomic:8",
        "sk2",
        "sk0",
        "det_sk",
        "atomic:٨",
        "atomic:" + "9" * 5000,
        "nonsense",
    ],
)
def test_nonsense_is_refused(text):
    """What is no reduction is refused with a message that says what to write."""
    with pytest.raises(ReductionError, match=r"(got|Try)"):
        parse_reduction(text)


def test_other_types_are_refused():
    """A number is not a reduction's name."""
    with pytest.raises(ReductionError, match="named by text"):
        parse_reduction(8)


@given(
    st.sampled_from(["atomic", "deterministic"]),
    st.integers(1, 64),
    st.sampled_from([16, 32, 64, 128, 256, 512, 1024]),
)
def test_identity_and_json_round_trip(kind, splits, block_k):
    """A reduction is read back equal from its identity and from JSON."""
    reduction = Reduction(kind, splits, block_k)
    assert parse_reduction(str(reduction)) == reduction
    assert Reduction.from_json(json.loads(json.dumps(reduction.to_json()))) == reduction


@pytest.mark.parametrize("name", ["tree:2", "tree:64/1024", "local", "local:8", "atomic:vllm"])
def test_kinds_with_fewer_choices_round_trip(name):
    """Kinds that allow few splits or blocks are read back equal, too."""
    reduction = parse_reduction(name)
    assert parse_reduction(str(reduction)) == reduction
    assert Reduction.from_json(json.loads(json.dumps(reduction.to_json()))) == reduction


def test_vllm_chooses_by_the_number_of_rows():
    """atomic:vllm is vLLM's split 64 below 128 rows and its split 8 from there; others stay."""
    vllm = parse_reduction("atomic:vllm")
    assert [str(vllm.for_rows(rows)) for rows in (0, 1, 127)] == ["atomic:64/256"] * 3
    assert [str(vllm.for_rows(rows)) for rows in (128, 8192)] == ["atomic:8/32"] * 2
    for name in ("atomic:8", "unsplit", "deterministic:8", "tree:8", "local"):
        assert parse_reduction(name).for_rows(1) is parse_reduction(name)
    with pytest.raises(ReductionError, match="atomic:8/32"):
        Reduction("vllm", 8, 32)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "tree"},
        {"kind": "fast"},
        {"scale_at": "total"},
        {"scale_at": ""},
        {"dealing": "chunks"},
        {"more": 1},
    ],
)
def test_stored_nonsense_is_refused(change):
    """A stored reduction with a wrong, empty or unknown field is refused."""
    with pytest.raises(ReductionError):
        Reduction.from_json(parse_reduction("atomic:8").to_json() | change)


@pytest.mark.parametrize(
    ("text", "repeatable", "scale_at"),
    [
        ("atomic:8", False, "partial"),
        ("atomic:vllm", False, "partial"),
        ("tree:8", True, "total"),
        ("local", True, "total"),
        ("atomic:1", True, "partial"),
        ("unsplit", True, "total"),
        ("deterministic:8", True, "total"),
    ],
)
def test_repeatable_by_construction(text, repeatable, scale_at):
    """Only atomics with more than one split have no fixed order; the scale follows the kind."""
    reduction = parse_reduction(text)
    assert reduction.is_repeatable is repeatable
    assert reduction.is_batch_invariant is repeatable
    assert reduction.scale_at == scale_at


def test_sentences_differ():
    """Each kind describes itself with its splits, block and order."""
    assert "order of arrival" in parse_reduction("atomic:8").describe()
    assert "increasing split order" in parse_reduction("deterministic:8").describe()
    assert "blocks of 64" in parse_reduction("unsplit").describe()
    assert "tree of neighbours" in parse_reduction("tree:8").describe()
    assert "each 4 consecutive" in parse_reduction("local").describe()
    assert "depends on how many rows" in parse_reduction("atomic:vllm").describe()
