"""Neighbours of a traced request as users give them: texts, token ids, a file, a number, or those of a recorded one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fliptrace.errors import InputError
from fliptrace.pair.bundled import bundled_model
from fliptrace.pair.prompts import encode_prompt

if TYPE_CHECKING:
    from fliptrace.capture.vllm_engine import Neighbour
    from fliptrace.manifest import Manifest

    #: A neighbour, its text or its token ids; None for the place of the traced request.
    NeighbourLike = Neighbour | str | Sequence[int] | None

_FIELDS = ("prompt", "prompt_ids", "adapter", "traced")


def encoded(
    neighbours: Sequence[NeighbourLike], tokenizer: Callable[[], Any]
) -> tuple[Neighbour | None, ...]:
    """Give every neighbour its token ids.

    Args:
        neighbours: as the user gave them.
        tokenizer: returns the model's tokenizer; called only if there is a text.

    Raises:
        InputError: something else among them, or a text that encodes to nothing.
    """
    from fliptrace.capture.vllm_engine import Neighbour

    loaded: list[Any] = []
    result: list[Neighbour | None] = []
    for number, given in enumerate(neighbours):
        one = given
        if isinstance(one, str) or (isinstance(one, Sequence) and all(map(_is_id, one))):
            one = Neighbour(one if isinstance(one, str) else tuple(one))
        if one is not None and not isinstance(one, Neighbour):
            raise InputError(
                "a neighbour must be a text, token ids, a fliptrace.Neighbour, or None for the place of the traced "
                f"request; number {number} is {type(one).__name__}"
            )
        if one is not None and isinstance(one.prompt, str):
            if not loaded:
                loaded.append(tokenizer())
            ids = encode_prompt(loaded[0], one.prompt, source=f"neighbour {number}").ids
            one = Neighbour(tuple(ids), one.adapter)
        result.append(one)
    return tuple(result)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_neighbours(word: str | None, engine: str) -> tuple[NeighbourLike, ...]:
    """Read ``--neighbours``: how many of the bundled word problems, or a file.

    Args:
        word: a number, or a file of JSON lines, each a text or an object with prompt or prompt_ids and, if it is not
            the traced one, adapter; ``{"traced": true}`` is the place of the traced request. None for no neighbours.
        engine: --engine, or the engine that will run.

    Raises:
        InputError: another engine, more than there are, or a file that cannot be read.
    """
    if word is None:
        return ()
    if engine != "vllm":
        raise InputError(f"--neighbours goes with --engine vllm; got --engine {engine}")
    if word.isdecimal():
        prompts = bundled_model().prompts
        if not 0 < int(word) <= len(prompts):
            raise InputError(
                f"--neighbours takes 1 to {len(prompts)} of the bundled word problems; got {word}. Give a file of "
                "others"
            )
        return tuple(prompt.text for prompt in prompts[: int(word)])
    try:
        lines = Path(word).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"--neighbours must be a number or a file of JSON lines; {word} cannot be read ({error})"
        ) from error
    found = tuple(
        _from_line(line, f"{word}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    )
    if not any(one is not None for one in found):
        raise InputError(
            f"--neighbours {word} holds no neighbour; leave the option out, or add some"
        )
    return found


def _from_line(line: str, where: str) -> NeighbourLike:
    from fliptrace.capture.vllm_engine import Neighbour

    try:
        value = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} must be JSON ({error}); got {line[:60]!r}") from error
    if isinstance(value, str):
        return value
    if value == {"traced": True}:
        return None
    prompts = (
        [value[name] for name in _FIELDS[:2] if name in value] if isinstance(value, dict) else []
    )
    known = isinstance(value, dict) and set(value) <= set(_FIELDS[:3])
    text_or_ids = len(prompts) == 1 and (
        isinstance(prompts[0], str) == ("prompt" in value)
        and (
            isinstance(prompts[0], str)
            or (isinstance(prompts[0], list) and all(map(_is_id, prompts[0])))
        )
    )
    adapter = value.get("adapter", "traced") if known else None
    if not known or not text_or_ids or not isinstance(adapter, (str, type(None))):
        raise InputError(
            f'{where} must be a text, {{"traced": true}}, or an object with prompt (a text) or prompt_ids (numbers) '
            f"and, for another adapter, adapter (a folder, or null for none); got {line[:60]!r}"
        )
    prompt = prompts[0] if isinstance(prompts[0], str) else tuple(prompts[0])
    return Neighbour(prompt, adapter)


def recorded_neighbours(
    manifest: Manifest, adapter_of: Callable[[str, str], str]
) -> tuple[Neighbour | None, ...]:
    """Return the neighbours of a recorded trace, so that an engine can be loaded with them again.

    Args:
        manifest: the trace's.
        adapter_of: returns where an adapter of this name and sha256 is.

    Raises:
        InputError: a redacted trace, which does not hold their prompts.
    """
    from fliptrace.capture.vllm_engine import Neighbour

    section = manifest.get("engine.neighbours")
    if not isinstance(section, Mapping):
        return ()
    found: list[Neighbour | None] = []
    for one in section["requests"]:
        if "prompt_ids" not in one:
            raise InputError(
                "the recording is redacted: its neighbours' token ids were not kept, so its batch cannot be run again. "
                "Record the pair again without --redact"
            )
        sha = str(one["adapter_sha256"])
        adapter = adapter_of(str(one["adapter"]), sha) if sha else one["adapter"]
        found.append(Neighbour(tuple(one["prompt_ids"]), adapter))
    found.insert(int(section["queued_before_the_traced"]), None)
    return tuple(found)


def without_prompts(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest's section on the neighbours without what tells of their prompts, for a redacted trace."""
    hidden = ("prompt_ids", "prompt_sha256")
    requests = [
        {name: value for name, value in one.items() if name not in hidden}
        for one in section["requests"]
    ]
    return {name: value for name, value in section.items() if name != "sha256"} | {
        "requests": requests
    }
