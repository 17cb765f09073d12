"""What a training leaves in its folder after each epoch, so that one that was killed goes on with the next.

The file holds tensors and plain values alone, and is read as such: loading it runs no code.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fliptrace.errors import InputError
from fliptrace.studies.journal import half_of, replacing

CHECKPOINT_NAME = "training.checkpoint"


class Checkpoint:
    """The state of one training, in one file."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        """Name the place; ``identity`` holds all that the weights depend on, as plain values."""
        self._path = folder / CHECKPOINT_NAME
        self._identity = dict(identity)

    def restore(self) -> dict[str, Any] | None:
        """Return the state that was kept last, on the CPU; None where there is none.

        Raises:
            InputError: another training's, or it cannot be read.
        """
        if not self._path.exists():
            return None
        try:
            kept = torch.load(self._path, map_location="cpu", weights_only=True)
            identity, state = kept["identity"], kept["state"]
        except (
            *(OSError, EOFError, RuntimeError, pickle.UnpicklingError),
            *(LookupError, TypeError, ValueError),
        ) as error:
            raise InputError(
                f"{self._path} cannot be read ({error}); remove it to train from the beginning"
            ) from error
        for name, value in self._identity.items():
            if identity.get(name) != value:
                raise InputError(
                    f"{self._path} was left by a training with {name} = {identity.get(name)!r}, and this one has "
                    f"{value!r}; give the same settings to go on, or another folder"
                )
        return dict(state)

    def keep(self, state: Mapping[str, Any]) -> None:
        """Write a state, whole or not at all.

        Raises:
            StorageError: it cannot be written.
        """
        with replacing(self._path, make_folder=True) as file:
            torch.save({"identity": self._identity, "state": dict(state)}, file)

    def remove(self) -> None:
        """Remove the file, and half of one: the adapter is written."""
        self._path.unlink(missing_ok=True)
        half_of(self._path).unlink(missing_ok=True)
