"""Trace one prompt, or several, into the output folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING

from fliptrace.command_line.output import Output, show_document, write_pictures
from fliptrace.command_line.running import TROUBLE, exit_code, fail, one_line, trouble_code
from fliptrace.command_line.scratch import scratch_folder
from fliptrace.errors import FliptraceError, StorageError

if TYPE_CHECKING:
    from pathlib import Path

    from fliptrace.pair import Pair, PairSettings, Prompt
    from fliptrace.pair.engines import LoadedEngine
    from fliptrace.views.index import IndexRow


def trace_one(
    engine: LoadedEngine,
    prompt: Prompt,
    settings: PairSettings,
    output: Output,
    show: Callable[[str, int, int], None],
) -> Pair:
    """Find a pair for one prompt and put its report and traces into the output folder; close the pair."""
    with scratch_folder(output.folder) as partial:
        return _trace_into(partial, engine, prompt, settings, output, show)


def _trace_into(
    folder: Path,
    engine: LoadedEngine,
    prompt: Prompt,
    settings: PairSettings,
    output: Output,
    show: Callable[[str, int, int], None],
) -> Pair:
    """Find a pair and write its report beside its traces."""
    from fliptrace.pair import trace_pair

    pair = trace_pair(engine, prompt=prompt, settings=settings, directory=folder, progress=show)
    try:
        pair.write_report(folder, command=output.command)
        write_pictures(pair, folder, output.figures)
    except BaseException:
        pair.close()
        raise
    return pair


def trace_several(
    engine: LoadedEngine,
    prompts: list[Prompt],
    settings: PairSettings,
    output: Output,
    fail_on: str,
    show: Callable[[str, int, int], None],
) -> int:
    """Trace every prompt into a folder of its own and write an index; return the worst exit code.

    A prompt that cannot be traced takes its row in the index and the others go on; so does an interruption, after which
    the finished ones are kept.
    """
    from fliptrace.views import IndexRow, render_index

    codes: list[int] = []
    rows: list[IndexRow] = []
    documents: list[object] = []
    with scratch_folder(output.folder) as partial:
        for number, prompt in enumerate(prompts):
            folder = partial / f"prompt-{number:04d}"
            label = f"prompt {number + 1} of {len(prompts)}: "

            def tell(what: str, done: int, total: int, label: str = label) -> None:
                show(label + what, done, total)

            try:
                pair = _trace_into(folder, engine, prompt, settings, output, tell)
            except StorageError:
                raise
            except KeyboardInterrupt:
                if not rows:
                    raise
                shutil.rmtree(folder, ignore_errors=True)
                codes.append(TROUBLE)
                rows.append(
                    IndexRow(prompt.source, "", None, note="interrupted; later prompts did not run")
                )
                fail(
                    "trace-pair",
                    f"interrupted after {number} of {len(prompts)} prompts; the finished ones are kept",
                )
                break
            except FliptraceError as error:  # the other prompts may still tell something
                message = one_line(str(error))
                fail("trace-pair", f"{folder.name} ({prompt.source}): {message}")
                shutil.rmtree(folder, ignore_errors=True)
                codes.append(trouble_code(error))
                text = "" if settings.redact else prompt.text
                rows.append(IndexRow(prompt.source, text, None, note=message))
                documents.append({"prompt": prompt.source, "error": message})
                continue
            with pair:
                codes.append(exit_code(pair.diff.outcome, fail_on))
                rows.append(index_row(pair, prompt, folder.name, settings))
                documents.append(pair.to_json(output.command) if output.as_json else None)
                output.say(f"{folder.name} ({prompt.source}): {pair!r}")
        (partial / "index.html").write_text(render_index(rows), "utf-8")
    if output.as_json:
        show_document(documents)
    else:
        output.say(f"The index is {output.folder / 'index.html'}")
    return max(codes)


def index_row(pair: Pair, prompt: Prompt, folder: str, settings: PairSettings) -> IndexRow:
    """Describe one pair for the index page."""
    from fliptrace.views import IndexRow

    text = "" if settings.redact else prompt.text
    note = f"candidate {pair.attempts} of at most {settings.attempts}"
    return IndexRow.from_diff(prompt.source, text, pair.diff, folder=folder, note=note)
