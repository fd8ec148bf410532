"""How the operating system keeps our memory. Matters where the CPU is the device."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

import jax

_M_TRIM_THRESHOLD = -1  # of glibc's malloc.h
_M_MMAP_MAX = -4
_KEEP_BYTES = 2**31 - 1
_MADV_HUGEPAGE = 14  # of Linux's mman.h
_MADV_COLLAPSE = 25  # Linux 6.1
_HUGE_PAGE = 2 * 2**20


def keep_freed_memory() -> None:
    """Makes glibc keep what a step frees for the next one. Does nothing on other C libraries.

    A step on the CPU allocates tens of MB of temporaries. glibc maps so much afresh each time and
    gives it back after, and the page faults took up to half of the time of a sampling step.
    Called after loading, whose own large buffers are better given back.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)


def use_huge_pages(arrays: Iterable[jax.Array]) -> None:
    """Asks Linux to put large arrays on huge pages, and to move them there now.

    Decoding one sequence reads all the weights once a token; with pages of 4 KiB it spends a
    quarter of that time on address translation: 20 against 25 tokens a second for the demo. Where
    the kernel cannot, nothing changes.
    """
    if not sys.platform.startswith("linux"):
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    buffers = (shard.data for array in arrays for shard in array.addressable_shards)
    for buffer in buffers:
        # Rounded outwards: most arrays are only some MB, and lie side by side.
        start = buffer.unsafe_buffer_pointer() // _HUGE_PAGE * _HUGE_PAGE
        end = -(-(buffer.unsafe_buffer_pointer() + buffer.nbytes) // _HUGE_PAGE) * _HUGE_PAGE
        madvise(start, end - start, _MADV_HUGEPAGE)
        madvise(start, end - start, _MADV_COLLAPSE)
