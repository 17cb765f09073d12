"""How a comparison is shown: the page, figures, the terminal, JSON and notebooks.

Views know verdicts as values and compute no new ones. Names are loaded on first use, so that importing
this package loads neither plotly nor rich nor jinja2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fliptrace.lazy import lazy_names

if TYPE_CHECKING:
    from fliptrace.views.boundary import boundary_figure
    from fliptrace.views.document import SCHEMA_VERSION, report_json, report_schema
    from fliptrace.views.heatmap import heatmap_figure
    from fliptrace.views.index import IndexRow, render_index
    from fliptrace.views.interventions import ClaimResult, InterventionReport
    from fliptrace.views.interventions_figures import cause_figure
    from fliptrace.views.interventions_notebook import edit_html, investigation_html, verdict_html
    from fliptrace.views.interventions_terminal import (
        plain_interventions,
        terminal_interventions,
    )
    from fliptrace.views.margin import margin_figure
    from fliptrace.views.notebook import diff_html, pair_html, row_html, trace_html
    from fliptrace.views.page import render_report
    from fliptrace.views.propagation import propagation_figure
    from fliptrace.views.story import Passage, Story, tell_story
    from fliptrace.views.terminal import plain_summary, terminal_summary

_HOMES = {
    "ClaimResult": "interventions",
    "IndexRow": "index",
    "InterventionReport": "interventions",
    "Passage": "story",
    "SCHEMA_VERSION": "document",
    "Story": "story",
    "boundary_figure": "boundary",
    "cause_figure": "interventions_figures",
    "diff_html": "notebook",
    "edit_html": "interventions_notebook",
    "heatmap_figure": "heatmap",
    "investigation_html": "interventions_notebook",
    "margin_figure": "margin",
    "pair_html": "notebook",
    "plain_interventions": "interventions_terminal",
    "plain_summary": "terminal",
    "propagation_figure": "propagation",
    "render_index": "index",
    "render_report": "page",
    "report_json": "document",
    "report_schema": "document",
    "row_html": "notebook",
    "tell_story": "story",
    "terminal_interventions": "interventions_terminal",
    "terminal_summary": "terminal",
    "trace_html": "notebook",
    "verdict_html": "interventions_notebook",
}

__all__ = [
    "SCHEMA_VERSION",
    "ClaimResult",
    "IndexRow",
    "InterventionReport",
    "Passage",
    "Story",
    "boundary_figure",
    "cause_figure",
    "diff_html",
    "edit_html",
    "heatmap_figure",
    "investigation_html",
    "margin_figure",
    "pair_html",
    "plain_interventions",
    "plain_summary",
    "propagation_figure",
    "render_index",
    "render_report",
    "report_json",
    "report_schema",
    "row_html",
    "tell_story",
    "terminal_interventions",
    "terminal_summary",
    "trace_html",
    "verdict_html",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
