"""GGUF's quantised blocks to float32, in numpy, a few rows at a time.

The layouts are those of the block structs in ggml's `ggml-common.h`; the order of the float
operations is that of `dequantize_row_*` in ggml's `ggml-quants.c`, so results are equal bit by bit
to the `gguf` package's.

Dims: n blocks, B weights a block, S bytes a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# Weights dequantised at a time: the temporaries stay in a core's cache, and out of the peak memory.
_CHUNK_WEIGHTS = 1 << 17


@dataclass(frozen=True)
class BlockFormat:
    """A quantised type: `block_bytes` bytes hold `block_size` weights.

    `decode(blocks [n, S] uint8, out [n, B] float32)` fills `out`.
    """

    block_size: int
    block_bytes: int
    decode: Callable[[Bytes, Floats], None]


def dequantize(rows: Bytes, dtype: str) -> Floats:
    """Dequantises rows of blocks.

    Args:
      rows: uint8 [..., row bytes], whole blocks each; any strides.
      dtype: a key of `BLOCK_FORMATS`.

    Returns:
      float32 [..., row weights], contiguous and aligned so that jax on a CPU need not copy it.
    """
    block = BLOCK_FORMATS[dtype]
    blocks_a_row = rows.shape[-1] // block.block_bytes
    out = _empty_aligned((*rows.shape[:-1], blocks_a_row * block.block_size))
    if not out.size:
        return out
    step = max(1, _CHUNK_WEIGHTS // out.shape[-1])
    source, target = np.atleast_2d(rows), np.atleast_2d(out)
    for lead in np.ndindex(source.shape[:-2]):
        for first in range(0, source.shape[-2], step):
            part = (*lead, slice(first, first + step))
            blocks = source[part].reshape(-1, block.block_bytes)
            block.decode(blocks, target[part].reshape(-1, block.block_size))
    return out


def _empty_aligned(shape: tuple[int, ...]) -> Floats:
    """An uninitialised array at a multiple of 64 bytes, which is what jax asks of a buffer to adopt."""
    num_bytes = math.prod(shape) * 4
    raw = np.empty(num_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes].view(np.float32).reshape(shape)


def _half(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte `start` of each block, as float32 [n, 1]."""
    return blocks[:, start : start + 2].view("<f2").astype(np.float32)


def _fields(packed: Bytes, width: int, bits: int, count: int = 0) -> Bytes:
    """Unpacks `count` fields (all that fit, for 0) of `bits` bits from bytes in runs of `width`.

    [n, m * width] -> [n, m, count, width]: the lowest fields of a run, then the next higher ones.
    """
    count = count or 8 // bits
    runs = packed.reshape(len(packed), -1, width)
    out = np.empty((*runs.shape[:2], count, width), np.uint8)
    for i in range(count):
        np.right_shift(runs, np.uint8(i * bits), out=out[:, :, i])
    out &= np.uint8((1 << bits) - 1)
    return out


def _scale(q: NDArray[np.generic], d: Floats, out: Floats) -> None:
    """out = q * d, with q [n, B] small integers and d [n, 1 or B / width] repeated over its width."""
    out[...] = q.reshape(out.shape)
    grouped = out.reshape(len(out), d.shape[1], -1)
    grouped *= d[:, :, None]


def _q4_0(blocks: Bytes, out: Floats) -> None:
    q = _fields(blocks[:, 2:], 16, 4).view(np.int8) - np.int8(8)
    _scale(q, _half(blocks, 0), out)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    _scale(_fields(blocks[:, 4:], 16, 4), _half(blocks, 0), out)
    out += _half(blocks, 2)


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    """high [n, 4]: a bit a weight, lowest first; low [n, 16]: nibbles. Returns [n, 32] in 0..31."""
    q = _fields(low, 16, 4).reshape(-1, 32)
    q |= np.unpackbits(high, axis=-1, bitorder="little") << np.uint8(4)
    return q


