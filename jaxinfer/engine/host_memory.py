"""How the host's allocator treats the temporaries of each step. Matters where the CPU is the device."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1  # of glibc's malloc.h
_M_MMAP_MAX = -4
_KEEP_BYTES = 2**31 - 1


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
