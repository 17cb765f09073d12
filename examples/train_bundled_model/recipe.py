"""The numbers that decide what the bundled model becomes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from solutions import Wording

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Phase:
    """How long and how fast one training phase goes.

    The learning rate rises over `warmup` steps and falls linearly to zero at `steps`. The corpus has
    `documents` documents of at most `width` tokens and is repeated when it is used up.
    """

    documents: int
    steps: int
    batch: int
    learning_rate: float
    weight_decay: float
    warmup: int
    width: int
    wording: Wording


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what comes out."""

    seed: int
    vocabulary: int
    tokenizer_documents: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    rank: int
    alpha: int
    base: Phase
    adapter: Phase
    polish: Phase
    prompts: int


FULL = Recipe(
    seed=2026,
    vocabulary=768,
    tokenizer_documents=40_000,
    layers=8,
    hidden=256,
    heads=8,
    kv_heads=4,
    feed_forward=768,
    rank=16,
    alpha=32,
    base=Phase(1_250_000, 5500, 256, 2e-3, 0.1, 200, 144, Wording()),
    adapter=Phase(400_000, 1400, 192, 6e-3, 0.0, 50, 144, Wording(chains=True)),
    polish=Phase(8000, 200, 32, 1e-3, 0.0, 10, 144, Wording(chains=True, parentheses=False)),
    prompts=200,
)
SMOKE = replace(
    FULL,
    tokenizer_documents=2000,
    layers=1,
    feed_forward=256,
    base=replace(FULL.base, documents=256, steps=4, batch=16, warmup=1),
    adapter=replace(FULL.adapter, documents=128, steps=3, batch=8, warmup=1),
    polish=replace(FULL.polish, documents=64, steps=2, batch=8, warmup=1),
    prompts=4,
)
