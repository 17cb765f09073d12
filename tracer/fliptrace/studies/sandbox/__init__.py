"""Run programs that a model wrote, without trusting them: no network, and limits that bind root, too.

open_sandbox takes the first of Docker, Podman and bubblewrap inside a control group that passes a probe of its limits;
where none does, nothing runs. What is protected is the machine. A verdict can be fooled by a program that sets out to:
it shares its process with the tests.
"""

from __future__ import annotations

from fliptrace.studies.sandbox.opening import open_sandbox
from fliptrace.studies.sandbox.values import Limits, Outcome, Sandbox, Status

__all__ = ["Limits", "Outcome", "Sandbox", "Status", "open_sandbox"]
