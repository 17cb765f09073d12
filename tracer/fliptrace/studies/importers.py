"""Prompts from logs of other harnesses: lm-eval's samples and inspect_ai's logs; what was asked, as it was asked.

lm-eval's are JSON lines and are read as such; inspect_ai's by inspect_ai itself, an optional dependency.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fliptrace.errors import InputError
from fliptrace.studies.answers import final_answer, number_of, prepared_solution
from fliptrace.studies.json_lines import lines_of, value_of


def read_lm_eval(path: Path) -> list[dict[str, Any]]:
    """Read ``samples_*.jsonl`` of lm-eval (``--log_samples``), or a folder that holds one.

    Returns:
        One row per document, in the file's order, with ``prompt``, ``target``, ``doc`` and ``name``; of several
        filters' lines of a document the first counts, as the prompt is the same.

    Raises:
        InputError: no such file, several in the folder, or a line that is none of lm-eval's.
    """
    if path.is_dir():
        found = sorted(path.rglob("samples_*.jsonl"))
        if len(found) != 1:
            names = ", ".join(each.name for each in found) or "none"
            raise InputError(
                f"{path} must hold one samples_*.jsonl of lm-eval (--log_samples), or name the file; it holds {names}"
            )
        (path,) = found
    rows: dict[int, dict[str, Any]] = {}
    try:
        for line in lines_of(path.read_text("utf-8")):
            sample = value_of(line)
            requests = sample["arguments"]
            if len(requests) != 1:
                raise InputError(
                    f"{path}: document {sample['doc_id']} has {len(requests)} requests (a multiple choice); only tasks "
                    "that generate can be asked again"
                )
            (request,) = requests.values() if isinstance(requests, Mapping) else requests
            prompt = request["arg_0"] if isinstance(request, Mapping) else request[0]
            rows.setdefault(
                int(sample["doc_id"]),
                {
                    "prompt": _text(prompt, f"{path}, document {sample['doc_id']}"),
                    "target": str(sample["target"]),
                    "doc": sample["doc"],
                    "name": f"document {sample['doc_id']}",
                },
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is no samples file of lm-eval ({error!r})") from error
    return list(rows.values())


def read_inspect(path: Path) -> list[dict[str, Any]]:
    """Read a log of inspect_ai, ``.eval`` or ``.json``.

    Returns:
        One row per sample of the first epoch, with ``prompt``, ``target``, ``metadata`` and ``name``. The prompt is
        what the model was asked, after templates; a system message stands before it.

    Raises:
        InputError: inspect_ai is missing, the file is no log, or a sample is no single question.
    """
    try:
        from inspect_ai.log import read_eval_log
    except ImportError as error:
        raise InputError(
            "logs of inspect_ai are read by inspect_ai, which is not installed: pip install 'fliptrace[harnesses]'"
        ) from error
    if not path.is_file():
        raise InputError(f"{path} is no file; name a log of inspect_ai (.eval or .json)")
    try:
        log = read_eval_log(str(path))
    except Exception as error:
        # Which errors its readers raise is not stated: zip, JSON, pydantic and its own.
        raise InputError(
            f"{path} is no log that inspect_ai reads ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        ) from error
    return [
        {
            "prompt": _question(sample, f"{path}, sample {sample.id}"),
            "target": sample.target
            if isinstance(sample.target, str)
            else "".join(sample.target[:1]),
            "metadata": json.loads(json.dumps(sample.metadata, default=str), parse_constant=str),
            "name": f"sample {sample.id}",
        }
        for sample in log.samples or []
        if sample.epoch == 1
    ]


def gold_of(target: str) -> str | None:
    """Return the number that a target gives: after ``####`` or ``Final answer:``, else at its beginning."""
    return final_answer(prepared_solution(target)) or number_of(target)


def _question(sample: Any, where: str) -> str:
    asked = list(_until_answer(sample.messages)) or (
        [("user", sample.input)]
        if isinstance(sample.input, str)
        else list(_until_answer(sample.input))
    )
    return _joined(asked, where)


def _until_answer(messages: Sequence[Any]) -> Iterator[tuple[str, str]]:
    for message in messages:
        if message.role not in ("system", "user"):
            return
        yield message.role, message.text


def _text(prompt: Any, where: str) -> str:
    """Return a prompt's text; with a chat template lm-eval logs messages as JSON."""
    if isinstance(prompt, str) and prompt.lstrip().startswith('[{"role"'):
        try:
            prompt = json.loads(prompt)
        except ValueError:
            return str(prompt)
    if isinstance(prompt, str):
        return prompt
    return _joined([(entry["role"], str(entry["content"])) for entry in prompt], where)


def _joined(asked: Sequence[tuple[str, str]], where: str) -> str:
    roles = [role for role, _ in asked]
    if roles not in (["user"], ["system", "user"]):
        raise InputError(
            f"{where} is no single question (its messages: {', '.join(roles) or 'none'}); only one user message, with "
            "or without a system message before it, can be asked again"
        )
    return "\n\n".join(text for _, text in asked)
