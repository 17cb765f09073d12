"""How close an execution is to flipping: margins, boundary distances, and flip probabilities from few forced replays.

From one execution, recorded or just run: how far the two best logits of every step are apart, how far every shrink
coordinate is from a rounding boundary and how often it crosses one when its shrink runs again, and how probably a
fresh execution chooses another token, per step and per prompt, with intervals. ``trace-study fragility`` does this for
many prompts and holds it against repetitions. Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fliptrace.lazy import lazy_names

if TYPE_CHECKING:
    from fliptrace_interventions.fragility.boundaries import boundary_distances
    from fliptrace_interventions.fragility.estimation import (
        PromptEstimate,
        estimate_rows,
        estimate_run,
    )
    from fliptrace_interventions.fragility.gathering import collect, gathered
    from fliptrace_interventions.fragility.measuring import FragilityOptions, measure
    from fliptrace_interventions.fragility.reference import (
        ReferenceRun,
        observe_reference,
        reference_of_trace,
    )
    from fliptrace_interventions.fragility.replays import ForcedReplay, forced_replays
    from fliptrace_interventions.fragility.study import FragilityStudy
    from fliptrace_interventions.fragility.survival import CallSurvival, replay_shrinks

_HOMES = {
    "CallSurvival": "survival",
    "ForcedReplay": "replays",
    "FragilityOptions": "measuring",
    "FragilityStudy": "study",
    "PromptEstimate": "estimation",
    "ReferenceRun": "reference",
    "boundary_distances": "boundaries",
    "collect": "gathering",
    "estimate_rows": "estimation",
    "estimate_run": "estimation",
    "forced_replays": "replays",
    "gathered": "gathering",
    "measure": "measuring",
    "observe_reference": "reference",
    "reference_of_trace": "reference",
    "replay_shrinks": "survival",
}

__all__ = [
    "CallSurvival",
    "ForcedReplay",
    "FragilityOptions",
    "FragilityStudy",
    "PromptEstimate",
    "ReferenceRun",
    "boundary_distances",
    "collect",
    "estimate_rows",
    "estimate_run",
    "forced_replays",
    "gathered",
    "measure",
    "observe_reference",
    "reference_of_trace",
    "replay_shrinks",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
