"""Does a recorded trace belong to this engine? What must be equal is refused when it is not; the rest is told.

Refused: another model, adapter, scaling, dtype, attention implementation, engine or set of sites, since then a
recorded value has no place to go. Told: another library version, GPU, driver, thread count. Whether those matter is not
guessed: reconstruction replays the recording here and decides, bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fliptrace.capture.engine import Engine, state_key
from fliptrace.errors import InputError
from fliptrace.manifest import Manifest, differing_keys
from fliptrace.trace import Kind, Trace

#: Manifest keys that must be equal, and what to do when they are not.
REFUSED_KEYS: Mapping[str, str] = {
    "model.sha256": "load the model that was recorded",
    "model.dtype": "load the model in the recorded dtype",
    "model.attention": "load the model with the recorded attention implementation",
    "adapter.sha256": "load the adapter that was recorded",
    "adapter.scaling_sha256": "load the adapter with the recorded scaling",
    "engine.name": "use the engine that recorded it",
}
#: Likewise, of recordings of a batch; missing from those of a request alone.
_BATCH = "engine.neighbours.sha256"

_TOLD_SECTIONS = ("model", "adapter", "tokenizer", "engine", "environment")


def check_trace(trace: Trace, engine: Engine, which: str) -> None:
    """Refuse a trace that experiments on this engine cannot use.

    Args:
        trace: open.
        engine: where experiments are to run.
        which: ``reference`` or ``candidate``, for the message.

    Raises:
        InputError: redacted, cut short, without the records that are needed, or of another model, adapter or engine.
    """
    name, manifest = f"the {which} trace ({trace.name})", trace.manifest
    if manifest.get("recording.redacted"):
        raise InputError(
            f"{name} is redacted: its token ids are keyed hashes and cannot be fed to a model. Record the pair again "
            "without --redact"
        )
    if not trace.closing.complete or not trace.steps:
        raise InputError(
            f"{name} is not complete ({trace.closing.stop_reason}); record the pair again, or use one that ran to its "
            "end"
        )
    described = Manifest(engine.describe())
    for key, remedy in REFUSED_KEYS.items():
        recorded, here = manifest.get(key), described.get(key)
        if recorded is None or recorded != here:
            raise InputError(
                f"{name} was recorded with {key} = {recorded}; this engine has {here}: {remedy}, or record the pair "
                "again with this one"
            )
    if manifest.get(_BATCH) != described.get(_BATCH):
        raise InputError(
            f"{name} is of a request {_company(manifest)}; this engine runs one {_company(described)}. Matrix products "
            "over another number of rows are another computation, so nothing recorded could be rebuilt: load the "
            "engine with the neighbours that were recorded"
        )
    _check_records(trace, engine, name)


def _company(manifest: Manifest) -> str:
    count = manifest.get("engine.neighbours.count")
    if count is None:
        return "alone"
    return f"with {count} neighbours (sha256 {str(manifest.get(_BATCH))[:12]}…)"


def _check_records(trace: Trace, engine: Engine, name: str) -> None:
    if not engine.cache_layers:
        raise InputError(
            f"{name} is of a model whose layers keep recurrent state alone; nothing in such a state says how many "
            "tokens it has seen, so no execution of it can be restarted yet. Hybrid models can be"
        )
    for kind in (Kind.SHRINK, Kind.OPERAND, Kind.CACHE, Kind.LOGITS_DIGEST):
        if kind not in trace.steps[0].frames:
            raise InputError(f"{name} holds no {kind} records; record the pair again")
    recorded = _keys(trace, Kind.SHRINK)
    here = [site.path for site in engine.sites]
    expected = trace.manifest.get("recording.expected_sites", recorded)
    for what, paths in (("its records", recorded), ("its manifest", list(expected))):
        if paths != here:
            odd = next(iter(sorted(set(paths) ^ set(here))), "their order")
            raise InputError(
                f"{name} has other sites than this engine: {what} name {len(paths)}, the engine has {len(here)}, and "
                f"they differ in {odd}. Load the adapter and the engine that were recorded, or record the pair again"
            )
    layers = [f"cache.{layer}" for layer in engine.cache_layers]
    if _keys(trace, Kind.CACHE) != layers:
        raise InputError(
            f"{name} holds caches of other layers ({len(_keys(trace, Kind.CACHE))}) than this engine ({len(layers)}); "
            "load the model that was recorded"
        )
    states = [state_key(layer, name) for layer, name in engine.state_keys]
    if _keys(trace, Kind.STATE) != states:
        raise InputError(
            f"{name} holds the recurrent states {_keys(trace, Kind.STATE)}, this engine keeps {states}; load the model "
            "that was recorded, or record the pair again"
        )
    ids = trace.manifest.get("prompt.ids")
    if ids is not None and tuple(ids) != tuple(trace.steps[0].token_ids):
        raise InputError(
            f"{name} is not the trace of its manifest: the manifest's prompt has {len(ids)} token ids, and they are "
            f"not the {len(trace.steps[0].token_ids)} that step 0 was fed. Record the pair again"
        )


def _keys(trace: Trace, kind: Kind) -> list[str]:
    frame = trace.frame(0, kind)
    return [] if frame is None else [entry.key for entry in frame.layout.entries]


def told_differences(
    trace: Trace, description: Mapping[str, Mapping[str, Any]]
) -> tuple[tuple[str, Any, Any], ...]:
    """List what differs between the recording's surroundings and these, beyond what is refused.

    Args:
        trace: the recording.
        description: of the engine, from ``describe``.

    Returns:
        (key, recorded, now), in the order of the manifest's sections.
    """

    def told(sections: Mapping[str, Mapping[str, Any]]) -> Manifest:
        return Manifest({name: sections.get(name, {}) for name in _TOLD_SECTIONS})

    return tuple(differing_keys(told(trace.manifest.sections), told(description)))
