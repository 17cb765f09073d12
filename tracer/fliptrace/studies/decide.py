"""trace-study decide: yes/no decisions, N times each: the counterpart of the paper's table 2.

Protocol: the paper, section 5.4. One forward over the prompt gives log-probabilities of the next token; p is that of
yes, normalised over yes and no, and p >= 0.5 is yes. How much probability the two labels had together is the label
mass. The read is the same on every engine. With a server it is the server's own structured-decision interface that
decides (fliptrace.studies.decide_server).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fliptrace.errors import InputError
from fliptrace.pair.prompts import require_text
from fliptrace.pair.recording import set_reduction
from fliptrace.studies.engine_process_reductions import (
    IN_PROCESS,
    IN_THIS_PROCESS,
    check_mode,
    grouped,
    mode_identity,
    runs_in_processes,
    together,
)
from fliptrace.studies.engine_process_settings import EngineSettings
from fliptrace.studies.engines import (
    SEEDS_PER_PROMPT,
    ModelSettings,
    check_prompts,
    check_repeats,
    describe_engine,
    encode,
    identity_of,
    ids_sha256,
    reduction_of,
    simulates,
)
from fliptrace.studies.items import Item, Row
from fliptrace.studies.labelled import (
    LabelledText,
    decision_prompt,
    distinct,
    label_tokens,
    read_labelled,
)
from fliptrace.studies.repeat import PAPER_REDUCTIONS
from fliptrace.studies.server_client import SERVER
from fliptrace.studies.study import Report, Worker
from fliptrace.studies.tasks import Selection


@dataclass(frozen=True, slots=True)
class DecideStudy:
    """Settings of a decide study.

    Attributes:
        csv: a file with a header line; empty where a data set is named.
        question: asked of every text.
        text_column: what is judged.
        label_column: what is right: yes, no, true, false, or a number that means yes from ``threshold`` on; empty for
            none.
        threshold: of numbers in the label column.
        yes: the word whose first token is yes.
        no: the same for no.
        model: what runs.
        selection: which rows.
        reductions: names, short or long.
        repetitions: of each decision, at least 2.
        seed: where schedule seeds begin, on a CPU.
        server: a running server's address, to decide through its own interface; the model and reductions are then its.
        server_model: the name of its model; None where it has one only.
        engines: with vLLM, how engines in processes of their own are made; their mode may be ``in-process``.
        batch_size: requests at once, on such an engine.
        dataset: a data set of the datasets library in the place of a file; see read_labelled_dataset.
        split: of the data set.
    """

    csv: str = ""
    question: str = "Is this comment toxic?"
    text_column: str = "text"
    label_column: str = "label"
    threshold: float = 0.5
    yes: str = "yes"
    no: str = "no"
    model: ModelSettings = field(default_factory=ModelSettings)
    selection: Selection = field(default_factory=lambda: Selection(count=100))
    reductions: tuple[str, ...] = PAPER_REDUCTIONS
    repetitions: int = 10
    seed: int = 0
    server: str | None = None
    server_model: str | None = None
    engines: EngineSettings = field(default_factory=lambda: EngineSettings(mode=IN_PROCESS))
    batch_size: int = 1
    dataset: str | None = None
    split: str = "test"

    @property
    def name(self) -> str:
        """The subcommand."""
        return "decide"

    @property
    def data_name(self) -> str:
        """Where the texts are, for people."""
        return f"{self.dataset}, split {self.split}" if self.dataset else Path(self.csv).name

    @property
    def chosen_reductions(self) -> tuple[str, ...]:
        """The reductions' names; what a server runs has one name."""
        return self.reductions if self.server is None else (SERVER,)

    def identity(self) -> dict[str, Any]:
        """Return what every row depends on; rows of the file, reductions and repetitions may be added later."""
        served = {} if self.server is None else {"server": True, "server_model": self.server_model}
        return {
            "study": self.name,
            **self.model.identity(),
            **served,
            **mode_identity(self.model, self.engines, self.batch_size),
            "yes": self.yes,
            "no": self.no,
            "seed": self.seed,
        }

    def items(self) -> list[Item]:
        """Return one item per row of the file, reduction and repetition.

        Raises:
            InputError: the file cannot be used, or a setting means nothing.
        """
        check_repeats("repetitions", self.repetitions, self.seed)
        if self.server is not None and (self.yes, self.no) != ("yes", "no"):
            raise InputError(
                "a server's interface decides between yes and no; leave other words out"
            )
        if self.server is None:
            check_mode(self.model, self.engines, self.batch_size)
        names = [identity_of(name) for name in self.chosen_reductions]
        return [
            Item(
                f"{source} | {reduction} | repetition {repetition}",
                {
                    "source": source,
                    "number": number,
                    "text": text,
                    "label": label,
                    "reduction": reduction,
                    "repetition": repetition,
                    **together(group, place, self.batch_size),
                },
            )
            for group in grouped(self._read(), self.batch_size)
            for reduction in names
            for repetition in range(self.repetitions)
            for place, (source, number, text, label) in enumerate(group)
        ]

    def _read(self) -> list[tuple[str, int, str, bool | None]]:
        lines = self._lines()
        # Empty and doubled texts are not drawn; a row that was named is taken at its word.
        usable = lines if self.selection.rows else distinct(lines)
        found = []
        for number in self.selection.of(len(usable)):
            line = usable[number]
            require_text(line.text, line.source)
            prompt = line.text
            if self.server is None:  # a server adds the question itself
                prompt = decision_prompt(line.text, self.question, self.yes, self.no)
            found.append((line.source, line.number, prompt, line.label))
        return found

    def _lines(self) -> list[LabelledText]:
        if bool(self.csv) == bool(self.dataset):
            raise InputError("texts come from a CSV file or from a data set: name one of the two")
        columns = self.text_column, self.label_column, self.threshold
        if self.dataset:
            from fliptrace.studies.dataset_library import read_labelled_dataset

            return read_labelled_dataset(self.dataset, self.split, *columns)
        return read_labelled(self.csv, *columns)

    @property
    def in_processes(self) -> bool:
        """Whether vLLM engines in processes of their own run, on this machine."""
        return self.server is None and runs_in_processes(self.model, self.engines)

    def open(self) -> Worker:
        """Load the model, choose production engines, or find the server."""
        if self.server is not None:
            from fliptrace.studies.decide_server import ServerDecideWorker

            return ServerDecideWorker(self)
        if self.in_processes:
            from fliptrace.studies.decide_processes import DecideProcessWorker

            return DecideProcessWorker(self)
        return DecideWorker(self)

    def report(self, rows: Sequence[Row]) -> Report:
        """Compare repetition 0 with the others."""
        from fliptrace.studies.decide_report import decide_report

        left_out = 0
        if not self.selection.rows:
            lines = self._lines()
            left_out = len(lines) - len(distinct(lines))
        return decide_report(self, rows, left_out)