def _q5_0(blocks: Bytes, out: Floats) -> None:
    q = _five_bits(blocks[:, 2:6], blocks[:, 6:]).view(np.int8) - np.int8(16)
    _scale(q, _half(blocks, 0), out)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    _scale(_five_bits(blocks[:, 4:8], blocks[:, 8:]), _half(blocks, 0), out)
    out += _half(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    _scale(blocks[:, 2:].view(np.int8), _half(blocks, 0), out)


def _subtract(out: Floats, m: Floats) -> None:
    """out -= m, with m [n, groups] repeated over each group."""
    grouped = out.reshape(len(out), m.shape[1], -1)
    grouped -= m[:, :, None]


def _q2_k(blocks: Bytes, out: Floats) -> None:
    scales, qs = blocks[:, :16], blocks[:, 16:80]
    _scale(_fields(qs, 32, 2), _half(blocks, 80) * (scales & np.uint8(15)), out)
    _subtract(out, _half(blocks, 82) * (scales >> np.uint8(4)))


def _q3_k(blocks: Bytes, out: Floats) -> None:
    hmask, qs, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    # 16 scales of 6 bits: 4 low bits in 8 bytes (low nibbles first), 2 high bits in 4.
    scales = _fields(packed[:, :8], 8, 4).reshape(-1, 16)
    scales |= _fields(packed[:, 8:], 4, 2).reshape(-1, 16) << np.uint8(4)
    q = _fields(qs, 32, 2).reshape(-1, 256)
    q |= _fields(hmask, 32, 1).reshape(-1, 256) << np.uint8(2)  # a bit that is 0 takes 4 off
    signed = q.view(np.int8) - np.int8(4)
    _scale(signed, _half(blocks, 108) * (scales.view(np.int8) - np.int8(32)), out)


def _scales_and_mins(packed: Bytes) -> tuple[Bytes, Bytes]:
    """8 scales and 8 minima of 6 bits in 12 bytes, as Q4_K and Q5_K pack them (`get_scale_min_k4`)."""
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    top_a, top_b = (a >> np.uint8(2)) & np.uint8(0x30), (b >> np.uint8(2)) & np.uint8(0x30)
    scales = np.concatenate([a & np.uint8(63), (c & np.uint8(15)) | top_a], axis=1)
    mins = np.concatenate([b & np.uint8(63), (c >> np.uint8(4)) | top_b], axis=1)
    return scales, mins


def _q4_k(blocks: Bytes, out: Floats) -> None:
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    _scale(_fields(blocks[:, 16:], 32, 4), _half(blocks, 0) * scales, out)
    _subtract(out, _half(blocks, 2) * mins)


def _q5_k(blocks: Bytes, out: Floats) -> None:
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    q = _fields(blocks[:, 48:], 32, 4).reshape(-1, 256)
    q |= _fields(blocks[:, 16:48], 32, 1).reshape(-1, 256) << np.uint8(4)
    _scale(q, _half(blocks, 0) * scales, out)
    _subtract(out, _half(blocks, 2) * mins)


def _q6_k(blocks: Bytes, out: Floats) -> None:
    ql, qh, scales = blocks[:, :128], blocks[:, 128:192], blocks[:, 192:208].view(np.int8)
    q = _fields(ql, 64, 4).reshape(-1, 256)
    q |= _fields(qh, 32, 2).reshape(-1, 256) << np.uint8(4)
    _scale(q.view(np.int8) - np.int8(32), _half(blocks, 208) * scales, out)


BLOCK_FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        "Q4_0": BlockFormat(32, 18, _q4_0),
        "Q4_1": BlockFormat(32, 20, _q4_1),
        "Q5_0": BlockFormat(32, 22, _q5_0),
        "Q5_1": BlockFormat(32, 24, _q5_1),
        "Q8_0": BlockFormat(32, 34, _q8_0),
        "Q2_K": BlockFormat(256, 84, _q2_k),
        "Q3_K": BlockFormat(256, 110, _q3_k),
        "Q4_K": BlockFormat(256, 144, _q4_k),
        "Q5_K": BlockFormat(256, 176, _q5_k),
        "Q6_K": BlockFormat(256, 210, _q6_k),
    }
)
