"""The class of a coordinate: equal, latent, surviving, structural or not observed, decided on the bits alone."""

from __future__ import annotations

from enum import IntEnum, StrEnum

import torch
from torch import Tensor

from fliptrace.numerics.rounding import integer_view, round_to


class CoordinateClass(IntEnum):
    """What became of one coordinate between two executions; the larger number is the worse news.

    NOT_OBSERVED is negative so that a maximum over cells never turns "not observed" into "equal".
    """

    NOT_OBSERVED = -1
    EQUAL = 0
    LATENT = 1
    SURVIVING = 2
    STRUCTURAL = 3

    @property
    def label(self) -> str:
        """The word used in reports."""
        return self.name.lower().replace("_", " ")


class SpecialDifference(StrEnum):
    """Differences of bits that are no difference of value, and are named rather than merged or dropped."""

    SIGN_OF_ZERO = "sign of zero"
    NAN_PAYLOAD = "NaN payload"


def classify(reference: Tensor, candidate: Tensor, consumer_dtype: torch.dtype) -> Tensor:
    """Classify every element of two tensors of the same shape and dtype.

    Args:
        reference: any shape; FP32 (a shrink), or BF16/FP16 (already rounded: a difference there has survived).
        candidate: same shape and dtype.
        consumer_dtype: the type that the consumer rounds to. With torch.float32 nothing is rounded away, so each
            difference survives.

    Returns:
        int8, same shape, of CoordinateClass values EQUAL, LATENT and SURVIVING.

    Raises:
        ValueError: shapes or dtypes differ (that is a structural difference of the record, the caller's to report).
    """
    if reference.shape != candidate.shape or reference.dtype != candidate.dtype:
        raise ValueError(
            f"classify needs two tensors of one shape and dtype; got {tuple(reference.shape)} {reference.dtype} and "
            f"{tuple(candidate.shape)} {candidate.dtype}"
        )
    differs = integer_view(reference) != integer_view(candidate)
    if reference.dtype == torch.float32 and consumer_dtype != torch.float32:
        survives = integer_view(round_to(reference, consumer_dtype)) != integer_view(
            round_to(candidate, consumer_dtype)
        )
    else:
        survives = differs
    return differs.to(torch.int8) + (differs & survives).to(torch.int8)


def special_difference(reference: float, candidate: float) -> SpecialDifference | None:
    """Name a difference that is one of bits only: +0 against -0, or two NaNs of different payload.

    The caller has found the bits to differ; both values come as Python floats.
    """
    if reference != reference and candidate != candidate:
        return SpecialDifference.NAN_PAYLOAD
    if reference == 0 and candidate == 0:
        return SpecialDifference.SIGN_OF_ZERO
    return None
