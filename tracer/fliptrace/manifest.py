"""The manifest of a trace: everything that had to be equal for two executions to be comparable, as it was when it ran.

A manifest is plain JSON in named sections. It is written when recording starts and never changed; what is known only at
the end (how many tokens, why it stopped) is the trace's closing record.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: Sections, in the order in which reports show them.
SECTIONS = (
    "model",
    "adapter",
    "tokenizer",
    "prompt",
    "reduction",
    "engine",
    "decoding",
    "environment",
    "recording",
)

#: Keys that must be equal before two traces may be compared coordinate by coordinate.
IDENTITY_KEYS = (
    "model.sha256",
    "model.dtype",
    "adapter.sha256",
    "adapter.scaling_sha256",
    "prompt.ids_sha256",
)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Named sections of JSON values.

    Attributes:
        sections: section name -> mapping. Section names are SECTIONS; a missing section is an empty one.
    """

    sections: Mapping[str, Mapping[str, Any]]

    def get(self, dotted: str, default: Any = None) -> Any:
        """Look up ``section.key`` (further dots descend into nested mappings)."""
        value: Any = self.sections
        for part in dotted.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return value

    def flat(self) -> dict[str, Any]:
        """Return every leaf as ``section.key`` -> value, in section order."""
        return dict(self._leaves())

    def _leaves(self) -> Iterator[tuple[str, Any]]:
        ordered = [*SECTIONS, *(name for name in self.sections if name not in SECTIONS)]
        for name in ordered:
            yield from _leaves_of(name, self.sections.get(name, {}))

    def to_json(self) -> str:
        """Serialise, keys sorted, so that equal manifests are equal text."""
        return json.dumps(self.sections, sort_keys=True, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read what to_json wrote."""
        return cls(sections=json.loads(text))


def _leaves_of(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves_of(f"{prefix}.{key}", inner)
    else:
        yield prefix, value


def differing_keys(reference: Manifest, candidate: Manifest) -> list[tuple[str, Any, Any]]:
    """List the leaves in which two manifests differ: (key, reference value, candidate value); absent is None."""
    before, after = reference.flat(), candidate.flat()
    keys = [*before, *(key for key in after if key not in before)]
    return [
        (key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)
    ]


def ran_in_other_batches(reference: Manifest, candidate: Manifest) -> bool:
    """Tell whether two traces are of requests that ran with other neighbours, or one of them alone."""
    return bool(reference.get("engine.neighbours") != candidate.get("engine.neighbours"))
