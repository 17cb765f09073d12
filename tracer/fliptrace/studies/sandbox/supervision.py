"""Run one container as a child process: feed it, read what it says up to a limit, and end it in time."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import IO

from fliptrace.errors import InputError
from fliptrace.studies.sandbox.values import Limits, Outcome, Status

#: Runs inside, as the container's first process: takes its limits and the program from stdin and becomes the program.
BOOTSTRAP = """
import json, os, resource, sys
given = json.loads(sys.stdin.buffer.read())
for name, value in given["limits"].items():
    resource.setrlimit(getattr(resource, name), (value, value))
if os.getuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
os.chdir("/tmp")
os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
with open("/tmp/program.py", "w", encoding="utf-8") as file:
    file.write(given["program"])
os.execv(sys.executable, [sys.executable, "-I", "-B", "/tmp/program.py"])
"""
#: Arguments of the interpreter inside.
PYTHON_ARGUMENTS = ("-I", "-S", "-B", "-c", BOOTSTRAP)
#: The only folder inside that can be written; it is the container's own.
SCRATCH = "/tmp"  # noqa: S108
_CHUNK = 65_536


def supervise(
    command: Sequence[str], program: str, limits: Limits, end: Callable[[], None]
) -> Outcome:
    """Run a container's command with a program on its stdin.

    Args:
        command: starts the container, whose interpreter runs BOOTSTRAP.
        program: Python; it has passed when its last line was reached and the exit code is 0.
        limits: time and output are kept here, the others by the container.
        end: kills all that is left of the container; called in any case.

    Raises:
        InputError: the command cannot be started.
    """
    mark = f"\n{secrets.token_hex(16)}\n".encode()
    # Not sys.exit: threads and functions registered by the program have no say in when it ends.
    last = f"\n\n__import__('sys').stdout.flush()\n__import__('os').write(1, {mark!r})\n__import__('os')._exit(0)\n"
    given = json.dumps({"limits": limits.resource_limits(), "program": program + last})
    begin = time.monotonic()
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise InputError(f"{command[0]} could not be started ({error})") from error
    try:
        stopped, output = _exchange(child, given.encode(), limits, begin)
    finally:
        _end(child, end)
    seconds = time.monotonic() - begin
    text = output.removesuffix(mark).decode("utf-8", "replace")
    if stopped is not None:
        return Outcome(stopped, None, text, seconds)
    code = child.returncode
    if code == 0 and output.endswith(mark):
        return Outcome(Status.PASSED, code, text, seconds)
    return Outcome(Status.KILLED if code < 0 or code > 128 else Status.FAILED, code, text, seconds)


def _exchange(
    child: subprocess.Popen[bytes], given: bytes, limits: Limits, begin: float
) -> tuple[Status | None, bytes]:
    """Write stdin and read the output until the child ends; return which limit was reached, and the output."""
    source, sink = child.stdout, child.stdin
    output = bytearray()
    if source is None or sink is None:
        raise InputError("a sandbox's process has no pipes")
    with selectors.DefaultSelector() as selector:
        for pipe, event in ((source, selectors.EVENT_READ), (sink, selectors.EVENT_WRITE)):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, event)
        while True:
            left = limits.seconds - (time.monotonic() - begin)
            if left <= 0:
                return Status.TIME, bytes(output)
            # Whoever inherits the pipe may hold it open after the container has ended, so its end is looked for, too.
            ended = child.poll() is not None
            ready = selector.select(0.0 if ended else min(left, 0.02))
            for key, _ in ready:
                if key.fileobj is sink:
                    given = _write(selector, sink, given)
                    continue
                chunk = os.read(source.fileno(), _CHUNK)
                output += chunk
                if len(output) > limits.output_bytes:
                    return Status.OUTPUT, bytes(output[: limits.output_bytes])
                if not chunk:
                    selector.unregister(source)
            if ended and not any(key.fileobj is source for key, _ in ready):
                return None, bytes(output)


def _write(selector: selectors.BaseSelector, sink: IO[bytes], given: bytes) -> bytes:
    try:
        written = os.write(sink.fileno(), given)
    except BrokenPipeError:
        written = len(given)
    if written == len(given):
        selector.unregister(sink)
        sink.close()
    return given[written:]


def _end(child: subprocess.Popen[bytes], end: Callable[[], None]) -> None:
    # The client first: a container that floods a client that no longer reads cannot be removed.
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
    end()
