"""The identity of a reduction: how a shrink sums over K.

A `Reduction` is a value. It says nothing about where it runs; two runs of the same reduction on
different hardware may differ in bits, which the launch configuration in a manifest shows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from fliptrace_kernels.configurations import (
    DEFAULT_BLOCK_K,
    DEFAULT_SPLITS,
    LOCAL_BLOCK_K,
    LOCAL_GROUP,
    LOCAL_SPLITS,
    MAX_BLOCK_K,
    MAX_SPLITS,
    MIN_BLOCK_K,
    VLLM_FEW_ROWS,
    VLLM_MANY_ROWS,
    VLLM_ROWS,
)
from fliptrace_kernels.errors import ReductionError

KINDS: Final = ("atomic", "unsplit", "deterministic", "tree", "local", "vllm")

_NAMED: Final = KINDS[:-1]  # 'vllm' is written atomic:vllm
_VLLM_NAME: Final = "atomic:vllm"
_SCALE_AT: Final = dict.fromkeys(KINDS, "total") | {"atomic": "partial", "vllm": "partial"}
_EXAMPLES: Final = (
    "atomic:8, atomic:8/32, atomic:vllm, unsplit, unsplit/64, deterministic:8, "
    "deterministic:8/256, tree:8, local:32"
)
_TEXT: Final = re.compile(r"(?P<kind>[a-z]+)(?::(?P<splits>[0-9]+))?(?:/(?P<block_k>[0-9]+))?")
_PAPER: Final = re.compile(r"(?P<kind>atomic_|det_)?sk(?P<splits>[0-9]+)")


@dataclass(frozen=True, slots=True)
class Reduction:
    """How a shrink sums over K.

    Attributes:
        kind: 'atomic' (partials added in order of arrival), 'unsplit' (one sum over K),
            'deterministic' (partials added in increasing split order), 'tree' (partials added as a
            tree of neighbours), 'local' (partials added in groups of four, then the groups) or
            'vllm' (atomic with splits and K block chosen by the number of rows; see `for_rows`).
        splits: S, number of partial sums, 1 to 64; 2, 4, ... 64 for 'tree', 8, 16, 32 or 64 for
            'local', and for 'vllm' that of few rows.
        block_k: K elements per block, a power of two from 16 to 1024; 32 for 'local', and for
            'vllm' that of few rows.
        dealing: 'round-robin': split p takes blocks p, p + S, p + 2S, ...
        scale_at: 'partial' (each partial is scaled, then added) or 'total' (the sum is scaled).
            It follows from the kind; leave it out.

    Raises:
        ReductionError: if a value is out of range or the values contradict each other.
    """

    kind: str
    splits: int
    block_k: int
    dealing: str = "round-robin"
    scale_at: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ReductionError(
                f"a reduction is one of {', '.join(KINDS)}; got {self.kind!r}. Try: {_EXAMPLES}"
            )
        if type(self.splits) is not int or not 1 <= self.splits <= MAX_SPLITS:
            raise ReductionError(
                f"splits must be a whole number from 1 to {MAX_SPLITS}; got {self.splits!r}. "
                f"Try: {_EXAMPLES}"
            )
        block_k = self.block_k
        if (
            type(block_k) is not int
            or not MIN_BLOCK_K <= block_k <= MAX_BLOCK_K
            or block_k & (block_k - 1)
        ):
            raise ReductionError(
                f"the K block must be a power of two from {MIN_BLOCK_K} to {MAX_BLOCK_K}; "
                f"got {block_k!r}. Try: {_EXAMPLES}"
            )
        self._check_kind()
        if self.dealing != "round-robin":
            raise ReductionError(
                f"K blocks can be dealt to splits 'round-robin' only; got {self.dealing!r}"
            )
        if self.scale_at == "":
            object.__setattr__(self, "scale_at", _SCALE_AT[self.kind])
        if self.scale_at != _SCALE_AT[self.kind]:
            raise ReductionError(
                f"{self.kind} applies its scale at the {_SCALE_AT[self.kind]}; "
                f"got scale_at={self.scale_at!r}. Leave scale_at out"
            )

    def _check_kind(self) -> None:
        """Check what one kind asks of splits and K block beyond their common ranges."""
        kind, splits, block_k = self.kind, self.splits, self.block_k
        if kind == "unsplit" and splits != 1:
            raise ReductionError(
                f"unsplit has exactly 1 split; got {splits}. "
                f"For partial sums in a fixed order use deterministic:{splits}"
            )
        if kind == "tree" and (splits == 1 or splits & (splits - 1)):
            raise ReductionError(
                f"tree pairs its partials, so splits must be 2, 4, 8, 16, 32 or 64; got {splits}. "
                "Try tree:8, or unsplit for one sum"
            )
        if kind == "local" and (splits not in LOCAL_SPLITS or block_k != LOCAL_BLOCK_K):
            raise ReductionError(
                f"local has {', '.join(map(str, LOCAL_SPLITS))} splits and a K block of "
                f"{LOCAL_BLOCK_K}; got {splits} and {block_k}. Try local:32"
            )
        if kind == "vllm" and (splits, block_k) != VLLM_FEW_ROWS:
            raise ReductionError(
                f"{_VLLM_NAME} has no numbers of its own; got {splits} splits and a K block of "
                f"{block_k}. For these numbers use atomic:{splits}/{block_k}"
            )

    def __str__(self) -> str:
        """Return the identity, such as `atomic:8/32` or `unsplit/64`."""
        if self.kind == "vllm":
            return _VLLM_NAME
        splits = "" if self.kind == "unsplit" else f":{self.splits}"
        return f"{self.kind}{splits}/{self.block_k}"

    @property
    def is_repeatable(self) -> bool:
        """Whether the order of every addition is fixed by construction."""
        return self.kind not in ("atomic", "vllm") or self.splits == 1

    @property
    def is_batch_invariant(self) -> bool:
        """Whether, by construction, a row's sum does not depend on the other rows of its call."""
        return self.is_repeatable

    @property
    def needs_arrival_order(self) -> bool:
        """Whether the specification needs to be told the order in which partials arrive."""
        return not self.is_repeatable

    def for_rows(self, rows: int) -> Reduction:
        """Return what a call of so many rows runs: itself, unless it is `atomic:vllm`.

        vLLM's default takes 64 splits and a K block of 256 for fewer than 128 rows, else 8 and 32.
        """
        if self.kind != "vllm":
            return self
        return Reduction("atomic", *(VLLM_FEW_ROWS if rows < VLLM_ROWS else VLLM_MANY_ROWS))

    def describe(self) -> str:
        """Return one sentence for people."""
        if self.kind == "vllm":
            few, many = VLLM_FEW_ROWS, VLLM_MANY_ROWS
            return (
                f"vLLM's default: atomic:{few[0]}/{few[1]} for fewer than {VLLM_ROWS} rows, else "
                f"atomic:{many[0]}/{many[1]}; partials are added in order of arrival, and a row's "
                "sum depends on how many rows come with it."
            )
        if self.splits == 1:
            return f"One FP32 sum over K in blocks of {self.block_k}, scaled at the end."
        return (
            f"{self.splits} FP32 partial sums over K in blocks of {self.block_k} dealt "
            f"round-robin; {_ORDERS[self.kind]}"
        )

    def to_json(self) -> dict[str, str | int]:
        """Return the identity as JSON values; `from_json` reads it back."""
        return {
            "kind": self.kind,
            "splits": self.splits,
            "block_k": self.block_k,
            "dealing": self.dealing,
            "scale_at": self.scale_at,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> Reduction:
        """Read what `to_json` wrote.

        Raises:
            ReductionError: if a field is missing, unknown or out of range.
        """
        fields = ("kind", "splits", "block_k", "dealing", "scale_at")
        if set(value) != set(fields):
            raise ReductionError(
                f"a stored reduction has exactly the fields {', '.join(fields)}; got {value!r}"
            )
        if value["scale_at"] == "":
            raise ReductionError("a stored reduction must say scale_at; got an empty text")
        return cls(**value)  # type: ignore[arg-type]


_ORDERS: Final = {
    "atomic": (
        "each is scaled, then they are added in order of arrival, which can change from run to run."
    ),
    "deterministic": "they are added in increasing split order, and the total is scaled.",
    "tree": (
        "they are added as a tree of neighbours (0 and 1, 2 and 3, then those sums), and the total "
        "is scaled."
    ),
    "local": (
        f"each {LOCAL_GROUP} consecutive ones are added in increasing order, then these sums in "
        "increasing order, and the total is scaled."
    ),
}


@lru_cache(maxsize=256)
def parse_reduction(text: str) -> Reduction:
    """Read a reduction from text.

    Args:
        text: long form (`atomic:8/32`), short form (`atomic:8`, `unsplit`, `local`; what is left
            out comes from `configurations.DEFAULT_BLOCK_K` and `DEFAULT_SPLITS`), `atomic:vllm`,
            or a name of the paper (`atomic_sk8`, `sk1`, `det_sk8`).

    Raises:
        ReductionError: if the text is none of these.
    """
    if not isinstance(text, str):
        raise ReductionError(f"a reduction is named by text; got {text!r}. Try: {_EXAMPLES}")
    name = text.strip()
    if name == _VLLM_NAME:
        return Reduction("vllm", *VLLM_FEW_ROWS)
    if match := _PAPER.fullmatch(name):
        kind = {"atomic_": "atomic", "det_": "deterministic", None: "unsplit"}[match["kind"]]
        return Reduction(kind, _count(match["splits"]), DEFAULT_BLOCK_K[kind])
    match = _TEXT.fullmatch(name)
    if match is None or match["kind"] not in _NAMED:
        raise ReductionError(
            f"a reduction is written KIND[:SPLITS][/KBLOCK] with KIND one of {', '.join(_NAMED)}; "
            f"got {text!r}. Try: {_EXAMPLES}"
        )
    kind = match["kind"]
    if match["splits"] is None and kind not in DEFAULT_SPLITS:
        raise ReductionError(
            f"{kind} needs a number of splits; got {text!r}. Try: {kind}:8 or "
            f"{kind}:8/{DEFAULT_BLOCK_K[kind]}"
        )
    splits = _count(match["splits"]) if match["splits"] else DEFAULT_SPLITS[kind]
    block_k = _count(match["block_k"]) if match["block_k"] else DEFAULT_BLOCK_K[kind]
    return Reduction(kind, splits, block_k)


def as_reduction(value: Reduction | str) -> Reduction:
    """Return a `Reduction` as it is and parse anything else."""
    return value if isinstance(value, Reduction) else parse_reduction(value)


def _count(digits: str) -> int:
    # Longer digit strings are out of every range, and int() refuses very long ones by itself.
    return int(digits[:9])
