"""Choose a sandbox: the first backend that is there and holds its limits under the probe."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from fliptrace.errors import InputError
from fliptrace.studies.sandbox.bubblewrap import Bubblewrap
from fliptrace.studies.sandbox.containers import Containers
from fliptrace.studies.sandbox.probe import probe
from fliptrace.studies.sandbox.values import Limits, Sandbox

#: In the order in which they are tried.
BACKENDS: dict[str, Callable[[], Sandbox]] = {
    "docker": lambda: Containers("docker"),
    "podman": lambda: Containers("podman"),
    "bubblewrap": Bubblewrap,
}


@cache
def open_sandbox(limits: Limits, backend: str | None = None) -> Sandbox:
    """Return a sandbox that held these limits under the probe, once per process.

    Args:
        limits: that programs will run under.
        backend: ``docker``, ``podman`` or ``bubblewrap``; None tries them in this order.

    Raises:
        InputError: none works; the message has the reason of each.
    """
    if backend is not None and backend not in BACKENDS:
        raise InputError(f"a sandbox is one of {', '.join(BACKENDS)}; got {backend!r}")
    reasons = []
    for name in BACKENDS if backend is None else (backend,):
        try:
            sandbox = BACKENDS[name]()
            probe(sandbox, limits)
        except InputError as error:
            reasons.append(f"{name}: {error}")
            continue
        return sandbox
    raise InputError(
        f"generated programs run in a sandbox only, and none works here ({'; '.join(reasons)}). Leave --run-programs "
        "out to compare the programs' texts alone"
    )