class DecideWorker:
    """Reads the next token's probabilities."""

    def __init__(self, study: DecideStudy) -> None:
        """Load the model and find the two labels' tokens.

        Raises:
            InputError: yes and no begin with the same token.
        """
        self._study = study
        self._engine = study.model.load()
        self._yes, self._no = label_tokens(self._engine.tokenizer, study.yes, study.no)

    def describe(self) -> dict[str, Any]:
        """Return what the engine says about itself, the kernels that ran, and the labels' tokens."""
        check_prompts(
            self._engine,
            ((item.arguments["text"], item.arguments["source"]) for item in self._study.items()),
            chat_template=self._study.model.chat_template,
        )
        described = describe_engine(self._engine, self._study.reductions)
        described["decisions"] = {
            "interface": "next-token log-probabilities, read here",
            "yes_token": self._yes,
            "no_token": self._no,
        }
        return described

    def run(self, item: Item) -> dict[str, Any]:
        """Decide once."""
        asked, study, engine = item.arguments, self._study, self._engine
        prompt = encode(
            engine, asked["text"], asked["source"], chat_template=study.model.chat_template
        )
        seed = study.seed + SEEDS_PER_PROMPT * asked["number"] + asked["repetition"]
        set_reduction(engine, asked["reduction"], seed)
        engine.start(prompt.ids)
        yes, no, mass = decision(engine.step(), self._yes, self._no)
        return {
            **reduction_of(engine),
            **IN_THIS_PROCESS,
            "seed": seed if simulates(engine, asked["reduction"]) else None,
            "prompt": asked["source"],
            "number": asked["number"],
            "repetition": asked["repetition"],
            "prompt_ids_sha256": ids_sha256(prompt.ids),
            "prompt_tokens": len(prompt.ids),
            **decided(yes, no, mass, asked["label"]),
        }


def decided(yes: float, no: float, mass: float, label: bool | None) -> dict[str, Any]:
    """Return a row's columns about a decision: from 0.5 on it is yes."""
    return {
        "yes": yes,
        "no": no,
        "label_mass": mass,
        "decision": yes >= 0.5,
        "label": label,
        "correct": None if label is None else (yes >= 0.5) == label,
    }


def decision(logits: torch.Tensor, yes: int, no: int) -> tuple[float, float, float]:
    """Return p(yes) and p(no), normalised over the two, and the probability that the two have together.

    Args:
        logits: [vocabulary], any floating dtype; computed with in FP64.
        yes: the token of yes.
        no: the token of no.
    """
    logs = torch.log_softmax(logits.detach().cpu().double(), dim=0)
    pair = logs[[yes, no]]
    both = torch.softmax(pair, dim=0)
    return float(both[0]), float(both[1]), float(pair.exp().sum())


def pairs_of(rows: Sequence[Row]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return (repetition 0, repetition r) of the same text and reduction, where both have run."""
    first = {(row["reduction"], row["prompt"]): row for row in rows if row["repetition"] == 0}
    return [
        (first[row["reduction"], row["prompt"]], row)
        for row in rows
        if row["repetition"] and (row["reduction"], row["prompt"]) in first
    ]
