"""trace-study repeat on production engines: one vLLM engine per reduction, in a process of its own.

Rows have the columns that the engine in the study's own process gives; logits of selected tokens come from vLLM's
log-probabilities interface in the mode raw_logits, as the sampler got them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fliptrace.studies.engine_process_reductions import ReductionEngines, ReductionWorker
from fliptrace.studies.engines import identity_of
from fliptrace.studies.items import Item
from fliptrace.studies.repeat import Judge

if TYPE_CHECKING:
    from fliptrace.studies.repeat import RepeatStudy


class RepeatProcessWorker(ReductionWorker):
    """Asks the engine of an item's reduction."""

    def __init__(self, study: RepeatStudy) -> None:
        """Load the judge; engines start when it is known which are needed."""
        self._study = study
        self._judge = Judge(study)
        super().__init__(
            ReductionEngines(
                study.model, study.engines, study.batch_size, logprobs_mode="raw_logits"
            )
        )

    def describe(self) -> dict[str, Any]:
        """Wait for the engines and return what they read about themselves."""
        found = self._engines.ready(map(identity_of, self._study.reductions))
        return found | self._judge.describe()

    def run(self, item: Item) -> dict[str, Any]:
        """Generate once and score the text."""
        asked = item.arguments
        question = asked["question"]
        made = self._engines.answer(
            "continue_texts",
            question["source"],
            question["text"],
            asked,
            tokens=self._study.max_new_tokens,
        )
        margins = made["margins"]
        return {
            **self._engines.columns(asked["reduction"]),
            "prompt": question["source"],
            "number": question["number"],
            "repetition": asked["repetition"],
            "prompt_ids_sha256": made["prompt_ids_sha256"],
            "prompt_tokens": made["prompt_tokens"],
            "token_ids": made["token_ids"],
            "selected_logits": made["selected_logits"],
            "margins": margins,
            "ties": None if margins is None else sum(margin == 0.0 for margin in margins),
            "stop_reason": made["stop_reason"],
            **self._judge.columns(made["text"], question),
        }
