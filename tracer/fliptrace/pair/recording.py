"""Record one execution of a pair into a trace file, with its manifest and its closing record."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fliptrace.manifest import Manifest
from fliptrace.pair.engines import VLLM_OWN
from fliptrace.pair.neighbours import without_prompts
from fliptrace.pair.prompts import Prompt
from fliptrace.pair.settings import PairSettings
from fliptrace.store import TraceWriter
from fliptrace.trace import Closing

if TYPE_CHECKING:
    from fliptrace.capture.recorder import RecorderOptions
    from fliptrace.pair.engines import LoadedEngine

#: Called as progress(what, done, total) from time to time.
Progress = Callable[[str, int, int], None]


@dataclass
class Run:
    """What the executions of one pair share."""

    engine: LoadedEngine
    prompt: Prompt
    settings: PairSettings
    folder: Path
    key: bytes | None
    control: str = "observer control was not run"
    end_ids: frozenset[int] = field(default_factory=frozenset)


def record_execution(
    run: Run,
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

    engine, settings, options = run.engine, run.settings, recorder_options(run)
    set_reduction(engine, reduction, seed)
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
    shown = not settings.redact
    writer.close(
        Closing(
            complete=True,
            stop_reason=execution.stop_reason,
            steps=len(execution.token_ids),
            text=engine.text_of(execution.token_ids) if shown else "",
            piece_texts=tuple(
                engine.text_of((token,), special=True) for token in execution.token_ids
            )
            if shown
            else (),
            prompt_piece_texts=tuple(
                engine.text_of((token,), special=True) for token in run.prompt.ids
            )
            if shown
            else (),
            not_observed=not_observed(engine, settings),
        )
    )
    return execution.token_ids


def manifest_of(run: Run, options: RecorderOptions, attempt: int) -> Manifest:
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
    elif "neighbours" in described["engine"]:
        described["engine"]["neighbours"] = without_prompts(described["engine"]["neighbours"])
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


def not_observed(engine: LoadedEngine, settings: PairSettings) -> tuple[str, ...]:
    """Say what a trace of this engine with these settings does not cover."""
    sentences = list(engine.not_observed())
    if settings.modules:
        sentences.append("kernels that bypass PyTorch's dispatcher show only at the next operation")
    elif getattr(engine, "ranks", 1) > 1:
        sentences.append(
            "sums over ranks (all-reduce) were not recorded: they show as operands of the layers that follow"
        )
    if not settings.operands:
        sentences.append(
            "the shrinks' inputs were kept as digests of their rows, not as values (--operands keeps them)"
        )
    return tuple(sentences)


def recorder_options(run: Run) -> RecorderOptions:
    """Return what the recorder is to keep."""
    from fliptrace.capture.recorder import RecorderOptions

    settings = run.settings
    return RecorderOptions(
        operands=settings.operands,
        modules=settings.modules,
        full_logits=settings.full_logits,
        state_every=settings.state_every,
        redaction_key=run.key,
    )


def set_reduction(engine: LoadedEngine, reduction: str, seed: int) -> None:
    """Choose the reduction; the seed counts only where atomics are simulated."""
    from fliptrace_kernels import parse_reduction

    if reduction == VLLM_OWN:
        engine.set_reduction(reduction)
        return
    simulated = engine.simulates_atomics and not parse_reduction(reduction).is_repeatable
    engine.set_reduction(reduction, seed if simulated else None)
