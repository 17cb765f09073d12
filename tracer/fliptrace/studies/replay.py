"""trace-study replay: the same shrink inputs under every reduction, N times: the counterpart of the paper's figure 3.

One item is one forward (prefill or first decode step) of one prompt under one reduction. A prompt's forwards are
captured under ``unsplit``, which repeats, so a resumed study replays the inputs that it would have replayed before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fliptrace.errors import InputError
from fliptrace.numerics import combine_digests, digest_hex, digest_rows
from fliptrace.pair.engines import VLLM_OWN
from fliptrace.studies.engines import (
    SEEDS_PER_PROMPT,
    ModelSettings,
    check_questions,
    check_repeats,
    describe_engine,
    encode,
    identity_of,
    ids_sha256,
    is_repeatable,
    simulates,
)
from fliptrace.studies.items import Item, Row
from fliptrace.studies.results import markdown_table
from fliptrace.studies.shrink_replay import PHASES, Forward, Tally, collect, merged, replay_forward
from fliptrace.studies.statistics import Share, clustered_share, exact_share, few_clusters
from fliptrace.studies.study import Column, Report, Table, unrepeatable_lines
from fliptrace.studies.tasks import Selection, read_questions

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture
    from plotly.graph_objects import Figure

REDUCTIONS = ("atomic:8", "atomic:vllm", "unsplit", "deterministic:8", "local:32")
_PAPER = (
    "The paper (figure 3; 27,440 captured operations × 5 executions): atomic:8 differs in 97.61 % of comparisons, "
    "99.996 % in the prefill and 95.22 % in the first decode step, in 22.31 % of elements, mean |difference| 1.08e-8; "
    "unsplit and deterministic:8 in none."
)
_COLUMNS = (
    Column("item", "string", "the item's name"),
    Column("key", "string", "digest of the item's arguments"),
    Column("prompt", "string", "the prompt's name"),
    Column("number", "int", "its row in the data set, from 0"),
    Column("prompt_ids_sha256", "string", "of the prompt's token ids"),
    Column("prompt_tokens", "int", "how many"),
    Column("operands_digest", "string", "over the bits of all operands of the forward"),
    Column("reduction", "string", "its identity"),
    Column("phase", "string", "prefill or first decode step"),
    Column("seed", "int", "first schedule seed, where arrival orders are simulated"),
    Column("calls", "int", "different shrinks of the forward"),
    Column("comparisons", "int", "executions compared with the first of their call"),
    Column("comparisons_differing", "int", "with another bit"),
    Column("elements", "int", "FP32 outputs compared"),
    Column("elements_differing", "int", "with another bit"),
    Column("elements_surviving", "int", "still different after rounding to the model's type"),
    Column("mean_difference", "float", "mean |difference| over all compared elements"),
    Column("largest_difference", "float", "largest |difference|"),
)


@dataclass(frozen=True, slots=True)
class ReplayStudy:
    """Settings of a replay study.

    Attributes:
        model: what runs.
        task: ``bundled``, ``gsm8k:PATH`` or ``jsonl:PATH``.
        selection: which prompts.
        reductions: names, short or long.
        executions: of each call, at least 2; the first is what the others are compared with.
        seed: where schedule seeds begin, on a CPU.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    task: str = "bundled"
    selection: Selection = field(default_factory=lambda: Selection(count=10))
    reductions: tuple[str, ...] = REDUCTIONS
    executions: int = 5
    seed: int = 0

    @property
    def name(self) -> str:
        """The subcommand."""
        return "replay"

    def identity(self) -> dict[str, Any]:
        """Return what every row depends on; prompts and reductions may be added later."""
        return {
            "study": self.name,
            **self.model.identity(),
            "executions": self.executions,
            "seed": self.seed,
        }

    def items(self) -> list[Item]:
        """Return one item per prompt, phase and reduction.

        Raises:
            InputError: a setting that means nothing.
        """
        check_repeats("executions", self.executions, self.seed)
        names = [identity_of(name) for name in self.reductions]
        if VLLM_OWN in names:
            raise InputError(
                f"replay executes shrinks outside of a model, where {VLLM_OWN} is nothing; atomic:vllm sums as vLLM's "
                "kernel does"
            )
        return [
            Item(
                f"{question.source} | {phase} | {reduction}",
                {"question": question.arguments(), "phase": phase, "reduction": reduction},
            )
            for question in read_questions(self.task, self.selection)
            for phase in PHASES
            for reduction in names
        ]

    def open(self) -> ReplayWorker:
        """Load the model."""
        return ReplayWorker(self)

    def report(self, rows: Sequence[Row]) -> Report:
        """Add the tallies up, per reduction and phase."""
        return replay_report(self, rows)


