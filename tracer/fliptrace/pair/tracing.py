"""Run a prompt until an execution differs from the first, and keep the two."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fliptrace.analysis import compare
from fliptrace.errors import InputError, StorageError
from fliptrace.manifest import Manifest
from fliptrace.pair.engines import load_engine
from fliptrace.pair.pair import Pair, require_new
from fliptrace.pair.prompts import Prompt, encode_prompt, require_text
from fliptrace.store import TraceWriter, open_trace
from fliptrace.trace import Closing
from fliptrace.verdicts import LEVELS

if TYPE_CHECKING:
    from fliptrace.capture.recorder import RecorderOptions
    from fliptrace.capture.transformers_engine import TransformersEngine

#: Called as progress(what, done, total) from time to time.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class PairSettings:
    """How a pair is searched and recorded.

    Attributes:
        reduction: of both executions, or of the reference alone.
        candidate_reduction: of the candidates, when it is another.
        attempts: how many candidates at the most.
        max_new_tokens: per execution.
        seed: schedule seed of the reference where atomics are simulated; candidates take the seeds after it.
        until: what ends the search: ``token``, ``surviving`` or ``any``.
        operands: keep the shrinks' inputs whole.
        modules: record every module and functional operation.
        full_logits: keep all logits whole.
        redact: keep text and token ids out of the traces; whoever has the model can still work them out from the
            values of its first layer.
        observer_control: run the recorded-against-unrecorded control first.
    """

    reduction: str = "atomic:8"
    candidate_reduction: str | None = None
    attempts: int = 20
    max_new_tokens: int = 256
    seed: int = 0
    until: str = "token"
    operands: bool = False
    modules: bool = False
    full_logits: bool = False
    redact: bool = False
    observer_control: bool = True

    def check(self) -> None:
        """Refuse settings that mean nothing.

        Raises:
            InputError: which, and what is allowed.
        """
        for what, number in (
            ("attempts", self.attempts),
            ("max new tokens", self.max_new_tokens),
            ("seed", self.seed),
        ):
            if not isinstance(number, int):
                raise InputError(f"{what} must be a whole number; got {number!r}")
        if self.attempts < 1:
            raise InputError(f"attempts must be at least 1; got {self.attempts}")
        if self.max_new_tokens < 1:
            raise InputError(f"max new tokens must be at least 1; got {self.max_new_tokens}")
        if self.until not in LEVELS:
            raise InputError(f"a difference is one of {', '.join(LEVELS)}; got {self.until!r}")
        if not 0 <= self.seed < (1 << 63) - self.attempts:
            raise InputError(
                f"schedule seeds (the first and one per attempt) run from 0 to 2^63 - 1; got {self.seed}"
            )
        for name in (self.reduction, self.candidate_reduction):
            if name is not None:
                _check_reduction(name)


def _check_reduction(name: str) -> None:
    from fliptrace_kernels import ReductionError, parse_reduction

    try:
        parse_reduction(name)
    except ReductionError as error:
        raise InputError(str(error)) from error


@dataclass
class _Run:
    """What the executions of one pair share."""

    engine: TransformersEngine
    prompt: Prompt
    settings: PairSettings
    folder: Path
    key: bytes | None
    control: str = "observer control was not run"
    end_ids: frozenset[int] = field(default_factory=frozenset)


def trace_pair(
    model: str | Path | TransformersEngine,
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
    encoded = prompt if isinstance(prompt, Prompt) else _encode(model, prompt, chat_template)
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


@torch.inference_mode(
    False
)  # a caller's inference mode makes tensors without the version counters that recorders read
def _trace_in(
    folder: Path,
    engine: TransformersEngine,
    prompt: Prompt,
    settings: PairSettings,
    progress: Progress | None,
    temporary: Path | None = None,
) -> Pair:
    """Search a pair, its traces in a folder, and compare it."""
    run = _Run(
        engine=engine,
        prompt=prompt,
        settings=settings,
        folder=folder,
        key=secrets.token_bytes(32) if settings.redact else None,
        end_ids=frozenset(end_ids_of(engine)),
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
        on_error.pop_all()
    return pair


def _say_nothing(what: str, done: int, total: int) -> None:
    """Take a report and show nothing."""


def _search(run: _Run, progress: Progress) -> tuple[Path, Path, int]:
    """Record the reference and candidates; return the two kept files and how many candidates ran."""
    from fliptrace.capture.observer_control import observer_control

    settings, engine = run.settings, run.engine
    if settings.observer_control:
        progress("observer control", 0, 1)
        if engine.simulates_atomics:
            _set_reduction(engine, settings.reduction, settings.seed)
        else:
            engine.set_reduction("unsplit")
        run.control = observer_control(
            engine, run.prompt.ids, end_ids=run.end_ids, options=_options(run)
        )
    reference = run.folder / "reference.trace"
    first_ids = _record(run, reference, settings.reduction, settings.seed, "reference", progress)
    kept = run.folder / "candidate.trace"
    name = settings.candidate_reduction or settings.reduction
    for attempt in range(1, settings.attempts + 1):
        path = run.folder / f"candidate-{attempt}.trace"
        what = f"candidate {attempt} of at most {settings.attempts}"
        ids = _record(run, path, name, settings.seed + attempt, what, progress, attempt=attempt)
        differs = ids != first_ids
        if not differs and settings.until != "token":
            with open_trace(reference) as before, open_trace(path) as after:
                differs = compare(before, after).outcome in LEVELS[settings.until]
        path.replace(kept)
        if differs:
            break
    return reference, kept, attempt


def _record(
    run: _Run,
    path: Path,
    reduction: str,
    seed: int,
    what: str,
    progress: Progress,
    attempt: int = 0,
) -> tuple[int, ...]:
    """Record one execution into a file and return its token ids."""
    from fliptrace.capture.decoding import generate
    from fliptrace.capture.recorder import Recorder

    engine, settings, options = run.engine, run.settings, _options(run)
    _set_reduction(engine, reduction, seed)
    writer = TraceWriter(path, manifest_of(run, options, attempt))
    recorder = Recorder(engine, writer, options)

    def on_choice(step: int, choice: Any, logits: Any) -> None:
        recorder.complete_step(step, choice, logits)
        progress(what, step + 1, settings.max_new_tokens)

    try:
        with engine.observed(recorder, modules=settings.modules):
            execution = generate(
                engine,
                run.prompt.ids,
                max_new_tokens=settings.max_new_tokens,
                end_ids=run.end_ids,
                on_choice=on_choice,
            )
            recorder.finish()
    except BaseException as error:
        writer.abandon(f"{type(error).__name__}: {error}")
        raise
    tokenizer = engine.loaded.tokenizer
    shown = not settings.redact
    writer.close(
        Closing(
            complete=True,
            stop_reason=execution.stop_reason,
            steps=len(execution.token_ids),
            text=tokenizer.decode(list(execution.token_ids), skip_special_tokens=True)
            if shown
            else "",
            piece_texts=tuple(tokenizer.decode([token]) for token in execution.token_ids)
            if shown
            else (),
            prompt_piece_texts=tuple(tokenizer.decode([token]) for token in run.prompt.ids)
            if shown
            else (),
            not_observed=not_observed(engine, settings),
        )
    )
    return execution.token_ids


def manifest_of(run: _Run, options: RecorderOptions, attempt: int) -> Manifest:
    """Build the manifest of an execution that is about to run."""
    settings, prompt = run.settings, run.prompt
    ids_text = ",".join(map(str, prompt.ids)).encode()
    fingerprint = (
        hmac.new(run.key, ids_text, hashlib.sha256)
        if run.key is not None
        else hashlib.sha256(ids_text)
    ).hexdigest()
    described: dict[str, Any] = {
        name: dict(section) for name, section in run.engine.describe().items()
    }
    described["prompt"] = {
        "ids_sha256": fingerprint,
        "tokens": len(prompt.ids),
        "chat_template": prompt.chat_template,
        "source": prompt.source,
    }
    if run.key is None:
        described["prompt"] |= {"ids": list(prompt.ids), "text": prompt.text}
    from fliptrace.capture.decoding import TIE_RULE

    described["decoding"] = {
        "method": "greedy",
        "tie_rule": TIE_RULE,
        "max_new_tokens": settings.max_new_tokens,
        "end_ids": sorted(run.end_ids) if run.key is None else [],
    }
    described["recording"] = {
        **options.describe(),
        "attempt": attempt,
        "attempts_allowed": settings.attempts,
        "until": settings.until,
        "observer_control": run.control,
        "not_observed": list(not_observed(run.engine, settings)),
        "expected_sites": [site.path for site in run.engine.sites],
    }
    return Manifest(described)


def not_observed(engine: TransformersEngine, settings: PairSettings) -> tuple[str, ...]:
    """Say what a trace of this engine with these settings does not cover."""
    sentences = list(engine.not_observed())
    if settings.modules:
        sentences.append("kernels that bypass PyTorch's dispatcher show only at the next operation")
    if not settings.operands:
        sentences.append(
            "the shrinks' inputs were kept as digests of their rows, not as values (--operands keeps them)"
        )
    return tuple(sentences)


def end_ids_of(engine: TransformersEngine) -> set[int]:
    """Return the ids that end a generation: the generation configuration's, or the tokenizer's."""
    configured = getattr(getattr(engine.model, "generation_config", None), "eos_token_id", None)
    if configured is None:
        configured = getattr(engine.loaded.tokenizer, "eos_token_id", None)
    if configured is None:
        return set()
    return set(configured) if isinstance(configured, (list, tuple)) else {int(configured)}


def _options(run: _Run) -> RecorderOptions:
    from fliptrace.capture.recorder import RecorderOptions

    settings = run.settings
    return RecorderOptions(
        operands=settings.operands,
        modules=settings.modules,
        full_logits=settings.full_logits,
        redaction_key=run.key,
    )


def _set_reduction(engine: TransformersEngine, reduction: str, seed: int) -> None:
    from fliptrace_kernels import parse_reduction

    simulated = engine.simulates_atomics and not parse_reduction(reduction).is_repeatable
    engine.set_reduction(reduction, seed if simulated else None)


def _encode(engine: TransformersEngine, prompt: str, chat_template: bool) -> Prompt:
    return encode_prompt(engine.loaded.tokenizer, prompt, chat_template=chat_template)


def _as_keywords(settings: PairSettings | None) -> dict[str, Any]:
    source = settings or PairSettings()
    return {name: getattr(source, name) for name in PairSettings.__slots__}
