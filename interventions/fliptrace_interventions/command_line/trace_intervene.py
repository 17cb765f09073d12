"""trace-intervene: prove by substitution what flipped a pair's token, and add the proof to its report."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fliptrace.command_line.options import (
    DebugOption,
    DtypeName,
    EngineName,
    FiguresOption,
    JsonOption,
    QuietOption,
    VersionOption,
)
from fliptrace.command_line.output import figure_formats, show_document
from fliptrace.command_line.running import InterruptedWithResultsError, progress_bar, run
from fliptrace.command_line.vllm_arguments import VllmArgumentOption, read_vllm_arguments
from fliptrace.errors import InputError
from fliptrace_interventions.command_line.options import (
    CLAIM,
    EVIDENCE,
    LIMITS,
    MODEL,
    OUTPUT,
    Answers,
    Continuation,
    Recipient,
)

if TYPE_CHECKING:
    from fliptrace.pair import Pair
    from fliptrace.pair.engines import LoadedEngine
    from fliptrace.views import InterventionReport
    from fliptrace_interventions.command_line.running import Task
    from fliptrace_interventions.edits import Edit
    from fliptrace_interventions.journal import Journal
    from fliptrace_interventions.workbench import Workbench

#: Free continuations may get this long even where the recording was cut earlier.
_LEAST_TOKENS = 256


def trace_intervene(
    pair_dir: Annotated[
        Path | None,
        typer.Argument(help="A folder that trace-pair wrote.", metavar="PAIR_DIR"),
    ] = None,
    *,
    demo: Annotated[
        bool,
        typer.Option(
            "--demo", help="Take the pair that ships with the package; --out says where to."
        ),
    ] = False,
    edit: Annotated[
        list[Path] | None,
        typer.Option(
            help="A JSON file of edits: prove this claim instead of searching. Repeat the option for several claims.",
            metavar="FILE",
            rich_help_panel=CLAIM,
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            help="Prove the claim that the cache before this step is enough, instead of searching.",
            metavar="STEP",
            rich_help_panel=CLAIM,
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Of that cache only these layers: 0,3-5. Without --step, before the judged step.",
            metavar="LAYERS",
            rich_help_panel=CLAIM,
        ),
    ] = None,
    continue_to: Annotated[
        int | None,
        typer.Option(
            help="Judge the token of this step instead of the flip's.",
            metavar="STEP",
            rich_help_panel=CLAIM,
        ),
    ] = None,
    recipient: Annotated[
        Recipient,
        typer.Option(
            help="In whose execution a claim's values are substituted.", rich_help_panel=CLAIM
        ),
    ] = Recipient.BOTH,
    reduction: Annotated[
        str,
        typer.Option(
            help="How everything after an edit sums.",
            metavar="KIND:SPLITS",
            rich_help_panel=EVIDENCE,
        ),
    ] = "unsplit",
    continuation: Annotated[
        Continuation,
        typer.Option(
            help="computed, or another question with verdicts of its own: recorded keeps the rounding error that each "
            "later shrink was recorded with. A search for that needs --out.",
            rich_help_panel=EVIDENCE,
        ),
    ] = Continuation.COMPUTED,
    repeats: Annotated[
        int,
        typer.Option(
            help="How often every arm of a proof runs.", metavar="N", rich_help_panel=EVIDENCE
        ),
    ] = 2,
    shams: Annotated[
        int,
        typer.Option(
            help="Other coordinates of the record that are pushed as far as the cause, per direction.",
            metavar="N",
            rich_help_panel=EVIDENCE,
        ),
    ] = 20,
    seed: Annotated[
        int, typer.Option(help="Of the shams.", metavar="N", rich_help_panel=EVIDENCE)
    ] = 0,
    answers: Annotated[
        Answers,
        typer.Option(
            help="How the final answer is taken out of a text: the number after “Final answer:” or ####, or none.",
            rich_help_panel=EVIDENCE,
        ),
    ] = Answers.GSM8K,
    gold: Annotated[
        str | None,
        typer.Option(
            help="The right answer; continuations then say whether theirs is.",
            metavar="ANSWER",
            rich_help_panel=EVIDENCE,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="End free continuations at this many generated tokens; left out: as recorded, at least 256.",
            metavar="N",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    budget_runs: Annotated[
        int | None,
        typer.Option(
            help="Search with at most this many runs.", metavar="N", rich_help_panel=LIMITS
        ),
    ] = None,
    budget_minutes: Annotated[
        float | None,
        typer.Option(help="Search at most this long.", metavar="N", rich_help_panel=LIMITS),
    ] = None,
    no_resume: Annotated[
        bool,
        typer.Option(
            "--no-resume",
            help="Forget the runs that an earlier search kept beside the pair.",
            rich_help_panel=LIMITS,
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="The pair's base model. Left out, it is looked for under its recorded name and hash.",
            metavar="MODEL",
            rich_help_panel=MODEL,
        ),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(help="Its LoRA adapter; likewise.", metavar="ADAPTER", rich_help_panel=MODEL),
    ] = None,
    engine: Annotated[
        EngineName, typer.Option(help="What runs the model.", rich_help_panel=MODEL)
    ] = EngineName.AUTO,
    vllm_argument: VllmArgumentOption = None,
    device: Annotated[
        str,
        typer.Option(
            help="auto (the kind that recorded the pair), cpu, cuda or cuda:N.",
            metavar="DEVICE",
            rich_help_panel=MODEL,
        ),
    ] = "auto",
    dtype: Annotated[
        DtypeName,
        typer.Option(help="auto (the recorded type) or a type.", rich_help_panel=MODEL),
    ] = DtypeName.AUTO,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Copy the pair into this new folder and report there; the pair's own report stays as it is.",
            metavar="FOLDER",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    export_reproducer: Annotated[
        str | None,
        typer.Option(
            help="Write a folder below 1 MB that shows this root again without the model, and stop. ROOT is its number "
            "in the report's table of surviving roots, or SITE:STEP:POSITION. --out names the folder.",
            metavar="ROOT",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    figures: FiguresOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,  # noqa: ARG001 (read by run)
    version: VersionOption = False,  # noqa: ARG001 (its callback answers)
) -> int:
    """Find out, by substitution, what was enough to flip a recorded pair's token.

    One recorded execution is continued with values of the other put in: its cache before the flip, each root row, each
    coordinate. Everything after an edit runs under one repeatable reduction. What is proved is added to the pair's
    report.html and report.json; the traces stay as they are. A search that was interrupted goes on where it was.

    Exit codes: 0 a sufficient cause was found, 1 none was, 2 trouble (one line on stderr), 3 void: nothing can be
    judged here, and the report says why.
    """
    from fliptrace.pair.pair import require_new
    from fliptrace_interventions.budget import Budget
    from fliptrace_interventions.checks import check_proof
    from fliptrace_interventions.command_line import pairs
    from fliptrace_interventions.command_line.running import Task, run_task

    formats = figure_formats(figures)
    source = _source(pair_dir, demo, out)
    claims = pairs.claims_from_files(edit or [])
    numbers = pairs.layer_numbers(layers)
    of_cache = step is not None or numbers is not None
    if recipient is not Recipient.BOTH and not (claims or of_cache):
        raise InputError(
            f"a search runs in both executions; --recipient {recipient} goes with --edit, --step or --layers"
        )
    if continuation is Continuation.RECORDED and out is None and not (claims or of_cache):
        raise InputError(
            "a search with --continuation recorded asks another question than the pair's own story and must not take "
            "its place; name a new folder with --out"
        )
    named = _Model(model, adapter, str(engine), device, str(dtype), tuple(vllm_argument or ()))
    budget = Budget(budget_runs, budget_minutes)
    check_proof(repeats, shams, seed, max_new_tokens)  # before minutes of loading
    if out is not None:
        require_new(out)
    with pairs.open_pair(source) as pair:
        if export_reproducer is not None:
            return _export(pair, source, named, export_reproducer, out, quiet or as_json)
        if out is None:
            pairs.require_writable(source)
        with contextlib.ExitStack() as kept:
            with progress_bar(quiet or as_json) as show:
                workbench = _workbench(
                    pair,
                    named.load(pair, source),
                    reduction=reduction,
                    continuation=str(continuation),
                    repeats=repeats,
                    shams=shams,
                    seed=seed,
                    target=continue_to,
                    answer=None if answers is Answers.GSM8K else _no_answer,
                    expected_answer=gold,
                    max_new_tokens=_longest(pair) if max_new_tokens is None else max_new_tokens,
                )
                if of_cache:
                    judged = workbench.target_step if step is None else step
                    claims.append(_cache_claim(judged, numbers))
                chosen = None if recipient is Recipient.BOTH else str(recipient)
                task = Task(tuple(claims), chosen, budget)
                task.check(workbench)
                if out is not None:
                    pairs.copy_pair(source, out)
                folder = source if out is None else out
                journal = kept.enter_context(_journal(folder, task, no_resume))
                found = run_task(workbench, task, journal, show)
            return _report(pair, found, folder, formats, as_json)


def _source(pair_dir: Path | None, demo: bool, out: Path | None) -> Path:
    if not demo:
        if pair_dir is None:
            raise InputError("a folder that trace-pair wrote must be named (or --demo)")
        return pair_dir
    if pair_dir is not None:
        raise InputError(f"--demo brings its own pair; leave out {pair_dir}")
    if out is None:
        raise InputError("--demo leaves the pair that ships as it is; name a new folder with --out")
    from fliptrace.pair import bundled_model

    return Path(bundled_model().recorded_pair)


@dataclass(frozen=True, slots=True)
class _Model:
    """What the options say of the model; the rest is what the pair was recorded with."""

    model: str | None
    adapter: str | None
    engine: str
    device: str
    dtype: str
    vllm_argument: tuple[str, ...] = ()

    def load(self, pair: Pair, source: Path) -> LoadedEngine:
        """Load it.

        Raises:
            InputError: it is not here, or cannot be loaded.
        """
        from fliptrace.pair import load_engine
        from fliptrace_interventions.command_line import models

        manifest = pair.reference.manifest
        device = self.device
        if device == "auto":
            device = str(manifest.get("environment.device") or "auto")
        if device == "cpu":
            models.use_recorded_threads(manifest)
        engine = str(manifest.get("engine.name")) if self.engine == "auto" else self.engine
        recorded = manifest.get("engine.arguments") if engine == "vllm" else None
        passed = (recorded or {}) | read_vllm_arguments(self.vllm_argument, engine)
        return load_engine(
            self.model or models.find_model(manifest, source),
            self.adapter or models.find_adapter(manifest, source),
            engine=engine,
            device=device,
            dtype=str(manifest.get("model.dtype")) if self.dtype == "auto" else self.dtype,
            attention=str(manifest.get("model.attention") or "sdpa"),
            vllm_arguments=passed,
            neighbours=models.find_neighbours(manifest, source) if engine == "vllm" else (),
        )


def _workbench(pair: Pair, engine: LoadedEngine, **settings: Any) -> Workbench:
    from fliptrace.pair import shrink_weights
    from fliptrace_interventions.workbench import Workbench

    pair.separate(shrink_weights(engine))  # for the report that is written anew
    return Workbench(pair, engine, **settings)


def _longest(pair: Pair) -> int:
    """A pair may have been cut soon after its flip; its answers are still to be read to their ends."""
    recorded = pair.reference.manifest.get("decoding.max_new_tokens")
    return max(_LEAST_TOKENS, int(recorded or 0))


def _no_answer(_: str) -> None:
    """Take no answer out of a text."""


def _cache_claim(step: int, layers: tuple[int, ...] | None) -> tuple[Edit, ...]:
    """Return the claim that --step and --layers make: the donor's cache before a step."""
    from fliptrace_interventions.edits import CacheEdit

    return (CacheEdit(step, layers),)


