"""Golden files of trace-check: digests of runs that repeated, and what differs from them elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fliptrace.errors import InputError, StorageError
from fliptrace.manifest import Manifest, differing_keys
from fliptrace.studies.journal import half_of, replace_file
from fliptrace.studies.repeatability import PromptRuns

if TYPE_CHECKING:
    from fliptrace.studies.check import CheckResult

GOLDEN_VERSION = 1


def require_writable(path: Path) -> None:
    """Refuse a place where no file can be made, before a minute's work is lost for it.

    Raises:
        StorageError: why not.
    """
    scratch = half_of(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        scratch.touch()
        scratch.unlink()
    except OSError as error:
        raise StorageError(
            f"golden file {path} cannot be written ({error}); name one in a folder that is there"
        ) from error


def save_golden(path: Path, result: CheckResult, max_new_tokens: int) -> str | None:
    """Write golden digests.

    Returns:
        None; or, where the runs did not repeat and there is nothing to hold others to, what to say of it.

    Raises:
        StorageError: the file cannot be written.
    """
    if not result.repeatable:
        return (
            f"golden digests are of runs that repeat, and these did not ({result.flips} flips, {result.changed_bits} "
            f"runs with other bits under {result.reduction}); {path} was not written. Try --reduction deterministic:8, "
            "or FLIPTRACE_SHRINK=deterministic:8 where a server starts"
        )
    document = {
        "golden_version": GOLDEN_VERSION,
        "reduction": result.reduction,
        "max_new_tokens": max_new_tokens,
        "prompts": [
            {
                "ids_sha256": prompt.ids_sha256,
                "tokens": prompt.runs[0].tokens_digest,
                "logits": prompt.runs[0].logits_digest,
            }
            for prompt in result.prompts
        ],
        "manifest": dict(result.description),
    }
    replace_file(path, json.dumps(document, indent=1) + "\n")
    return None


def read_golden(path: Path) -> dict[str, Any]:
    """Read what save_golden wrote.

    Raises:
        InputError: it is no golden file, or one of another version.
    """
    try:
        found: Any = json.loads(path.read_text("utf-8"))
        version = found["golden_version"]
        complete = all(
            {"ids_sha256", "tokens", "logits"} <= set(prompt) for prompt in found["prompts"]
        ) and {"reduction", "max_new_tokens", "manifest"} <= set(found)
    except OSError as error:
        raise InputError(
            f"golden file {path} cannot be read ({error.strerror}); --save writes one where runs repeat"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no golden file of trace-check ({error!r})") from error
    if version != GOLDEN_VERSION or not complete:
        raise InputError(
            f"{path} is a golden file of version {version}, this one reads {GOLDEN_VERSION}; save it again"
        )
    return dict(found)


def require_same(
    golden: Mapping[str, Any],
    description: Mapping[str, Any],
    reduction: str,
    prompts: Sequence[PromptRuns],
    max_new_tokens: int,
    name: str,
) -> None:
    """Refuse to compare what was not asked the same.

    Raises:
        InputError: what differs.
    """
    here, there = Manifest(description), Manifest(golden["manifest"])
    pairs = [
        (key, there.get(key), here.get(key))
        for key in ("model.sha256", "model.dtype", "adapter.sha256", "server.model")
    ]
    pairs += [
        ("reduction", golden["reduction"], reduction),
        ("max new tokens", golden["max_new_tokens"], max_new_tokens),
        (
            "prompts",
            [prompt["ids_sha256"] for prompt in golden["prompts"]],
            [prompt.ids_sha256 for prompt in prompts],
        ),
    ]
    for what, before, after in pairs:
        if before != after:
            of = (
                "other prompts"
                if what == "prompts"
                else f"another {what} ({before} there, {after} here)"
            )
            raise InputError(
                f"golden file {name} is of {of}; its digests say nothing about these runs"
            )


def golden_differences(
    golden: Mapping[str, Any], description: Mapping[str, Any], prompts: Sequence[PromptRuns]
) -> list[str]:
    """Return one sentence per prompt whose first run is not the golden one, then what else is different here."""
    sentences = []
    for before, prompt in zip(golden["prompts"], prompts, strict=True):
        run = prompt.runs[0]
        if before["tokens"] != run.tokens_digest:
            sentences.append(f"{prompt.name}: other tokens than in the golden file")
        elif before["logits"] != run.logits_digest:
            sentences.append(f"{prompt.name}: the golden file's tokens, other bits in logits")
    if sentences:
        odd = differing_keys(Manifest(golden["manifest"]), Manifest(description))
        sentences += [
            f"different here: {key} was {before}, is {after}" for key, before, after in odd
        ]
    return sentences
