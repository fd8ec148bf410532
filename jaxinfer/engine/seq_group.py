"""A data-parallel group's books: who holds which of its pages and slots. Pure Python.

What runs, waits or yields is the scheduler's to decide (engine/scheduler.py).
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from jaxinfer.config import CacheConfig, SchedulerConfig
from jaxinfer.engine.page_pool import PagePool, pages_for
from jaxinfer.engine.prefix_cache import PrefixCache, extend_hashes
from jaxinfer.types import Sequence, SequenceStatus


@dataclass(eq=False, slots=True)
class Entry:
    """What the scheduler knows of an unfinished sequence beyond the sequence itself."""

    sequence: Sequence
    order: tuple[int, float, int]  # priority, arrival, seq_id
    # Of the latest admission:
    group: SeqGroup | None = None
    wave: int = 0
    prefill_end: int = 0  # tokens that its prefill computes
    first_step_id: int = 0
    num_registered_pages: int = 0  # full pages that the prefix cache has been offered
    page_ids: tuple[int, ...] = ()  # the sequence's, as a tuple that is made anew only when they change

    def __lt__(self, other: Entry) -> bool:
        return self.order < other.order

    @property
    def in_prefill(self) -> bool:
        """True while tokens of its prefill are not computed."""
        return self.sequence.num_computed_tokens < self.prefill_end


class SeqGroup:
    """Pages, slots, and the sequences that hold them.

    Attributes:
      index: the group's.
      pool, prefix_cache: its pages, and those that prompts can share; None where they may not.
      running: the sequences that hold a slot, in order.
    """

    def __init__(self, index: int, config: SchedulerConfig, cache: CacheConfig) -> None:
        self.index = index
        prefix_cache = PrefixCache(cache.page_size) if config.enable_prefix_caching else None
        self.prefix_cache = prefix_cache
        self.pool = PagePool(cache.num_pages, None if prefix_cache is None else prefix_cache.forget)
        self.running: list[Entry] = []
        self._page_size = cache.page_size
        self._num_slots = config.max_num_seqs
        self._free_slots = list(range(config.max_num_seqs))  # a heap: the lowest goes first

    @property
    def has_free_slot(self) -> bool:
        """True where one more sequence may run."""
        return bool(self._free_slots)

    def cached_pages(self, sequence: Sequence) -> list[int]:
        """The pages that hold the sequence's first tokens already."""
        # Log-probabilities of the prompt need the logits of all of it, so nothing is matched there.
        if self.prefix_cache is None or sequence.request.params.prompt_logprobs is not None:
            return []
        return self.prefix_cache.match(sequence.token_ids, sequence.page_hashes)

    def take_pages(self, entry: Entry, cached: list[int]) -> bool:
        """Gives a waiting sequence pages for all its tokens; False, and none, where they don't fit.

        Args:
          entry: the sequence.
          cached: the pages that hold its prefix, which it shares.
        """
        sequence = entry.sequence
        for page_id in cached:
            self.pool.share(page_id)
        num_missing = pages_for(len(sequence.token_ids), self._page_size) - len(cached)
        # A page is left to each running sequence, so that the next step does not preempt the newcomer.
        if num_missing + len(self.running) > self.pool.num_free:
            self.pool.release(cached)
            return False
        sequence.page_ids = cached + (self.pool.allocate(num_missing) or [])
        sequence.num_computed_tokens = len(cached) * self._page_size
        if not sequence.num_preemptions:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        entry.group = self
        entry.page_ids = tuple(sequence.page_ids)
        entry.prefill_end = len(sequence.token_ids)
        entry.num_registered_pages = len(cached)
        return True

    def start(self, entry: Entry) -> None:
        """Gives a sequence that has its pages a slot."""
        entry.sequence.slot = heapq.heappop(self._free_slots)
        entry.sequence.status = SequenceStatus.RUNNING
        bisect.insort(self.running, entry)

    def grow(self, entry: Entry, num_missing: int) -> bool:
        """Gives a running sequence so many more pages; False, and none, where there are too few."""
        page_ids = self.pool.allocate(num_missing)
        if page_ids is None:
            return False
        entry.sequence.page_ids += page_ids
        entry.page_ids = tuple(entry.sequence.page_ids)
        return True

    def release(self, entry: Entry) -> None:
        """Takes the pages and the slot from a running sequence."""
        sequence = entry.sequence
        assert sequence.slot is not None
        self.pool.release(sequence.page_ids)
        sequence.page_ids = []
        entry.page_ids = ()
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = None
        self.running.remove(entry)
        entry.group = None

    def register_pages(self, entry: Entry, num_tokens: int) -> None:
        """Offers the prefix cache the full pages among a sequence's first `num_tokens`, now computed."""
        num_pages = num_tokens // self._page_size
        if self.prefix_cache is None or num_pages <= entry.num_registered_pages:
            return
        sequence = entry.sequence
        extend_hashes(sequence.page_hashes, sequence.token_ids, num_pages, self._page_size)
        for i in range(entry.num_registered_pages, num_pages):
            if self.prefix_cache.insert(sequence.page_hashes[i], sequence.page_ids[i]):
                self.pool.keep(sequence.page_ids[i])
        entry.num_registered_pages = num_pages

    def faults(self) -> Iterable[str]:
        """What does not agree, of what does between any two calls of the scheduler."""
        running = [entry.sequence for entry in self.running]
        owners = Counter(page_id for sequence in running for page_id in sequence.page_ids)
        slots = self._free_slots + [sequence.slot for sequence in running if sequence.slot is not None]
        self.pool.check()
        if any(owners[i] != self.pool.ref_count(i) for i in range(self.pool.num_pages)):
            yield "page owners"
        if sorted(slots) != list(range(self._num_slots)):
            yield "slots"
        if self.running != sorted(self.running):
            yield "order of the running"
        if any(entry.group is not self for entry in self.running):
            yield "groups of the running"
        if any(entry.page_ids != tuple(entry.sequence.page_ids) for entry in self.running):
            yield "page tuples"
