from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fliptrace_kernels import Reduction, ReductionError, parse_reduction
from fliptrace_kernels.configurations import DEFAULT_BLOCK_K, launch_for


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
        "tree:8",
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


@pytest.mark.parametrize(
    "change",
    [{"kind": "tree"}, {"scale_at": "total"}, {"scale_at": ""}, {"dealing": "chunks"}, {"more": 1}],
)
def test_stored_nonsense_is_refused(change):
    """A stored reduction with a wrong, empty or unknown field is refused."""
    with pytest.raises(ReductionError):
        Reduction.from_json(parse_reduction("atomic:8").to_json() | change)


@pytest.mark.parametrize(
    ("text", "repeatable", "scale_at"),
    [
        ("atomic:8", False, "partial"),
        ("atomic:1", True, "partial"),
        ("unsplit", True, "total"),
        ("deterministic:8", True, "total"),
    ],
)
def test_repeatable_by_construction(text, repeatable, scale_at):
    """Only atomics with more than one split have no fixed order; the scale follows the kind."""
    reduction = parse_reduction(text)
    assert reduction.is_repeatable is repeatable
    assert reduction.scale_at == scale_at


def test_sentences_differ():
    """Each kind describes itself with its splits, block and order."""
    assert "order of arrival" in parse_reduction("atomic:8").describe()
    assert "increasing split order" in parse_reduction("deterministic:8").describe()
    assert "blocks of 64" in parse_reduction("unsplit").describe()


def test_launches_fit_shared_memory():
    """Every rank, block and dtype has a launch within the table's shared memory."""
    for rank in (1, 8, 16, 64, 512):
        for block_k in (16, 32, 256, 512):
            for size in (2, 4):
                launch = launch_for(rank=rank, block_k=block_k, element_bytes=size)
                tile = (launch.block_m + launch.block_n) * block_k * size * launch.num_stages
                assert tile <= 96 * 1024
    assert set(DEFAULT_BLOCK_K) == {"atomic", "deterministic", "unsplit"}
