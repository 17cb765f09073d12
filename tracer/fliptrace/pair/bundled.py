"""The model that ships with the package: a small Llama with a LoRA adapter, for demonstrations and tests.

It was trained by examples/train_bundled_model; its card is bundled/README.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from fliptrace.errors import InputError


@dataclass(frozen=True, slots=True)
class BundledPrompt:
    """A held-out word problem.

    Attributes:
        text: the question.
        answer: the right answer.
    """

    text: str
    answer: int


@dataclass(frozen=True, slots=True)
class BundledModel:
    """Where the bundled files lie.

    Attributes:
        model: folder of the model; adapter: folder of its LoRA adapter.
        recorded_pair: folder of a pair that flipped when it was recorded.
        prompts: held-out word problems with answers.
    """

    model: str
    adapter: str
    recorded_pair: str
    prompts: tuple[BundledPrompt, ...]


def bundled_model() -> BundledModel:
    """Find the bundled model.

    Raises:
        InputError: this installation has no bundled files.
    """
    folder = Path(str(files("fliptrace") / "bundled"))
    prompts_file = folder / "prompts.jsonl"
    if not prompts_file.is_file():
        raise InputError(
            f"the bundled model is missing from this installation ({folder}); install the wheel again"
        )
    rows = [
        json.loads(line) for line in prompts_file.read_text("utf-8").splitlines() if line.strip()
    ]
    return BundledModel(
        model=str(folder / "model"),
        adapter=str(folder / "adapter"),
        recorded_pair=str(folder / "recorded-pair"),
        prompts=tuple(BundledPrompt(row["prompt"], row["answer"]) for row in rows),
    )
