"""Try a sandbox's limits with programs that break them; only a sandbox that held is trusted.

A program here is written so that it passes exactly when its attack worked.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from fliptrace.errors import InputError
from fliptrace.studies.sandbox.values import Limits, Outcome, Sandbox, Status

#: Leaves the loop at whatever is refused, and fails then.
_MEMORY = """
kept = []
for _ in range(4 * {memory} // 2**20):
    kept.append(bytearray(b"x") * 2**20)
"""
_PROCESSES = """
import os, time
for _ in range(2 * {processes}):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
"""
_THREADS = """
import threading, time
for _ in range(2 * {processes}):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
"""
_FILE = """
with open("/tmp/large", "wb") as file:
    for _ in range({file} // 2**16 + 2):
        file.write(b"x" * 2**16)
"""
_DISK = """
for number in range(2 * {disk} // 2**20):
    with open(f"/tmp/{{number}}", "wb") as file:
        file.write(b"x" * 2**20)
"""
_FILES = """
kept = [open("/dev/null") for _ in range({files} + 1)]
"""
_NETWORK = """
import socket
socket.create_connection(("127.0.0.1", {port}), timeout=2)
"""
_INTERFACES = """
import socket
assert any(name != "lo" for _, name in socket.if_nameindex())
"""
_HOST_FILE = """
assert open({secret!r}).read()
"""
_ENVIRONMENT = """
import os
assert {variable!r} in os.environ
"""
_WRITING = """
import os
done = 0
for folder in ("/", "/usr", "/usr/lib", "/etc", "/dev", "/var", "/home", "/root", {prefix!r}):
    try:
        open(os.path.join(folder, "written-by-a-probe"), "w").close()
        done += 1
    except OSError:
        pass
assert done
"""
_RIGHTS = """
import os
done = 0
for act in (lambda: os.setuid(0) or os.getuid() or 1 / 0, lambda: os.chroot("/tmp"), lambda: os.nice(-5)):
    try:
        act()
        done += 1
    except (OSError, ZeroDivisionError):
        pass
assert done
"""
_SIGNAL = """
import os, signal
os.kill({victim}, signal.SIGKILL)
"""


def probe(sandbox: Sandbox, limits: Limits) -> None:
    """Run a harmless program and programs that break every limit.

    Args:
        sandbox: to be tried.
        limits: those that will be used; for the probe with less time and, so that it is quick, less memory and disk.

    Raises:
        InputError: which limit did not hold, or that nothing runs.
    """
    small = replace(
        limits, seconds=min(limits.seconds, 5.0), memory_bytes=min(limits.memory_bytes, 96 * 2**20)
    )
    harmless = sandbox.run("assert sum(range(10)) == 45\n", replace(small, seconds=15.0))
    if harmless.status is not Status.PASSED:
        raise InputError(
            f"{sandbox.name} does not run a harmless program ({harmless.status}): {_end_of(harmless.output)}"
        )
    for name, attack, held in _attacks(sandbox, small):
        outcome = attack()
        if not held(outcome):
            raise InputError(
                f"{sandbox.name} does not hold its limits: {name} got through ({outcome.status})"
            )


_Attack = tuple[str, Callable[[], Outcome], Callable[[Outcome], bool]]


def _attacks(sandbox: Sandbox, limits: Limits) -> Iterator[_Attack]:
    def attack(name: str, program: str) -> _Attack:
        return name, lambda: sandbox.run(program, limits), _refused

    yield attack("memory", _MEMORY.format(memory=limits.memory_bytes))
    yield attack("processes", _PROCESSES.format(processes=limits.processes))
    yield attack("threads", _THREADS.format(processes=limits.processes))
    yield attack("the size of a file", _FILE.format(file=limits.file_bytes))
    yield attack("the size of all files", _DISK.format(disk=limits.disk_bytes))
    yield attack("open files", _FILES.format(files=limits.open_files))
    yield attack("a network interface", _INTERFACES)
    yield attack("writing outside of /tmp", _WRITING.format(prefix=str(Path(sys.base_prefix))))
    yield attack("a right of root", _RIGHTS)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        yield attack("a connection to this machine", _NETWORK.format(port=port))
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.write_text("not for programs")
        Path(folder).chmod(0o755)
        yield attack("a file of this machine", _HOST_FILE.format(secret=str(secret)))
    variable = next(
        iter(name for name in os.environ if name not in ("PATH", "HOME", "LC_CTYPE")), ""
    )
    yield attack("the environment", _ENVIRONMENT.format(variable=variable))
    victim = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"])
    try:
        yield attack("a signal to this machine's process", _SIGNAL.format(victim=victim.pid))
        alive = victim.poll() is None
        yield "a signal", lambda: Outcome(Status.FAILED, None, "", 0.0), lambda _: alive
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait()
    short = replace(limits, seconds=1.0)
    yield (
        "time",
        lambda: sandbox.run("while True:\n    pass\n", short),
        lambda outcome: outcome.status is Status.TIME and outcome.seconds < 10,
    )
    yield (
        "output",
        lambda: sandbox.run("while True:\n    print('x' * 1000)\n", limits),
        lambda outcome: outcome.status is Status.OUTPUT,
    )
    yield (
        "leaving early",
        lambda: sandbox.run("import os\nos._exit(0)\n", limits),
        lambda outcome: outcome.status is Status.FAILED,
    )


def _refused(outcome: Outcome) -> bool:
    return outcome.status in (Status.FAILED, Status.KILLED)


def _end_of(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
