"""report.json: the report for machines, described by report.schema.json beside this file."""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING, Any

from fliptrace.verdicts import as_json
from fliptrace.views.story import tell_story
from fliptrace.views.terminal import WIDTH
from fliptrace.views.terminal_map import map_json
from fliptrace.views.wording import trace_name

if TYPE_CHECKING:
    from fliptrace.trace import Trace
    from fliptrace.verdicts import PairDiff
    from fliptrace.views.interventions import InterventionReport

#: The version of report.json's meaning.
SCHEMA_VERSION = 1


def report_json(
    diff: PairDiff,
    reference: Trace,
    candidate: Trace,
    *,
    command: str | None = None,
    interventions: InterventionReport | None = None,
) -> dict[str, Any]:
    """Return the report as plain JSON values, the verdict first.

    Texts are the raw ones: a reader of JSON escapes for its own medium. Sentences are those of the page, the map is the
    terminal's, 80 columns wide.

    Args:
        diff: what was found.
        reference: the reference's trace.
        candidate: the same of the candidate.
        command: how to repeat the run, if known.
        interventions: what was substituted and what came of it, None where nothing was.

    Returns:
        A document that validates against report_schema().
    """
    story = tell_story(diff, reference, candidate, interventions)
    return {
        "verdict": {"outcome": diff.outcome.value, "sentence": story.verdict},
        "schema_version": SCHEMA_VERSION,
        "story": [
            {
                "key": part.key,
                "heading": part.heading,
                "gist": part.gist,
                "sentences": list(part.sentences),
            }
            for part in story.passages
        ],
        "map": map_json(diff, WIDTH),
        "diff": diff.to_json(),
        "executions": {
            "reference": _execution(reference),
            "candidate": _execution(candidate),
        },
        "command": command,
        "interventions": interventions.to_json() if interventions is not None else None,
    }


def _execution(trace: Trace) -> dict[str, Any]:
    closing = trace.closing
    return {
        "trace": trace_name(trace),
        "complete": closing.complete,
        "stop_reason": closing.stop_reason,
        "steps": len(trace.steps),
        "prompt_pieces": list(closing.prompt_piece_texts),
        "text": closing.text,
        "generated_ids": list(trace.generated_ids),
        "generated_pieces": list(closing.piece_texts),
        "manifest": as_json(dict(trace.manifest.sections)),
    }


def report_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of report.json."""
    text = resources.files("fliptrace.views").joinpath("report.schema.json").read_text("utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema
