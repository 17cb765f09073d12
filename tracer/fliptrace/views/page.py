"""report.html: one offline page for a pair, the verdict first.

Everything but the pictures is in the HTML itself, so that the page reads without JavaScript; the pictures come from
compact arrays in a JSON element, drawn by the one embedded copy of plotly.js. No request leaves the page.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import plotly.offline
from markupsafe import Markup

from fliptrace.judgements import Judgement
from fliptrace.numerics import CoordinateClass
from fliptrace.verdicts import Origin, Outcome
from fliptrace.views import heatmap, palette, templating, wording
from fliptrace.views.boundary import boundary_figure
from fliptrace.views.cells import kind_choices, page_cells, phase_data
from fliptrace.views.document import SCHEMA_VERSION
from fliptrace.views.escaping import clipped, quoted, shown, visible
from fliptrace.views.interventions_page import figures, section
from fliptrace.views.interventions_words import gaps as interventions_gaps
from fliptrace.views.interventions_words import gist as interventions_gist
from fliptrace.views.keys_values import cache_gist, cache_states
from fliptrace.views.origin import started_elsewhere, started_in_shrink
from fliptrace.views.propagation import (
    propagation_data,
    propagation_figure,
    propagation_section,
)
from fliptrace.views.story import GAPS_TOLD, Passage, tell_story
from fliptrace.views.texts import pair_texts
from fliptrace.views.wording import TokenNames, brief, exact

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from fliptrace.grids import Grid
    from fliptrace.trace import Trace
    from fliptrace.verdicts import (
        CoordinateDifference,
        PairDiff,
        RowDifference,
        StepComparison,
        TokenLogit,
    )
    from fliptrace.views.interventions import InterventionReport
    from fliptrace.views.pooling import Cells

#: Rows of the root table; the rest is counted.
ROOT_TABLE_ROWS = 200
#: Gaps that the page lists; the rest is counted.
GAPS_LISTED = 1000
#: plotly bundles a map library that adds its own style unless an element with this id is there. A report has no maps.
_STYLE_ID = re.compile(r'getElementById\("([0-9a-f]{64})"\)')
_LEAD = ("flip", "root", "interventions", "cache", "propagation", "statistics")
_CLOSING = ("coverage", "doubts")
#: Gaps that the first screen names, and how much of each.
_GAPS_NAMED, _GAP = 3, 96
#: Why what an inherited shrink adds has no figure, by whether operands were kept whole.
_SEPARABLE = {
    True: "the adapter's weights are not in a trace",
    False: "operands were kept as digests",
}
#: The same where both were kept: what the two colours mean then.
_SEPARATED = {
    "added": "the row's operands are bit-equal, or more of the difference is the shrink's own rounding than its "
    "operand accounts for",
    "inherited": "an operand differs, and accounts for more of the difference than the shrink's own rounding; each "
    "cell tells both parts",
}
_SCRIPTS = ("report.js", "state.js", "rounding.js", "heatmap.js", "cells.js", "propagation.js")


def render_report(
    diff: PairDiff,
    reference: Trace,
    candidate: Trace,
    *,
    title: str,
    command: str | None = None,
    interventions: InterventionReport | None = None,
) -> str:
    """Return the report page of a pair.

    Args:
        diff: what was found.
        reference: the reference's trace.
        candidate: the same of the candidate.
        title: the page's title, any text.
        command: how to repeat the run, any text; None when it is not known.
        interventions: what was substituted and what came of it; None leaves that section out.

    Returns:
        A complete HTML document, encodable in UTF-8, with no reference to anything outside it.
    """
    story = tell_story(diff, reference, candidate, interventions)
    dtype = wording.model_dtype(reference)
    tokens = TokenNames(reference)
    css = templating.asset("report.css") + templating.asset("cells.css")
    css += templating.asset("propagation.css")
    css += templating.asset("interventions.css")
    script = Markup("").join(templating.asset(name) for name in _SCRIPTS)
    plotly_script = _plotly()
    cells = page_cells(diff)
    coordinate = _first_coordinate(diff)
    caches = cache_states(diff)
    page: str = (
        templating.environment()
        .get_template("report.html.j2")
        .render(
            # plotly makes one empty style element and fills it by script.
            policy=templating.content_security_policy(
                [plotly_script, script], [css, ""], style_attributes=True
            ),
            style_ids=_STYLE_ID.findall(plotly_script),
            css=css,
            script=script,
            propagation=propagation_section(diff),
            plotly_script=plotly_script,
            title=visible(title),
            outcome=diff.outcome.name.lower(),
            verdict=story.verdict,
            ran=story.passage("ran"),
            facts=_facts(diff, tokens, interventions),
            lead=[_led(part) for part in story.passages if part.key in _LEAD],
            closing=[part for part in story.passages if part.key in _CLOSING],
            more_gaps=[visible(gap) for gap in diff.coverage.missing[GAPS_TOLD:GAPS_LISTED]],
            gaps_left_out=max(0, len(diff.coverage.missing) - GAPS_LISTED),
            identical=diff.outcome is Outcome.IDENTICAL,
            legend=[
                {"label": label.label, "kind": label.name.lower(), "meaning": meaning}
                for label, meaning in palette.CLASS_MEANINGS.items()
            ],
            ring=heatmap.ROOT_MARKS[diff.first_propagating is not None]
            if diff.first_propagating or diff.first_surviving
            else "",
            phases=_phases(cells),
            kinds=kind_choices(diff),
            origins=_origin_words(diff),
            boundary=_boundary_rows(coordinate, tokens, dtype) if coordinate is not None else None,
            interventions=section(interventions, dtype) if interventions is not None else None,
            steps=[_step(step, diff, caches[step.step]) for step in diff.steps],
            roots=[_root(row, tokens) for row in diff.roots[:ROOT_TABLE_ROWS]],
            surviving_root_rows=diff.surviving_root_rows,
            texts=pair_texts(diff, reference, candidate),
            manifest_differences=[
                {"key": visible(key), "reference": _leaf(before), "candidate": _leaf(after)}
                for key, before, after in diff.manifest_differences
            ],
            manifest=_manifest(reference, candidate),
            executions=[
                _execution(name, trace)
                for name, trace in (("reference", reference), ("candidate", candidate))
            ],
            command=visible(command, keep_newlines=True) if command is not None else None,
            schema_version=SCHEMA_VERSION,
            data=templating.embedded_json(
                _data(diff, cells, reference, coordinate) | _cause_figures(interventions, dtype)
            ),
        )
    )
    return page


def _led(part: Passage) -> Passage:
    """Cut the passage that has a section of its own to what a first screen needs."""
    if part.key != "interventions":
        return part
    return dataclasses.replace(part, sentences=part.sentences[: part.leading])


def _plotly() -> Markup:
    source: str = plotly.offline.get_plotlyjs()
    return Markup(source.replace("\r\n", "\n").replace("\r", "\n"))  # noqa: S704 (pinned by its hash)


def _first_coordinate(diff: PairDiff) -> CoordinateDifference | None:
    for row in (
        diff.first_propagating,
        diff.first_surviving,
        diff.first_surviving_variant,
        diff.first_variant,
        diff.first_difference,
    ):
        if row is not None and row.coordinates:
            return row.coordinates[0]
    return None


def _facts(
    diff: PairDiff, tokens: TokenNames, interventions: InterventionReport | None
) -> list[tuple[str, str]]:
    """The answers that a reader looks for first, each in a few words; the last is what was not covered."""
    flip = diff.flip
    facts = [
        (
            "What flipped",
            _unflipped(diff)
            if flip is None
            else f"generated token {flip.step + 1} (step {flip.step}): "
            f"{_short_token(flip.reference_token)} → {_short_token(flip.candidate_token)}",
        )
    ]
    row = started_in_shrink(diff)
    shrink = "nothing differs" if diff.outcome is Outcome.IDENTICAL else "no surviving root"
    if row is not None:
        variant = f": a {row.origin}, no root" if row.origin is not Origin.ROOT else ""
        shrink = f"{wording.row_place(row, tokens)}{variant}"
    first = started_elsewhere(diff) or shrink
    leading = diff.propagation.leading if diff.propagation is not None else None
    led = diff.propagation is None or diff.propagation.reaches_flip is not False
    if leading is not None:
        where = "keys or values" if flip is None else "the flip"
        first = f"{wording.row_place(leading, tokens)}; an earlier one, in {first}, does not lead to {where}"
    elif not led:
        first += "; no chain of differences leads from there to the flip"
    facts.append(("Where it started", first))
    facts.append(("Keys and values", cache_gist(diff)))
    facts.append(("Was it proven?", _proven(diff, interventions)))
    untested = () if interventions is None else tuple(interventions_gaps(interventions))
    facts.append(("What was not covered", _gaps_gist(diff, untested)))
    return facts


def _gaps_gist(diff: PairDiff, untested: Sequence[str]) -> str:
    """Name the gaps in a few words each, as far as there is room; the whole of each stands at the end of the page."""
    missing = diff.coverage.missing
    gaps = [*untested, *diff.coverage.not_observed]
    named = [_first_clause(gap) for gap in gaps]
    if len(missing) > _GAPS_NAMED:
        named.insert(0, f"{len(missing):,} records or steps without a partner")
    else:
        named = [*map(_first_clause, missing), *named]
    if not named:
        return "nothing that was meant to be recorded; see below"
    more = len(named) - _GAPS_NAMED
    return "; ".join(named[:_GAPS_NAMED]) + (f"; {more:,} more" if more > 0 else "")


def _first_clause(gap: str) -> str:
    clause = re.split(r" \(|; |, so that|, not |, which|\.$", gap, maxsplit=1)[0]
    return clipped(f"{clause[:1].lower()}{clause[1:]}", _GAP)


def _unflipped(diff: PairDiff) -> str:
    steps = diff.coverage.steps_compared
    cut = steps < max(diff.generated)
    return f"no token in the {wording.count(steps, 'compared step')}" if cut else "no token"


def _proven(diff: PairDiff, interventions: InterventionReport | None) -> str:
    """Say whether a substitution showed that something was enough to flip the token."""
    if interventions is not None:
        gist = interventions_gist(interventions)
        enough = interventions.judgement is Judgement.SUFFICIENT
        if not enough:
            return f"no: {gist}"
        return f"yes, enough by itself, which does not mean necessary: {gist}"
    if diff.outcome is Outcome.IDENTICAL:
        return "nothing to prove: nothing differs"
    return "not tested: no intervention was run"


def _short_token(token: TokenLogit) -> str:
    return quoted(token.text, 24) if token.text else f"id {token.token_id}"


def _phases(cells: dict[str, tuple[Grid, Cells]]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "badge": pooled.badge,
            "unit": "token position" if name == "prefill" else "step",
            "rows": heatmap.grid_counts(grid),
        }
        for name, (grid, pooled) in cells.items()
    ]


def _operands_kept(diff: PairDiff) -> bool:
    chart = diff.propagation_chart
    return chart is not None and chart.operands_kept


def _origin_words(diff: PairDiff) -> dict[str, str]:
    """Say what the colours of added and inherited mean."""
    if any(grid.added is not None for grid in diff.grids.values()):
        return _SEPARATED
    why = _SEPARABLE[_operands_kept(diff)]
    return {
        "added": "the row's operands are bit-equal",
        "inherited": f"an operand differs; what the shrink adds to that is not separable ({why})",
    }


def _boundary_rows(
    coordinate: CoordinateDifference, tokens: TokenNames, dtype: str
) -> dict[str, Any]:
    report = coordinate.boundary
    place = coordinate.coordinate
    return {
        "name": f"{visible(place.site.name)}, {wording.step_name(place.step)}, token position "
        f"{place.position} ({tokens.at(place.position)}), rank index {place.rank_index}",
        "sentences": [
            sentence
            for sentence in (
                wording.values_sentence(coordinate),
                wording.boundary_sentence(coordinate, dtype),
                wording.rounded_sentence(coordinate),
            )
            if sentence
        ],
        "rows": [
            {
                "name": "reference",
                "value": exact(coordinate.reference),
                "bits": coordinate.reference_bits,
                "distance": _distance(report.reference_distance),
                "rounded": exact(report.rounded_reference),
                "rounded_bits": coordinate.rounded_reference_bits,
            },
            {
                "name": "candidate",
                "value": exact(coordinate.candidate),
                "bits": coordinate.candidate_bits,
                "distance": _distance(report.candidate_distance),
                "rounded": exact(report.rounded_candidate),
                "rounded_bits": coordinate.rounded_candidate_bits,
            },
        ],
        "boundary": "none to measure from" if report.boundary is None else exact(report.boundary),
        "crossed": report.boundaries_crossed,
        "dtype": coordinate.rounded_dtype,
    }


def _distance(value: float | None) -> str:
    return "no number" if value is None else brief(value)


def _step(step: StepComparison, diff: PairDiff, cache: str) -> dict[str, Any]:
    ties = [
        name
        for name, tied in (("reference", step.reference_tied), ("candidate", step.candidate_tied))
        if tied > 1
    ]
    return {
        "step": step.step,
        "reference_margin": brief(step.reference_margin),
        "candidate_margin": brief(step.candidate_margin),
        "tie": wording.listed(ties),
        "flip": diff.flip is not None and diff.flip.step == step.step,
        "logits": {True: "differ", False: "equal", None: "not observed"}[step.logits_differ],
        "latent": f"{step.shrink_latent:,}",
        "surviving": f"{step.shrink_surviving:,}",
        "elements": f"{step.shrink_elements:,}",
        "cache": cache,
    }


def _root(row: RowDifference, tokens: TokenNames) -> dict[str, Any]:
    first = row.coordinates[0] if row.coordinates else None
    return {
        "site": visible(row.site.name),
        "step": wording.step_name(row.step),
        "position": row.position,
        "token": tokens.at(row.position),
        "rank": "" if first is None else first.coordinate.rank_index,
        "reference": "" if first is None else exact(first.reference),
        "reference_bits": "" if first is None else first.reference_bits,
        "candidate": "" if first is None else exact(first.candidate),
        "candidate_bits": "" if first is None else first.candidate_bits,
        "ulp": "" if first is None else f"{first.distance_ulp:,}",
        "fate": str(row.fate),
        "surviving": row.surviving,
        "latent": row.latent,
    }


def _leaf(value: Any) -> str:
    return shown(None if value is None else wording.plain(value))


def _manifest(reference: Trace, candidate: Trace) -> list[dict[str, Any]]:
    before, after = reference.manifest.flat(), candidate.manifest.flat()
    keys = [*before, *(key for key in after if key not in before)]
    return [
        {
            "key": visible(key),
            "reference": _leaf(before.get(key)),
            "candidate": _leaf(after.get(key)),
            "differs": before.get(key) != after.get(key),
        }
        for key in sorted(keys, key=lambda key: before.get(key) == after.get(key))
    ]


def _execution(name: str, trace: Trace) -> dict[str, Any]:
    return {
        "name": name,
        "trace": visible(wording.trace_name(trace)),
        "steps": len(trace.steps),
        "stop_reason": visible(trace.closing.stop_reason),
        "complete": trace.closing.complete,
    }


def _data(
    diff: PairDiff,
    cells: dict[str, tuple[Grid, Cells]],
    reference: Trace,
    coordinate: CoordinateDifference | None,
) -> dict[str, Any]:
    """Everything that the page's script draws from."""
    return {
        "heatmaps": {
            name: phase_data(diff, grid, pooled, reference)
            for name, (grid, pooled) in cells.items()
        },
        "kinds": kind_choices(diff),
        "rounded": diff.rounded_dtype,
        "operands_kept": _operands_kept(diff),
        "boundary": _figure_json(boundary_figure(coordinate, wording.model_dtype(reference)))
        if coordinate is not None
        else None,
        "propagation": _figure_json(propagation_figure(diff)) if diff.propagation_chart else None,
        "propagation-graph": propagation_data(diff),
        "dark": palette.dark_twins(),
        "classes": {str(int(label)): label.label for label in CoordinateClass},
        "origins": list(heatmap.ORIGIN_NAMES),
    }


def _cause_figures(interventions: InterventionReport | None, dtype: str) -> dict[str, Any]:
    drawn = figures(interventions, dtype) if interventions is not None else {}
    return {name: _figure_json(figure) for name, figure in drawn.items()}


def _figure_json(figure: go.Figure) -> dict[str, Any]:
    """A figure as JSON values without plotly's template, which the page's own style replaces."""
    value: dict[str, Any] = json.loads(figure.to_json())
    value["layout"].pop("template", None)
    return value
