"""Train an adapter: read, load, fit, write."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fliptrace.errors import InputError
from fliptrace.pair.bundled import bundled_model
from fliptrace.studies.journal import half_of, replace_file
from fliptrace.studies.training.card import card
from fliptrace.studies.training.checkpoint import CHECKPOINT_NAME, Checkpoint
from fliptrace.studies.training.data import Encoded, Example, encoder, read_splits, test_csv
from fliptrace.studies.training.fitting import fit
from fliptrace.studies.training.settings import Training, TrainSettings

CARD_NAME, RECORD_NAME, TEST_NAME = "README.md", "training.json", "test.csv"


def train_adapter(
    settings: TrainSettings,
    folder: str | Path,
    *,
    command: Sequence[str] = (),
    progress: Callable[[str, int, int], None] | None = None,
) -> Training:
    """Train a LoRA adapter and write it with its card; where the same training was stopped, go on after its last epoch.

    On a CPU the same settings give the same bits; on a GPU the sums of gradients may take another order each time.

    Args:
        settings: what to train.
        folder: a new or empty folder for the adapter, or one in which the same training was stopped.
        command: how it was started, for the card.
        progress: told of every step.

    Raises:
        InputError: a setting, the data or the folder cannot be used.
        UnsupportedModelError: a quantised model, or one with nothing to adapt.
        RecordingError: the loss became no number.
        StorageError: something cannot be written.
    """
    settings.check()
    out = Path(folder)
    kept = out / CHECKPOINT_NAME
    stopped = kept.exists()
    if out.exists() and not stopped and (not out.is_dir() or {*out.iterdir()} - {half_of(kept)}):
        raise InputError(
            f"the adapter's folder must be new or empty, or hold a training that was stopped; {out} does not"
        )
    splits = read_splits(settings)
    torch.set_num_threads(settings.threads)
    from fliptrace.capture.environment import describe_environment
    from fliptrace.capture.sources import quiet_libraries, shown_name
    from fliptrace.capture.transformers_engine.loading import choose_device, load_base
    from fliptrace.studies.training.adapters import add_adapter, save_adapter

    source = settings.model or bundled_model().model
    device = choose_device(settings.device)
    with quiet_libraries():
        base, tokenizer, description = load_base(source, settings.dtype, "sdpa")
        dtype = next(base.parameters()).dtype
        model, targets = add_adapter(base.to(device), settings)
    encode = encoder(tokenizer, chat_template=settings.chat_template)
    training, too_long = _encoded(splits.training, encode, settings.max_length)
    validation, too_long_too = _encoded(splits.validation, encode, settings.max_length)
    if not training or not validation:
        raise InputError(
            f"all rows for {'validation' if training else 'training'} have more than {settings.max_length} tokens; "
            "raise --max-length"
        )
    model.train()
    checkpoint = Checkpoint(
        out,
        {
            **asdict(settings),
            "task": settings.data_name,
            "model": str(description["model"].get("sha256")),
            "device": device.type,
            "data_sha256": splits.data_sha256,
        },
    )
    made = fit(
        model,
        training,
        validation,
        settings,
        device,
        pad=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
        autocast=dtype if dtype in (torch.bfloat16, torch.float16) else None,
        checkpoint=checkpoint,
        progress=progress,
    )
    out.mkdir(parents=True, exist_ok=True)
    save_adapter(model, out, dtype, shown_name(source))
    result = Training(
        out,
        made.steps,
        made.best_epoch,
        made.losses,
        {
            "training": len(training),
            "validation": len(validation),
            "test": len(splits.test),
            "too_long": too_long + too_long_too,
            "empty_or_double": splits.duplicates,
        },
        made.seconds,
    )
    record: dict[str, Any] = {
        "settings": asdict(settings) | {"task": settings.data_name},
        "alpha": settings.alpha,
        "adapted": targets,
        "data_sha256": splits.data_sha256,
        "base": description["model"],
        "dtype": str(dtype).removeprefix("torch."),
        "environment": describe_environment(device),
        "command": list(command),
        **result.to_json(),
    }
    record["settings"]["model"] = shown_name(source)
    replace_file(out / RECORD_NAME, json.dumps(record, indent=1) + "\n")
    replace_file(out / CARD_NAME, card(record))
    if splits.test:
        replace_file(out / TEST_NAME, test_csv(splits.test, settings))
    checkpoint.remove()
    return result


def _encoded(
    examples: Sequence[Example], encode: Callable[[Example], Encoded], longest: int
) -> tuple[list[Encoded], int]:
    rows = [encode(example) for example in examples]
    kept = [row for row in rows if len(row.ids) <= longest]
    return kept, len(rows) - len(kept)
