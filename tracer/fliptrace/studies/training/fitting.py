"""The optimiser's loop: batches in a seeded order, loss of answers alone, the weights that validate best."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fliptrace.errors import RecordingError
from fliptrace.studies.training.checkpoint import Checkpoint
from fliptrace.studies.training.data import Encoded
from fliptrace.studies.training.settings import TrainSettings

_WARMUP = 0.03
_IGNORED = -100
_LARGEST_GRADIENT = 1.0
#: Batches whose rows are sorted by length together, so that little is padded.
_SORTED_BATCHES = 8


@dataclass
class Fit:
    """What the loop gave; see Training."""

    steps: int
    best_epoch: int
    losses: list[tuple[float | None, float]]
    seconds: float


def fit(
    model: nn.Module,
    training: Sequence[Encoded],
    validation: Sequence[Encoded],
    settings: TrainSettings,
    device: torch.device,
    *,
    pad: int,
    autocast: torch.dtype | None,
    checkpoint: Checkpoint | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Fit:
    """Train what requires gradients, and leave the model with the weights of the best epoch.

    Nothing but the weights, the optimiser and the epoch's number decides the next epoch, so one that goes on from a
    checkpoint is the epoch that would have come.

    Args:
        model: a causal language model; ``logits`` of its output are used.
        training: rows to learn.
        validation: rows to judge by.
        settings: of the training.
        device: where the model lies.
        pad: id for the ends of short rows.
        autocast: compute in this dtype while weights stay in theirs; None: as they are.
        checkpoint: written after each epoch, and gone on from; None for none.
        progress: told of every step.

    Raises:
        RecordingError: the loss is no number.
        InputError: the checkpoint is another training's, or cannot be read.
        StorageError: it cannot be written.
    """
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimiser = torch.optim.AdamW(weights.values(), lr=settings.learning_rate, weight_decay=0.0)
    per_epoch = -(-len(training) // settings.batch)
    total = per_epoch * settings.epochs
    if settings.max_steps is not None:
        total = min(total, settings.max_steps)
    warmup = max(1, round(_WARMUP * total))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / warmup, 1.0) * max(0.0, 1.0 - step / total)
    )
    context: Any = (
        torch.autocast(device.type, dtype=autocast) if autocast else contextlib.nullcontext()
    )
    begin = time.monotonic()

    def loss_of(rows: Sequence[Encoded]) -> tuple[Tensor, int]:
        ids, labels, mask = padded(rows, pad, device)
        with context:
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        targets = labels[:, 1:]
        kept = targets != _IGNORED
        # Only answers' rows are brought to FP32: those of a large vocabulary are the largest tensor here.
        total_loss = nn.functional.cross_entropy(
            logits[:, :-1][kept].float(), targets[kept], reduction="sum"
        )
        return total_loss, int(kept.sum())

    def validate() -> float:
        model.eval()
        found, count = 0.0, 0
        with torch.no_grad():
            for start in range(0, len(validation), settings.batch):
                loss, answers = loss_of(validation[start : start + settings.batch])
                found, count = found + float(loss), count + answers
        model.train()
        return found / max(1, count)

    kept = None if checkpoint is None else checkpoint.restore()
    if kept is None:
        losses: list[tuple[float | None, float]] = [(None, validate())]
        best, best_epoch = copies(weights), 0
        step, done, before = 0, 0, 0.0
    else:
        put_back(weights, kept["weights"])
        optimiser.load_state_dict(kept["optimiser"])
        schedule.load_state_dict(kept["schedule"])
        losses, best, best_epoch = kept["losses"], kept["best"], kept["best_epoch"]
        step, done, before = kept["step"], kept["epoch"], kept["seconds"]
    for epoch in range(done + 1, settings.epochs + 1):
        learnt, count = torch.zeros((), device=device), 0
        for rows in batches(training, settings.batch, settings.seed * 1_000 + epoch):
            if step == total:
                break
            loss, answers = loss_of(rows)
            (loss / answers).backward()
            nn.utils.clip_grad_norm_(list(weights.values()), _LARGEST_GRADIENT)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad(set_to_none=True)
            learnt, count = learnt + loss.detach(), count + answers
            step += 1
            if progress is not None:
                progress(f"epoch {epoch}, validation loss {losses[-1][1]:.4f}", step, total)
        if not count:
            break
        losses.append((float(learnt) / count, validate()))
        if not all(map(torch.isfinite, map(torch.tensor, losses[-1]))):
            raise RecordingError(
                f"the loss of epoch {epoch} is no number; try a smaller --learning-rate"
            )
        if losses[-1][1] < min(earlier[1] for earlier in losses[:-1]):
            best, best_epoch = copies(weights), epoch
        if checkpoint is not None:
            checkpoint.keep(
                {
                    "weights": {name: weight.detach() for name, weight in weights.items()},
                    "optimiser": optimiser.state_dict(),
                    "schedule": schedule.state_dict(),
                    "losses": losses,
                    "best": best,
                    "best_epoch": best_epoch,
                    "step": step,
                    "epoch": epoch,
                    "seconds": before + time.monotonic() - begin,
                }
            )
    put_back(weights, best)
    return Fit(step, best_epoch, losses, before + time.monotonic() - begin)


def copies(weights: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return copies of weights."""
    return {name: weight.detach().clone() for name, weight in weights.items()}


def put_back(weights: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
    """Copy values into weights, from whatever device they are on."""
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(values[name])


def batches(rows: Sequence[Encoded], size: int, seed: int) -> Iterator[list[Encoded]]:
    """Yield every row once, shuffled by a seed, rows of like length together."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(rows), generator=generator).tolist()
    window = size * _SORTED_BATCHES
    found = []
    for start in range(0, len(order), window):
        part = sorted(order[start : start + window], key=lambda number: len(rows[number].ids))
        found += [part[at : at + size] for at in range(0, len(part), size)]
    for number in torch.randperm(len(found), generator=generator).tolist():
        yield [rows[row] for row in found[number]]


def padded(
    rows: Sequence[Encoded], pad: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, labels (the answers' alone) and mask, each int64 [rows, longest], padded at the end."""
    longest = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), longest), pad)
    labels = torch.full((len(rows), longest), _IGNORED)
    mask = torch.zeros((len(rows), longest), dtype=torch.int64)
    for number, row in enumerate(rows):
        size = len(row.ids)
        ids[number, :size] = torch.tensor(row.ids)
        labels[number, row.prompt : size] = torch.tensor(row.ids[row.prompt :])
        mask[number, :size] = 1
    return ids.to(device), labels.to(device), mask.to(device)
