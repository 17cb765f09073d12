"""A client of a running server that speaks OpenAI's interface: which models it has, and requests to it."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from fliptrace.errors import InputError

#: What stands in rows and golden files in the place of a reduction: which one runs cannot be known from outside.
SERVER = "server"
#: Sent as a bearer token where it is set.
KEY_VARIABLE = "FLIPTRACE_API_KEY"
_PATIENCE = 300.0


class ServerRefusalError(InputError):
    """A server answered with an error.

    Attributes:
        status: HTTP's code.
    """

    def __init__(self, status: int, message: str) -> None:
        """Keep the code."""
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[type[ServerRefusalError], tuple[int, str]]:
        """Travel between processes with both arguments."""
        return type(self), (self.status, str(self))


class ServerClient:
    """A server and one of its models."""

    def __init__(self, url: str, model: str | None = None) -> None:
        """Ask which models there are.

        Raises:
            InputError: no server, or no such model, or several and none named.
        """
        parsed = urllib.parse.urlsplit(url)
        if parsed.scheme not in ("http", "https") or not parsed.hostname:
            raise InputError(f"a server is given as http://HOST:PORT; got {url!r}")
        self.url = url.rstrip("/").removesuffix("/v1")
        found = self.ask("/v1/models")
        try:
            self.models = tuple(str(entry["id"]) for entry in found["data"])
        except (KeyError, TypeError) as error:
            raise InputError(
                f"{self.url}/v1/models is no list of models ({error!r}); is this an OpenAI-compatible server?"
            ) from error
        named = ", ".join(self.models)
        if model is None and len(self.models) != 1:
            raise InputError(f"the server at {self.url} has several models, name one: {named}")
        if model is not None and model not in self.models:
            raise InputError(f"the server at {self.url} has no model {model!r}; it has: {named}")
        self.model = model or self.models[0]
        self.version = self._version()

    def _version(self) -> str | None:
        try:
            return str(self.ask("/version")["version"])
        except (InputError, KeyError, TypeError):
            return None  # vLLM has it; it is no part of OpenAI's interface

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request, POST with a body and GET without, and return the answer's JSON.

        Raises:
            ServerRefusalError: the server answers with an error.
            InputError: it does not answer.
        """
        headers = {"Content-Type": "application/json"}
        if os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {os.environ[KEY_VARIABLE]}"
        request = urllib.request.Request(  # noqa: S310 (__init__ takes http and https only)
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers=headers,
        )
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE) as response:  # noqa: S310 (the same)
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            said = " ".join(error.read().decode("utf-8", "replace").split())[:300]
            raise ServerRefusalError(
                error.code, f"{self.url}{path} answers {error.code}: {said}"
            ) from error
        except (OSError, ValueError) as error:
            raise InputError(
                f"{self.url}{path} does not answer as a server should ({error}); is it running?"
            ) from error

    def describe(self) -> dict[str, Any]:
        """Return what can be known from outside, as a manifest's sections."""
        return {
            "server": {"model": self.model, "version": self.version, "models": len(self.models)},
            "engine": {"name": f"a server{f', vLLM {self.version}' if self.version else ''}"},
        }
