"""Run a prompt until an execution differs from the first, and keep the two."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fliptrace.analysis import compare
from fliptrace.errors import InputError, StorageError
from fliptrace.pair.engines import load_engine, shrink_weights
from fliptrace.pair.pair import Pair, require_new
from fliptrace.pair.prompts import Prompt, encode_prompt, require_text
from fliptrace.pair.recording import (
    Progress,
    Run,
    record_execution,
    recorder_options,
    set_reduction,
)
from fliptrace.pair.settings import PairSettings
from fliptrace.store import open_trace
from fliptrace.verdicts import LEVELS

if TYPE_CHECKING:
    from fliptrace.pair.engines import LoadedEngine


def trace_pair(
    model: str | Path | LoadedEngine,
    adapter: str | Path | None = None,
    prompt: str | Prompt = "",
    *,
    settings: PairSettings | None = None,
    directory: str | Path | None = None,
    chat_template: bool = True,
    engine: str = "auto",
    device: str = "auto",
    dtype: str = "auto",
    progress: Progress | None = None,
    **changes: Any,
) -> Pair:
    """Record an execution and then others until one differs; compare it with the first.

    Args:
        model: a model folder, ``.gguf`` file or hub name; or an engine from load_engine, to be used again.
        adapter: the LoRA adapter's folder or hub name; None with an engine.
        prompt: what to ask, or an encoded Prompt.
        settings: how to search and record; single settings can be given as keywords instead
            (``reduction="atomic:8"``, ``attempts=20``, ``max_new_tokens=256``, ``seed=0`` …).
        directory: where the two traces go; it must be empty or not exist. None keeps them in a temporary folder until
            the pair is saved or forgotten.
        chat_template: apply the tokenizer's chat template.
        engine: see load_engine.
        device: see load_engine.
        dtype: see load_engine.
        progress: told what is going on.
        **changes: single settings.

    Returns:
        The pair. When no candidate differed it holds the last one; the verdict says what was seen in how many runs.

    Raises:
        InputError, UnsupportedModelError: something given cannot be used.
        RecordingError: an execution could not be recorded faithfully; ObserverEffectError: recording changed it.
        StorageError: a trace could not be written.
    """
    chosen = (
        PairSettings(**{**_as_keywords(settings), **changes})
        if changes
        else settings or PairSettings()
    )
    chosen.check()
    if isinstance(prompt, str):
        if not isinstance(model, (str, Path)) and adapter is not None:
            raise InputError(
                "an engine has its adapter already; give the prompt alone: trace_pair(engine, prompt=...)"
            )
        require_text(prompt, "given")
    elif not isinstance(prompt, Prompt):
        raise InputError(f"prompt must be a text or a Prompt; got {type(prompt).__name__}")
    if isinstance(model, (str, Path)):
        if adapter is None:
            raise InputError(
                "trace_pair needs a LoRA adapter: give its folder or hub name as the second argument"
            )
        model = load_engine(str(model), str(adapter), engine=engine, device=device, dtype=dtype)
    encoded = (
        prompt
        if isinstance(prompt, Prompt)
        else encode_prompt(model.tokenizer, prompt, chat_template=chat_template)
    )
    if directory is not None:
        folder = Path(directory)
        require_new(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"directory {folder} cannot be made ({error})") from error
        return _trace_in(folder, model, encoded, chosen, progress)
    folder = Path(tempfile.mkdtemp(prefix="fliptrace-pair-"))
    try:
        return _trace_in(folder, model, encoded, chosen, progress, temporary=folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


# A caller's inference mode would make tensors without the version counters that recorders read.
@torch.inference_mode(False)
def _trace_in(
    folder: Path,
    engine: LoadedEngine,
    prompt: Prompt,
    settings: PairSettings,
    progress: Progress | None,
    temporary: Path | None = None,
) -> Pair:
    """Search a pair, its traces in a folder, and compare it."""
    run = Run(
        engine=engine,
        prompt=prompt,
        settings=settings,
        folder=folder,
        key=secrets.token_bytes(32) if settings.redact else None,
        end_ids=engine.end_ids,
    )
    report = progress or _say_nothing
    reference, candidate, attempts = _search(run, report)
    with contextlib.ExitStack() as on_error:
        pair = Pair(
            on_error.enter_context(open_trace(reference)),
            on_error.enter_context(open_trace(candidate)),
            attempts=attempts,
            temporary=temporary,
            progress=lambda done, total: report("comparing", done, total),
        )
        if settings.operands:
            pair.separate(shrink_weights(engine))
        on_error.pop_all()
    return pair


def _say_nothing(what: str, done: int, total: int) -> None:
    """Take a report and show nothing."""


def _search(run: Run, progress: Progress) -> tuple[Path, Path, int]:
    """Record the reference and candidates; return the two kept files and how many candidates ran."""
    from fliptrace.capture.observer_control import observer_control

    settings, engine = run.settings, run.engine
    if settings.observer_control:
        progress("observer control", 0, 1)
        if engine.simulates_atomics:
            set_reduction(engine, settings.reduction, settings.seed)
        else:
            engine.set_reduction("unsplit")
        run.control = observer_control(
            engine, run.prompt.ids, end_ids=run.end_ids, options=recorder_options(run)
        )
    reference = run.folder / "reference.trace"
    first_ids = record_execution(
        run, reference, settings.reduction, settings.seed, "reference", progress
    )
    kept = run.folder / "candidate.trace"
    name = settings.candidate_reduction or settings.reduction
    for attempt in range(1, settings.attempts + 1):
        path = run.folder / f"candidate-{attempt}.trace"
        what = f"candidate {attempt} of at most {settings.attempts}"
        ids = record_execution(
            run, path, name, settings.seed + attempt, what, progress, attempt=attempt
        )
        differs = ids != first_ids
        if not differs and settings.until != "token":
            with open_trace(reference) as before, open_trace(path) as after:
                differs = compare(before, after).outcome in LEVELS[settings.until]
        path.replace(kept)
        if differs:
            break
    return reference, kept, attempt


def _as_keywords(settings: PairSettings | None) -> dict[str, Any]:
    source = settings or PairSettings()
    return {name: getattr(source, name) for name in PairSettings.__slots__}
