"""What a training is asked for, and what it gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fliptrace.errors import InputError
from fliptrace.studies.amounts import check_at_least
from fliptrace.studies.labelled import check_threshold

KINDS = ("gsm8k", "mbpp", "csv", "dataset")
#: Kinds whose rows are texts with labels.
LABELLED = ("csv", "dataset")


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Settings of a training.

    Attributes:
        task: ``gsm8k:PATH``, ``mbpp:PATH``, ``csv:PATH`` or ``dataset:NAME`` (see read_labelled_dataset).
        model: a folder, a ``.gguf`` file or a hub name; None for the bundled model without its adapter.
        rank: of the adapter; alpha is twice that.
        epochs: passes over the training rows, at most.
        max_steps: steps of the optimiser, at most; None for no limit.
        batch: rows per step.
        learning_rate: of AdamW; it rises over the first 3 % of the steps and falls linearly to zero.
        max_length: rows of more tokens are left out, and counted.
        seed: of splits, initial weights and order.
        device: see load_engine.
        dtype: see load_engine.
        chat_template: apply the tokenizer's.
        threads: of torch, on a CPU.
        split: of a data set of the datasets library.
        question: asked of every labelled text.
        text_column: of labelled texts.
        label_column: of labelled texts.
        threshold: see DecideStudy.
        yes: the word for yes.
        no: the word for no.
        training_rows: of labelled texts, drawn with both classes in proportion; None for all that are left.
        validation_rows: of labelled texts, drawn the same; GSM8K keeps 5 % back, MBPP has rows of its own.
        test_rows: of labelled texts, the same, written to test.csv and never trained on.
    """

    task: str
    model: str | None = None
    rank: int = 16
    epochs: int = 3
    max_steps: int | None = None
    batch: int = 16
    learning_rate: float = 2e-4
    max_length: int = 1024
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    chat_template: bool = True
    threads: int = 1
    split: str = "train"
    question: str = "Is this comment toxic?"
    text_column: str = "text"
    label_column: str = "label"
    threshold: float = 0.5
    yes: str = "yes"
    no: str = "no"
    training_rows: int | None = None
    validation_rows: int = 200
    test_rows: int = 0

    @property
    def kind(self) -> str:
        """The task's kind."""
        return self.task.partition(":")[0]

    @property
    def place(self) -> str:
        """The task's file, or the name of its data set."""
        return self.task.partition(":")[2]

    @property
    def data(self) -> Path:
        """The task's file."""
        return Path(self.place).expanduser()

    @property
    def data_name(self) -> str:
        """What was learnt, for people, without where it lies here."""
        if self.kind == "dataset":
            return f"{self.task}, split {self.split}"
        return f"{self.kind}:{self.data.name}"

    @property
    def alpha(self) -> int:
        """LoRA's alpha."""
        return 2 * self.rank

    def check(self) -> None:
        """Refuse what means nothing.

        Raises:
            InputError: which setting.
        """
        kind, separator, name = self.task.partition(":")
        if kind not in KINDS or not separator or not name:
            raise InputError(
                f"an adapter is trained for gsm8k:PATH, mbpp:PATH, csv:PATH or dataset:NAME; got {self.task!r}"
            )
        for what in ("rank", "epochs", "batch", "max_length", "threads"):
            check_at_least(what.replace("_", " "), getattr(self, what))
        if self.max_steps is not None:
            check_at_least("max steps", self.max_steps)
        check_at_least("the seed", self.seed, 0)
        check_threshold(self.threshold)
        if not 0 < self.learning_rate < 1:
            raise InputError(
                f"the learning rate must lie between 0 and 1; got {self.learning_rate}"
            )
        if self.validation_rows < 1 or self.test_rows < 0:
            raise InputError(
                f"validation takes at least 1 row and a test set 0; got {self.validation_rows} and {self.test_rows}"
            )
        if self.training_rows is not None:
            check_at_least("training rows", self.training_rows)


@dataclass(frozen=True, slots=True)
class Training:
    """What a training gave.

    Attributes:
        folder: the adapter's.
        steps: of the optimiser.
        best_epoch: whose weights were kept, from 1; 0 for the untrained ones.
        losses: per epoch, from 0 (before the first step): mean loss per answer token in training (None before) and
            in validation.
        rows: how many there were for training, validation and test, and how many were left out as too long.
        seconds: training and validating, without loading.
    """

    folder: Path
    steps: int
    best_epoch: int
    losses: Sequence[tuple[float | None, float]]
    rows: Mapping[str, int]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "steps": self.steps,
            "best_epoch": self.best_epoch,
            "losses": [list(pair) for pair in self.losses],
            "rows": dict(self.rows),
            "seconds": round(self.seconds, 1),
        }
