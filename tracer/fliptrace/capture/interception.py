"""What an interceptor may hand over in a shrink's place: the same for every engine."""

from __future__ import annotations

from torch import Tensor

from fliptrace.errors import InputError


def checked_replacement(given: object, site: int, z: Tensor) -> Tensor:
    """Return what an interceptor gave for a shrink, if it can stand for it.

    Args:
        given: what the interceptor returned.
        site: the site's number, for the message.
        z: the shrink that it was given, [T, R] FP32.

    Raises:
        InputError: no tensor, or one of another shape, dtype or device.
    """
    if isinstance(given, Tensor) and (given.shape, given.dtype, given.device) == (
        z.shape,
        z.dtype,
        z.device,
    ):
        return given
    got = (
        f"{given.dtype} {list(given.shape)} on {given.device}"
        if isinstance(given, Tensor)
        else type(given).__name__
    )
    raise InputError(
        f"an interceptor must return what it was given for site {site}, or a tensor like it: {z.dtype} "
        f"{list(z.shape)} on {z.device}; got {got}"
    )
