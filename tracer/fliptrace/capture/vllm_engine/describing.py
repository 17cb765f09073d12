"""What a manifest says of the vllm engine, as read in the process that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fliptrace.capture.environment import describe_environment
from fliptrace.capture.vllm_engine.reductions import describe_reduction

if TYPE_CHECKING:
    from fliptrace.capture.vllm_engine.engine import VllmEngine


def describe_engine(engine: VllmEngine) -> dict[str, dict[str, Any]]:
    """Return the sections model, adapter, tokenizer, reduction, engine and environment."""
    described = {name: dict(section) for name, section in engine.loaded.description.items()}
    given = engine.loaded.arguments
    passed: dict[str, Any] = {"arguments": dict(given)} if given else {}
    hood = engine.loaded.neighbours
    company = "alone" if hood is None else f"in a batch of {len(hood.requests) + 1}"
    passed |= {} if hood is None else {"neighbours": hood.describe()}
    described["model"]["attention"] = ", ".join(engine.kept.backends)
    return {
        **described,
        "reduction": describe_reduction(engine.runtime, engine.device),
        "engine": {
            "name": "vllm",
            "mode": f"eager, one request {company}, in process",
            "sites": len(engine.sites),
            "fusion": "vLLM fuses q, k and v, and gate and up: each slice of a fused projection is a site",
            **engine.kept.describe(),
            "consumption": "shrinks are hashed where expand is entered, caches in paged memory before attention",
            "plugin": engine.plugin,
            "settings_read_in_worker": engine.settings,
            **passed,
        },
        "environment": describe_environment(engine.device),
    }
