"""Edits, verdicts and investigations show themselves in notebooks; what nobody registered shows as plain text."""

from __future__ import annotations

import fliptrace_interventions
from fliptrace.judgements import CAVEAT, Control, Judgement, Verdict


def verdict(claim):
    return Verdict(
        judgement=Judgement.NOT_APPLICABLE,
        claim=claim,
        edits=(),
        directions=(),
        reasons=("There is no cache before step 0.",),
        caveat=CAVEAT,
        target_step=0,
        reduction="unsplit/64",
        repeatable_by_construction=True,
        between="recorded",
        environment={},
        environment_differences=(),
    )


def test_every_edit_shows_words_and_json():
    """What it does, and what trace-intervene --edit reads, escaped."""
    edits = (
        fliptrace_interventions.ShrinkEdit("model.layers.0.<b>", 0, (3,)),
        fliptrace_interventions.CacheEdit(2),
        fliptrace_interventions.ReplayShrinks(),
        fliptrace_interventions.ForcedTokens(1, (7,)),
    )
    for edit in edits:
        text = edit._repr_html_()
        assert "<b>" not in text
        assert "fliptrace-edit" in text
        assert "&quot;edit&quot;" in text


def test_a_verdict_shows_its_judgement_first():
    """Through the function that this package registered, escaped."""
    text = verdict("cache before step 0 <script>")._repr_html_()
    assert text.index("not applicable") < text.index("cache before step 0")
    assert "<script>" not in text
    assert "There is no cache" in text


def test_a_value_without_a_display_shows_as_text():
    """Nothing is lost and nothing is markup."""
    control = Control("self-substitution", True, "<i>nothing changed</i>")
    assert control._repr_html_().startswith("<pre>Control(")
    assert "<i>" not in control._repr_html_()