@contextlib.contextmanager
def _journal(folder: Path, task: Task, no_resume: bool) -> Iterator[Journal]:
    """Keep finished runs of a search beside the pair; Ctrl-C leaves them and says how to go on."""
    from fliptrace_interventions.command_line.pairs import JOURNAL_NAME
    from fliptrace_interventions.journal import Journal

    path = folder / JOURNAL_NAME
    with Journal(path if task.searches else None) as journal:
        if no_resume:
            journal.forget()
        try:
            yield journal
        except KeyboardInterrupt:
            if not task.searches:
                raise
            raise InterruptedWithResultsError(
                f"interrupted; {len(journal)} finished runs are kept in {path}, the report is as it was. Go on with "
                f"trace-intervene {shlex.quote(str(folder))} and the same options"
            ) from None


def _report(
    pair: Pair, found: InterventionReport, folder: Path, formats: tuple[str, ...], as_json: bool
) -> int:
    """Add what was found to the report, and show it."""
    from fliptrace.pair.pair import DOCUMENT_NAME
    from fliptrace_interventions.command_line.running import exit_code
    from fliptrace_interventions.report import add_to_report, write_pictures

    command = shlex.join(["trace-intervene", *sys.argv[1:]])
    page = add_to_report(folder, pair, found, command=command)
    write_pictures(folder, pair, formats)
    if as_json:
        show_document(json.loads((folder / DOCUMENT_NAME).read_text("utf-8")))
    else:
        _show(found)
        typer.echo(f"\nThe report is {page}")
    return exit_code(found)


def _show(found: InterventionReport) -> None:
    """Print the result: styled on a terminal, plain text of 80 columns anywhere else."""
    from rich.console import Console

    from fliptrace.views import plain_interventions, terminal_interventions

    console = Console()
    if console.is_terminal:
        console.print(terminal_interventions(found))
    else:
        sys.stdout.write(plain_interventions(found))


def _export(
    pair: Pair, source: Path, named: _Model, root: str, out: Path | None, quiet: bool
) -> int:
    """Write the reproducer of one root."""
    from fliptrace_interventions.reproducer import export_reproducer, find_root

    row = find_root(pair.diff, root)
    folder = out or source / f"reproducer-{pair.diff.roots.index(row) + 1}"
    with progress_bar(quiet):
        script = export_reproducer(pair, named.load(pair, source), row, folder)
    typer.echo(f"The reproducer is {script}")
    return 0


def main() -> None:
    """Run the command."""
    run(trace_intervene, "trace-intervene")


if __name__ == "__main__":
    main()