class ReplayWorker:
    """Captures a prompt's forwards once and replays them."""

    def __init__(self, study: ReplayStudy) -> None:
        """Load the model."""
        self._study = study
        self._engine = study.model.load()
        self._captured: tuple[str, list[Forward], int, list[str]] | None = None

    def describe(self) -> dict[str, Any]:
        """Return what the engine says about itself, and the kernels that ran."""
        study = self._study
        check_questions(self._engine, study.items(), chat_template=study.model.chat_template)
        return describe_engine(self._engine, study.reductions)

    def run(self, item: Item) -> dict[str, Any]:
        """Replay one forward under one reduction."""
        question, study = item.arguments["question"], self._study
        ids_hash, forwards, tokens, digests = self._forwards(question)
        number = PHASES.index(item.arguments["phase"])
        reduction = item.arguments["reduction"]
        seed = study.seed + SEEDS_PER_PROMPT * question["number"]
        tally = replay_forward(
            forwards[number], reduction, study.executions, dtype=self._engine.dtype, seed=seed
        )
        return {
            "prompt": question["source"],
            "number": question["number"],
            "prompt_ids_sha256": ids_hash,
            "prompt_tokens": tokens,
            "operands_digest": digests[number],
            "seed": seed if simulates(self._engine, reduction) else None,
            **asdict(tally),
        }

    def _forwards(self, question: dict[str, Any]) -> tuple[str, list[Forward], int, list[str]]:
        prompt = encode(
            self._engine,
            question["text"],
            question["source"],
            chat_template=self._study.model.chat_template,
        )
        ids_hash = ids_sha256(prompt.ids)
        if self._captured is None or self._captured[0] != ids_hash:
            forwards = collect(self._engine, [prompt.ids])
            digests = [_digest(forward) for forward in forwards]
            self._captured = ids_hash, forwards, len(prompt.ids), digests
        return self._captured


def _digest(forward: Forward) -> str:
    rows = [digest_rows(call.x) for call in forward.calls]
    return digest_hex(combine_digests(torch.cat(rows)))


def replay_report(study: ReplayStudy, rows: Sequence[Row]) -> Report:
    """Say what replays gave, per reduction and phase."""
    found: list[dict[str, Any]] = []
    for reduction in map(identity_of, study.reductions):
        for phase in PHASES:
            own = [row for row in rows if row["reduction"] == reduction and row["phase"] == phase]
            if own:
                found.append(_of(reduction, phase, own))
    header = (
        "reduction",
        "phase",
        "calls",
        "comparisons that differ",
        "prompts with a difference",
        "elements that differ",
        "of these, surviving the rounding",
        "mean |difference|",
        "largest",
    )
    table = [
        (
            entry["reduction"],
            entry["phase"],
            f"{entry['tally'].calls:,}",
            str(entry["comparisons"]),
            str(entry["prompts"]),
            str(entry["elements"]),
            (
                f"{entry['tally'].elements_surviving:,} "
                f"({entry['tally'].elements_surviving / max(1, entry['tally'].elements_differing):.3g})"
            ),
            f"{entry['tally'].mean_difference:.3g}",
            f"{entry['tally'].largest_difference:.3g}",
        )
        for entry in found
    ]
    lines = [
        (
            f"Each call ran {study.executions} times on the same input; executions after the first are compared with "
            "it. A call has the operand rows and the A of each slice as captured, one adapter for all rows, and the "
            "scale 1: PEFT scales after expand, vLLM has the scale in B."
        ),
        "",
        *(markdown_table(header, table) if found else ["Nothing has been replayed yet."]),
        "",
        (
            "Intervals (95 %): over comparisons and elements by a bootstrap of whole prompts, over prompts exact."
            f"{few_clusters(len({row['prompt'] for row in rows}))} The mean is over all compared elements."
        ),
        "",
        _PAPER,
    ]
    if any(row["seed"] is not None for row in rows):
        lines += [
            "",
            "Arrival orders of atomics were simulated, from seeds; a GPU's scheduler has others.",
        ]
    unrepeatable = sorted(
        {
            entry["reduction"]
            for entry in found
            if is_repeatable(entry["reduction"]) and entry["tally"].elements_differing
        }
    )
    lines += unrepeatable_lines(unrepeatable)
    return Report(
        title="Shrinks replayed on identical inputs",
        lines=lines,
        summary={"study": study.name, "reductions": [_plain(entry) for entry in found]},
        tables=(Table("rows", _COLUMNS, rows),),
        figure=_figure(found) if found else None,
        picture=_picture(found) if found else None,
        unrepeatable=unrepeatable,
    )


def _of(reduction: str, phase: str, rows: Sequence[Row]) -> dict[str, Any]:
    names = Tally.__dataclass_fields__
    tallies = [Tally(**{name: row[name] for name in names}) for row in rows]
    return {
        "reduction": reduction,
        "phase": phase,
        "tally": merged(reduction, phase, tallies),
        "comparisons": clustered_share(
            [tally.comparisons_differing for tally in tallies],
            [tally.comparisons for tally in tallies],
        ),
        "prompts": exact_share(sum(t.comparisons_differing > 0 for t in tallies), len(tallies)),
        "elements": clustered_share(
            [tally.elements_differing for tally in tallies], [tally.elements for tally in tallies]
        ),
    }


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    shares = {name: value.to_json() for name, value in entry.items() if isinstance(value, Share)}
    return {**asdict(entry["tally"]), "shares": shares}


def _picture(found: Sequence[dict[str, Any]]) -> Picture:
    from fliptrace.views.static import replay_picture

    return replay_picture([asdict(entry["tally"]) for entry in found])


def _figure(found: Sequence[dict[str, Any]]) -> Figure:
    from fliptrace.studies.figures import shares_figure

    groups: dict[str, dict[str, Share]] = {}
    for entry in found:
        for what in ("comparisons", "elements"):
            group = groups.setdefault(f"{what}, {entry['phase']}", {})
            group[entry["reduction"]] = entry[what]
    return shares_figure(groups, title="Shrinks that differ on identical inputs")
