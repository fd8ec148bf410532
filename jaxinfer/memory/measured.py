"""What is really allocated: the ledger's classes, measured on the arrays and the compiled programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxinfer.config import CacheConfig
from jaxinfer.memory.ledger import Ledger


@dataclass(frozen=True)
class MemoryReport:
    """The ledger of a running engine, planned and measured, and what its cache holds now.

    Attributes:
      planned: by formula, before anything was allocated.
      measured: bytes of one device by class, for the classes that can be measured.
      budget_bytes: that may be used of each device.
      device: what the device itself reports, or None where it does not, as on the CPU.
      cache: the size of a data-parallel group's KV cache.
      num_groups: data-parallel groups.
      page_bytes: a page in all layers of one device.
      num_used_pages: pages that sequences hold, in all groups.
      num_cached_pages: pages that nobody holds, kept for prompts that begin alike.
    """

    planned: Ledger
    measured: Mapping[str, int]
    budget_bytes: int
    device: Mapping[str, int] | None
    cache: CacheConfig
    num_groups: int
    page_bytes: int
    num_used_pages: int
    num_cached_pages: int

    def to_json(self) -> dict[str, Any]:
        """As `/v1/memory` answers."""
        cache = dataclasses.asdict(self.cache) | {
            "page_bytes": self.page_bytes,
            "num_groups": self.num_groups,
            "num_tokens": self.num_groups * (self.cache.num_pages - 1) * self.cache.page_size,
            "num_used_pages": self.num_used_pages,
            "num_cached_pages": self.num_cached_pages,
        }
        return {
            "planned": self.planned.by_class() | {"device_bytes": self.planned.device_bytes},
            "measured": dict(self.measured) | {"device_bytes": sum(self.measured.values())},
            "budget_bytes": self.budget_bytes,
            "device": self.device and dict(self.device),
            "kv_cache": cache,
        }


def device_bytes(arrays: Any) -> int:
    """Bytes that the arrays of a pytree take of the device that holds the most of them."""
    totals: dict[Any, int] = {}
    for array in jax.tree.leaves(arrays):
        for shard in array.addressable_shards:
            totals[shard.device] = totals.get(shard.device, 0) + shard.data.nbytes
    return max(totals.values())


def temporary_bytes(programs: Iterable[Any]) -> int:
    """Of compiled programs, the most temporaries that one of them takes of a device."""
    return max(program.memory_analysis().temp_size_in_bytes for program in programs)


def code_bytes(programs: Iterable[Any]) -> int:
    """Of compiled programs, what they take of a device all together."""
    return sum(program.memory_analysis().generated_code_size_in_bytes for program in programs)
