"""Substitute recorded values into an execution, continue it, and judge whether the output changes.

Nothing is here yet. The package exists so that the layers (interventions import the tracer, never
the reverse) hold from the first release on; edits and judgements come in a later one.
"""

from __future__ import annotations

__all__: list[str] = []
