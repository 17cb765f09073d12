"""What interventions found, added to the pair's report: report.html and report.json are written anew, traces untouched.

The whole story of a pair and the claims that a person tried are kept side by side; a new run of either takes the place
of the old one. What a report held of another pair's traces is dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from fliptrace.errors import InputError, StorageError
from fliptrace.judgements import Investigation, Verdict
from fliptrace.pair import Pair
from fliptrace.pair.pair import DOCUMENT_NAME, REPORT_NAME
from fliptrace.views.interventions import ClaimResult, InterventionReport


def add_to_report(
    folder: str | Path,
    pair: Pair,
    found: Investigation | Verdict | ClaimResult | InterventionReport,
    *,
    command: str | None = None,
) -> Path:
    """Add what was found to the report of a pair's folder.

    Args:
        folder: where the pair's report is, or is to be.
        pair: the pair.
        found: an investigation, one claim, or both.
        command: how to repeat the run, for the report.

    Returns:
        The path of report.html.

    Raises:
        StorageError: it cannot be written; the old report is still whole then.
    """
    from fliptrace.views import render_report, report_json

    place = Path(folder)
    report = dataclasses.replace(as_report(found), command=command)
    earlier, made_by = earlier_report(place, pair)
    if earlier is not None:
        report = dataclasses.replace(
            report,
            investigation=report.investigation or earlier.investigation,
            claims=report.claims or earlier.claims,
        )
    page = render_report(
        pair.diff,
        pair.reference,
        pair.candidate,
        title=pair.title,
        command=made_by,
        interventions=report,
    )
    document = report_json(
        pair.diff, pair.reference, pair.candidate, command=made_by, interventions=report
    )
    text = json.dumps(document, indent=1, ensure_ascii=True, allow_nan=False)
    _replace(place, {DOCUMENT_NAME: text + "\n", REPORT_NAME: page})
    return place / REPORT_NAME


def write_pictures(folder: Path, pair: Pair, formats: tuple[str, ...]) -> None:
    """Write the pair's pictures with what its report proves; nothing when no format was asked for.

    Raises:
        StorageError: one cannot be written.
    """
    if formats:
        from fliptrace.views.static import write_figures

        proved, _ = earlier_report(folder, pair)
        write_figures(folder / "figures", formats, pair.diff, pair.reference, interventions=proved)


def as_report(
    found: Investigation | Verdict | ClaimResult | InterventionReport,
) -> InterventionReport:
    """Wrap what was found as a report shows it."""
    if isinstance(found, InterventionReport):
        return found
    if isinstance(found, Investigation):
        return InterventionReport(found)
    claim = found if isinstance(found, ClaimResult) else ClaimResult(found)
    return InterventionReport(None, (claim,))


def earlier_report(folder: Path, pair: Pair) -> tuple[InterventionReport | None, str | None]:
    """Read what the folder's report says already: its interventions, and the command that made it.

    Both are None where there is no report of these traces, or one that this version cannot read: a report is made from
    the traces, and can be made again.
    """
    try:
        document: Any = json.loads((folder / DOCUMENT_NAME).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None, None
    if not isinstance(document, dict) or document.get("executions") != _executions(pair):
        return None, None
    command = document.get("command")
    kept: InterventionReport | None = None
    with contextlib.suppress(InputError):  # of another version: it is replaced
        if document.get("interventions") is not None:
            kept = InterventionReport.from_json(document["interventions"])
    return kept, command if isinstance(command, str) else None


def _executions(pair: Pair) -> Any:
    """Return the part of a report by which its traces are known, as it is after writing and reading."""
    from fliptrace.views import report_json

    document = report_json(pair.diff, pair.reference, pair.candidate)["executions"]
    return json.loads(json.dumps(document, ensure_ascii=True))


def _replace(folder: Path, texts: dict[str, str]) -> None:
    """Write files beside their places first, and move them there when all are complete."""
    written: dict[Path, Path] = {}
    try:
        for name, text in texts.items():
            handle, scratch = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
            written[Path(scratch)] = folder / name
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(scratch).chmod(0o644)
        for path, place in list(written.items()):
            path.replace(place)
            del written[path]
    except OSError as error:
        raise StorageError(
            f"the report in {folder} could not be rewritten ({error}); the old one is still there"
        ) from error
    finally:
        for path in written:
            path.unlink(missing_ok=True)
