"""Decisions through a server's own structured-decision interface, POST /v1/systemone, question type noul.

vLLM has it for some architectures (Qwen3 among them). The server puts the question into its own prompt and reads the
next-token log-probabilities of yes and no itself; which reduction runs is chosen where the server starts.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from fliptrace.errors import InputError
from fliptrace.studies.items import Item, canonical_json
from fliptrace.studies.server_client import SERVER, ServerClient, ServerRefusalError

if TYPE_CHECKING:
    from fliptrace.studies.decide import DecideStudy

INTERFACE = "/v1/systemone"
_QUESTION = "decision"


class ServerDecideWorker:
    """Asks a server."""

    def __init__(self, study: DecideStudy) -> None:
        """Find the server and see that it decides.

        Raises:
            InputError: no server, no such model, or a server without the interface.
        """
        self._study = study
        self._client = ServerClient(study.server or "", study.server_model)
        try:
            self._ask("x")
        except ServerRefusalError as error:
            raise InputError(
                f"the server at {self._client.url} does not decide through {INTERFACE} ({error}); vLLM has it for some "
                "architectures only. decide without --server makes the same read on either engine"
            ) from error

    def describe(self) -> dict[str, Any]:
        """Return what can be known from outside."""
        client = self._client
        return {
            "model": {"name": client.model},
            "engine": {"name": f"a server{f', vLLM {client.version}' if client.version else ''}"},
            "kernels": {SERVER: "cannot be known from outside"},
            "decisions": {"interface": f"{INTERFACE} of the server, question type noul"},
        }

    def run(self, item: Item) -> dict[str, Any]:
        """Decide once."""
        asked = item.arguments
        answer = self._ask(asked["text"])
        try:
            said = answer["answers"][_QUESTION]["probabilities"]
            yes, no = float(said["yes"]), float(said["no"])
            mass = float(answer["diagnostics"][_QUESTION]["label_mass"])
            tokens = int(answer["usage"]["input_tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{self._client.url}{INTERFACE} gave another answer than expected ({error!r})"
            ) from error
        label = asked["label"]
        decided = yes >= 0.5
        return {
            "reduction": SERVER,
            "schedule": "not known",
            "seed": None,
            "prompt": asked["source"],
            "number": asked["number"],
            "repetition": asked["repetition"],
            # The server makes the ids; this is a hash of what it was sent.
            "prompt_ids_sha256": hashlib.sha256(
                canonical_json(self._request(asked["text"])).encode()
            ).hexdigest(),
            "prompt_tokens": tokens,
            "yes": yes,
            "no": no,
            "label_mass": mass,
            "decision": decided,
            "label": label,
            "correct": None if label is None else decided == label,
        }

    def _request(self, text: str) -> dict[str, Any]:
        question = {"type": "noul", "instructions": self._study.question}
        return {"model": self._client.model, "state": text, "questions": {_QUESTION: question}}

    def _ask(self, text: str) -> Any:
        return self._client.ask(INTERFACE, self._request(text))
