"""Which model and adapter a pair was recorded with, and where they are here.

A manifest holds names and hashes, never a path: the name may be a hub name or the last parts of a folder. What is found
under that name counts only if its hash is the recorded one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fliptrace.capture.sources import sha256_of
from fliptrace.errors import InputError
from fliptrace.manifest import Manifest
from fliptrace.pair import bundled_model
from fliptrace.pair.neighbours import recorded_neighbours

if TYPE_CHECKING:
    from fliptrace.capture.vllm_engine import Neighbour

#: A manifest is data from elsewhere.
_MOST_THREADS = 1024
_ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")


def find_model(manifest: Manifest, near: Path) -> str:
    """Find the recorded base model.

    Args:
        manifest: of one of the pair's traces.
        near: the pair's folder; relative names are looked up there, too.

    Raises:
        InputError: it is not here.
    """
    return _find("model", manifest, near, bundled_model().model, _model_hash)


def find_adapter(manifest: Manifest, near: Path) -> str:
    """Find the recorded adapter; see find_model."""
    return _find("adapter", manifest, near, bundled_model().adapter, _adapter_hash)


def find_neighbours(manifest: Manifest, near: Path) -> tuple[Neighbour | None, ...]:
    """Return the neighbours that the pair was recorded with; their adapters are looked up as the traced one's is.

    Raises:
        InputError: an adapter is not here.
    """

    def adapter_of(name: str, recorded: str) -> str:
        for place in _places(name, near, Path(bundled_model().adapter)):
            if _adapter_hash(place) == recorded:
                return str(place)
        raise InputError(
            f"the pair was recorded with a neighbour whose adapter {name} (sha256 {recorded[:12]}…) is not here under "
            "that name with that hash; run the command where that name leads to it"
        )

    return recorded_neighbours(manifest, adapter_of)


def use_recorded_threads(manifest: Manifest) -> None:
    """Let torch use as many threads as when the pair was recorded: another number may cut matrix products otherwise."""
    threads = manifest.get("environment.threads")
    if isinstance(threads, int) and 1 <= threads <= _MOST_THREADS:
        torch.set_num_threads(threads)


def _find(
    what: str,
    manifest: Manifest,
    near: Path,
    bundled: str,
    hash_of: Callable[[Path], str | None],
) -> str:
    name, recorded = str(manifest.get(f"{what}.name") or ""), manifest.get(f"{what}.sha256")
    if recorded is not None:
        for place in _places(name, near, Path(bundled)):
            if hash_of(place) == recorded:
                return str(place)
    raise InputError(
        f"the pair was recorded with the {what} {name or '(not named)'} (sha256 {str(recorded)[:12]}…), which is not "
        f"here under that name with that hash; say where it is with --{what}"
    )


def _places(name: str, near: Path, bundled: Path) -> Iterator[Path]:
    yield bundled
    if name and not Path(name).is_absolute():
        yield Path(name)
        yield near / name
        yield near.parent / name
    yield from _in_hub_cache(name)


def _in_hub_cache(name: str) -> Iterator[Path]:
    """Look where the model hub's client keeps what was fetched before; nothing is fetched here."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        yield Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError, ValueError):
        return


def _model_hash(place: Path) -> str | None:
    """Hash what the engine hashes when it loads a model; None where there is none."""
    try:
        if place.is_file():
            return sha256_of([place])
        files = sorted([*place.glob("config.json"), *place.glob("*.safetensors")])
        return sha256_of(files) if len(files) > 1 else None
    except OSError:
        return None


def _adapter_hash(place: Path) -> str | None:
    try:
        return sha256_of([place / name for name in _ADAPTER_FILES])
    except OSError:
        return None
