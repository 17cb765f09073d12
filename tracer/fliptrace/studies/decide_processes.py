"""trace-study decide on production engines: one vLLM engine per reduction, in a process of its own.

The read is the one of vLLM's structured-decision interface: log-probabilities of the two labels' tokens as vLLM
computes them over the whole vocabulary, in FP32; normalised over the two here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fliptrace.studies.decide import decided
from fliptrace.studies.engine_process_reductions import ReductionEngines, ReductionWorker
from fliptrace.studies.engines import identity_of
from fliptrace.studies.items import Item

if TYPE_CHECKING:
    from fliptrace.studies.decide import DecideStudy


class DecideProcessWorker(ReductionWorker):
    """Asks the engine of an item's reduction."""

    def __init__(self, study: DecideStudy) -> None:
        """Keep the settings; engines start when it is known which are needed."""
        self._study = study
        super().__init__(
            ReductionEngines(
                study.model, study.engines, study.batch_size, logprobs_mode="raw_logprobs"
            )
        )

    def describe(self) -> dict[str, Any]:
        """Wait for the engines and return what they read about themselves."""
        found = self._engines.ready(map(identity_of, self._study.reductions))
        return found | {
            "decisions": {
                "interface": "vLLM's log-probabilities of the two labels (logprob_token_ids)"
            }
        }

    def run(self, item: Item) -> dict[str, Any]:
        """Decide once."""
        asked = item.arguments
        said = self._engines.answer(
            "decide_texts",
            asked["source"],
            asked["text"],
            asked,
            yes=self._study.yes,
            no=self._study.no,
        )
        return {
            **self._engines.columns(asked["reduction"]),
            "prompt": asked["source"],
            "number": asked["number"],
            "repetition": asked["repetition"],
            "prompt_ids_sha256": said["prompt_ids_sha256"],
            "prompt_tokens": said["prompt_tokens"],
            **decided(*shares_of(said["log_yes"], said["log_no"]), asked["label"]),
        }


def shares_of(log_yes: float, log_no: float) -> tuple[float, float, float]:
    """Return p(yes) and p(no), normalised over the two, and the probability that the two have together."""
    larger = max(log_yes, log_no)
    yes, no = math.exp(log_yes - larger), math.exp(log_no - larger)
    return yes / (yes + no), no / (yes + no), math.exp(log_yes) + math.exp(log_no)
