"""A 128-bit digest of tensor bits that is the same on every device and is computed where the tensor lives.

Why not a cryptographic hash: it would need the bytes on the host, one copy per record. Why not torch.hash_tensor: it
is an XOR, blind to order. Why not a weighted sum: flipping the sign bits of two elements cancels. Here every 64-bit
word of a row (four 16-bit or two 32-bit elements) is mixed with its position by a non-linear bijection first (the
finaliser of SplitMix64) and only then summed modulo 2**64, in two lanes. Sums commute, so devices may add in any
order.

A row digest covers the bits and positions of one row, its length in bytes and its dtype. The digest of a tensor
combines its row digests with their row positions; the digest of a cache combines those of its rows, so that a new row
is one addition. It protects against accidents, not against an adversary.

Source: own; mixing constants from Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD_BYTES = 8
_WORD_MASK = 0xFFFFFFFFFFFFFFFF


def _signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit constant."""
    return value - (1 << 64) if value >= (1 << 63) else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLY_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = _signed(0x94D049BB133111EB)
_LANE = _signed(0xD1B54A32D192ED03)
_ROW = _signed(0x8CB92BA72F3D8DD7)

_DTYPE_TAGS = {
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.float64: 4,
    torch.int64: 5,
    torch.int32: 6,
    torch.int16: 7,
    torch.int8: 8,
    torch.uint8: 9,
    torch.bool: 10,
    torch.float8_e4m3fn: 11,
    torch.float8_e5m2: 12,
}


def mix_words(words: Tensor) -> Tensor:
    """Mix each int64 word by the finaliser of SplitMix64 (a bijection); int64 in, int64 out, same shape.

    Shifts of int64 are arithmetic in torch; masking the copied sign bits away makes them logical.
    """
    mixed = words >> 30
    mixed.bitwise_and_(0x3FFFFFFFF).bitwise_xor_(words).mul_(_MULTIPLY_1)
    mixed.bitwise_xor_((mixed >> 27).bitwise_and_(0x1FFFFFFFFF)).mul_(_MULTIPLY_2)
    return mixed.bitwise_xor_((mixed >> 31).bitwise_and_(0x1FFFFFFFF))


