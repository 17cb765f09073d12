"""trace-check against a running server that speaks OpenAI's completions, such as vLLM's: what shows from outside.

Requests are greedy, one at a time, with log-probabilities. Tokens, the log-probabilities that the server returns and
ties among them are compared; which kernel ran, and whether other requests shared its batches, cannot be known here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fliptrace.errors import InputError
from fliptrace.studies.check import PROMPTS, CheckResult, Stack, check_numbers, with_golden
from fliptrace.studies.golden import (
    golden_differences,
    read_golden,
    require_same,
    require_writable,
)
from fliptrace.studies.repeatability import PromptRuns, Run, run_rounds
from fliptrace.studies.server_client import SERVER, ServerClient

#: As vLLM names tokens when it is asked for their ids.
_ID_PREFIX = "token_id:"
#: Log-probabilities per step: enough to see a tie.
_LOGPROBS = 2


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What a check asks a server.

    Attributes:
        url: where it is, such as ``http://127.0.0.1:8000``.
        model: the served model's name; with vLLM an adapter's. None where the server has one only.
        prompts: texts, completed as they are; empty for the built-in ones.
        rounds: see CheckSettings.
        seconds: see CheckSettings.
        max_new_tokens: see CheckSettings.
        fail_on: see CheckSettings.
    """

    url: str
    model: str | None = None
    prompts: tuple[str, ...] = ()
    rounds: int = 10
    seconds: float = 60.0
    max_new_tokens: int = 64
    fail_on: str = "any"


class CompletionsServer(ServerClient):
    """A server's completions."""

    #: Whether the server says token ids; else tokens are compared as texts.
    says_ids = False

    def complete(self, prompt: str, max_new_tokens: int) -> Run:
        """Complete a prompt greedily once.

        Raises:
            InputError: the server refuses, or returns no log-probabilities.
        """
        request: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "logprobs": _LOGPROBS,
            "seed": 0,
        }
        try:
            answer = self.ask("/v1/completions", request | {"return_tokens_as_token_ids": True})
        except InputError as error:
            if "return_tokens_as_token_ids" not in str(error):
                raise
            answer = self.ask("/v1/completions", request)  # it refuses what is vLLM's alone
        try:
            (choice,) = answer["choices"]
            said = choice["logprobs"]
            tokens = [str(token) for token in said["tokens"]]
            chosen = [None if value is None else float(value) for value in said["token_logprobs"]]
            top = said.get("top_logprobs") or [None] * len(tokens)
            # As text: a log-probability may be no number, which canonical JSON has no word for.
            steps = tuple(
                hashlib.sha256(json.dumps([value, each], sort_keys=True).encode()).hexdigest()[:32]
                for _, value, each in zip(tokens, chosen, top, strict=True)
            )
            run = Run(tuple(map(_number_of, tokens)), steps, _ties(top))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"the server at {self.url} returned no log-probabilities with its completion ({error!r}); trace-check "
                "compares them, so start it with log-probabilities allowed"
            ) from error
        if tokens:
            self.says_ids = all(token.startswith(_ID_PREFIX) for token in tokens)
        return run


def run_server_check(
    settings: ServerSettings,
    *,
    against: Path | None = None,
    save: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> CheckResult:
    """Check a running server; see fliptrace.studies.check.run_check.

    Raises:
        InputError: something given cannot be used, or the server does not answer.
        StorageError: the golden file cannot be written.
    """
    check_numbers(settings.fail_on, settings.rounds, settings.seconds, settings.max_new_tokens)
    if save is not None:
        require_writable(save)
    golden = None if against is None else read_golden(against)
    server = CompletionsServer(settings.url, settings.model)
    texts = settings.prompts or PROMPTS
    prompts = [
        PromptRuns(f"prompt {number}", hashlib.sha256(text.encode()).hexdigest())
        for number, text in enumerate(texts)
    ]
    description = server.describe()
    if golden is not None:
        require_same(golden, description, SERVER, prompts, settings.max_new_tokens, str(against))
    rounds = run_rounds(
        prompts,
        lambda position, _: server.complete(texts[position], settings.max_new_tokens),
        rounds=settings.rounds,
        seconds=settings.seconds,
        progress=progress,
    )
    result = CheckResult(
        stack=_stack(server),
        description=description,
        reduction=SERVER,
        prompts=prompts,
        rounds=rounds,
        golden=None if golden is None else golden_differences(golden, description, prompts),
        fail_on=settings.fail_on,
    )
    return with_golden(result, save, settings.max_new_tokens)


def _stack(server: CompletionsServer) -> Stack:
    version = f"vLLM {server.version}" if server.version else "version not said"
    notes = [
        (
            "seen from outside: tokens and the log-probabilities that the server returns, not all logits; whether "
            "other requests shared its batches cannot be seen"
        )
    ]
    if not server.says_ids:
        notes.append("the server says no token ids: tokens are compared as texts")
    return Stack(
        place=f"{server.model} at {server.url} ({version})",
        kernel=(
            "cannot be known from outside (FLIPTRACE_SHRINK in the server's environment chooses it where "
            "fliptrace's plugin is installed)"
        ),
        notes=tuple(notes),
        watched="returned log-probability",
        in_logits="returned log-probabilities",
        caution="nothing here says in which order its shrinks sum: other runs may differ, whatever these did",
    )


def _number_of(token: str) -> int:
    """Return a token's id, or a number that stands for its text."""
    if token.startswith(_ID_PREFIX):
        return int(token.removeprefix(_ID_PREFIX))
    return int.from_bytes(hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()[:6])


def _ties(top: Sequence[Any]) -> int | None:
    """Count the steps whose two best log-probabilities are equal; None where the server returns no two."""
    pairs = [sorted(map(float, each.values()), reverse=True)[:2] for each in top if each]
    if len(pairs) < len(top) or any(len(pair) < 2 for pair in pairs):
        return None
    return sum(first == second for first, second in pairs)