def mix_positioned_words(words: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Mix words with their positions into the two lanes that a row digest sums.

    Args:
        words: int64, any shape.
        positions: int64, broadcastable: the index of each word within its row.

    Returns:
        Two int64 tensors of the broadcast shape.
    """
    first = mix_words(words ^ ((positions + 1) * _GOLDEN))
    second = mix_words(first ^ _LANE)
    return first, second


def row_words(values: Tensor) -> Tensor:
    """View the rows of a [N, W] tensor as int64 words, zero-padded to whole words.

    Returns:
        int64 [N, ceil(W * itemsize / 8)]; a view where the row is contiguous, aligned and a multiple of 8 bytes.
    """
    count, width = values.shape
    values = values.contiguous()
    if values.stride() != (
        width,
        1,
    ):  # torch calls a tensor with a dimension of size 1 contiguous whatever its strides
        values = values.as_strided((count, width), (width, 1))
    row_bytes = width * values.element_size()
    aligned = (
        values.storage_offset() * values.element_size() % _WORD_BYTES == 0
        and values.data_ptr() % _WORD_BYTES == 0
    )
    if row_bytes % _WORD_BYTES == 0 and aligned:
        return values.view(torch.int64)
    padded_bytes = -(-row_bytes // _WORD_BYTES) * _WORD_BYTES
    padded = torch.zeros((values.shape[0], padded_bytes), dtype=torch.uint8, device=values.device)
    padded[:, :row_bytes] = values.view(torch.uint8)
    return padded.view(torch.int64)


def finish_rows(sums: Tensor, row_bytes: Tensor | int, dtype_tags: Tensor | int) -> Tensor:
    """Seal the lane sums of rows with their length and dtype.

    Args:
        sums: int64 [N, 2].
        row_bytes: length of each row in bytes, an int or int64 [N, 1].
        dtype_tags: tag of each row's dtype, likewise.

    Returns:
        int64 [N, 2], the row digests.
    """
    seal = (row_bytes * 256 + dtype_tags) * _ROW
    return mix_words(sums + (seal if isinstance(seal, Tensor) else _signed(seal & _WORD_MASK)))


def dtype_tag(dtype: torch.dtype) -> int:
    """Return the number that stands for a dtype in a digest.

    Raises:
        ValueError: a dtype that records never have.
    """
    tag = _DTYPE_TAGS.get(dtype)
    if tag is None:
        raise ValueError(
            f"a record of dtype {dtype} cannot be digested; known are {', '.join(map(str, _DTYPE_TAGS))}"
        )
    return tag


def digest_rows(values: Tensor) -> Tensor:
    """Digest every row of a tensor over its bits, their positions in the row, the row's length and the dtype.

    Args:
        values: [N, ...]; everything after the first dimension is one row. Any device, any layout.

    Returns:
        int64 [N, 2] on the same device. Equal rows give equal digests on every device and in every process.

    Raises:
        ValueError: unknown dtype, or no dimension at all.
    """
    if values.dim() == 0:
        raise ValueError("digest_rows needs at least one dimension; give a scalar as shape [1]")
    rows = values.reshape(values.shape[0], values.shape[1:].numel())
    if rows.shape[1] == 0:
        sums = torch.zeros((rows.shape[0], 2), dtype=torch.int64, device=values.device)
    else:
        words = row_words(rows)
        positions = torch.arange(words.shape[1], dtype=torch.int64, device=values.device)
        first, second = mix_positioned_words(words, positions)
        sums = torch.stack((first.sum(1), second.sum(1)), dim=1)
    return finish_rows(sums, rows.shape[1] * rows.element_size(), dtype_tag(values.dtype))


def position_terms(row_digests: Tensor, positions: Tensor) -> Tensor:
    """Bind row digests to row positions: what the digest of a tensor or cache sums.

    Args:
        row_digests: int64 [N, 2].
        positions: int64 [N], any numbering that tells the rows apart.

    Returns:
        int64 [N, 2].
    """
    return mix_words(row_digests ^ ((positions.unsqueeze(1) + 1) * _GOLDEN))


def combine_digests(row_digests: Tensor, positions: Tensor | None = None) -> Tensor:
    """Combine row digests into one; the order in which rows are listed does not matter, their positions do.

    Args:
        row_digests: int64 [N, 2].
        positions: int64 [N]; 0 .. N-1 when left out.

    Returns:
        int64 [2].
    """
    if positions is None:
        positions = torch.arange(row_digests.shape[0], dtype=torch.int64, device=row_digests.device)
    return mix_words(position_terms(row_digests, positions).sum(0))


def digest_tensor(values: Tensor) -> Tensor:
    """Digest a whole tensor over bits, positions, dtype and shape.

    Args:
        values: any shape and layout.

    Returns:
        int64 [2] on the same device.
    """
    rows = values.reshape(1) if values.dim() == 0 else values
    digest = combine_digests(digest_rows(rows))
    for size in values.shape:
        digest = shape_mixed(digest, size)
    return digest


def shape_mixed(digest: Tensor, size: Tensor | int) -> Tensor:
    """Mix one dimension's size into a digest; ``digest_tensor`` does so for each dimension in turn.

    Args:
        digest: int64 [..., 2].
        size: an int, or int64 broadcastable to the digest.

    Returns:
        int64, the digest's shape.
    """
    return mix_words((digest ^ size) + _ROW)


def digest_hex(digest: Tensor | Sequence[int]) -> str:
    """Write a digest as 32 hexadecimal digits: first lane, then second."""
    lanes = digest.tolist() if isinstance(digest, Tensor) else list(digest)
    return "".join(f"{lane & _WORD_MASK:016x}" for lane in lanes)
