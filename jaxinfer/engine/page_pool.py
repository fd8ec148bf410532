"""Host allocator of the KV cache's pages: reference counts, a free list, an LRU of reusable pages.

A page is in one of three states:

* free: nobody owns it and its content is worthless;
* used: its reference count is 1 or more;
* cached: nobody owns it, but its content can still be reused (`keep` said so). It counts as
  allocatable, and the least recently used one is evicted when no page is free.

Page 0, the null page, takes the writes of padding and is in none of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold the K and V of so many tokens of one sequence."""
    return -(-num_tokens // page_size)


class PagePool:
    """Pages 1 ... num_pages - 1. Not thread safe."""

    def __init__(self, num_pages: int, on_evict: Callable[[int], None] | None = None) -> None:
        """`on_evict` is told each cached page whose content is about to be lost."""
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages} must be 2 or more: page 0 is the null page")
        self.num_pages = num_pages
        self._on_evict = on_evict
        self._free = list(range(num_pages - 1, 0, -1))  # a stack, so that low pages go first
        self._ref_counts = [0] * num_pages
        self._kept: set[int] = set()  # pages whose content outlives their last owner
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out: free, and cached without an owner."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages without an owner whose content can be reused."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages with an owner."""
        return self.num_pages - 1 - self.num_free

    def ref_count(self, page_id: int) -> int:
        """How many own the page."""
        return self._ref_counts[page_id]

    def allocate(self, num_pages: int) -> list[int] | None:
        """Returns `num_pages` pages with one owner each; None, and takes none, where too few are left."""
        if num_pages > self.num_free:
            return None
        page_ids = [self._free.pop() if self._free else self._evict() for _ in range(num_pages)]
        for page_id in page_ids:
            self._ref_counts[page_id] = 1
        return page_ids

    def share(self, page_id: int) -> None:
        """Adds an owner to a page that is used or cached."""
        if self._ref_counts[page_id] == 0:
            if page_id not in self._cached:
                raise ValueError(f"page_id={page_id} is free: share only pages that are used or cached")
            del self._cached[page_id]
        self._ref_counts[page_id] += 1

    def release(self, page_ids: Iterable[int]) -> None:
        """Takes one owner from each page of a sequence, given in the sequence's order.

        The last page is released first, so that it is evicted first: a page of a hash chain is
        of no use once its parent is gone.
        """
        for page_id in reversed(list(page_ids)):
            if self._ref_counts[page_id] == 0:
                raise ValueError(f"page_id={page_id} has no owner to release it")
            self._ref_counts[page_id] -= 1
            if self._ref_counts[page_id]:
                continue
            if page_id in self._kept:
                self._cached[page_id] = None
            else:
                self._free.append(page_id)

    def keep(self, page_id: int) -> None:
        """Marks a used page's content as reusable: released by its last owner it becomes cached, not free."""
        if self._ref_counts[page_id] == 0:
            raise ValueError(f"page_id={page_id} has no owner: keep only pages that are used")
        self._kept.add(page_id)

    def _evict(self) -> int:
        page_id, _ = self._cached.popitem(last=False)
        self._kept.discard(page_id)
        if self._on_evict is not None:
            self._on_evict(page_id)
        return page_id

    def check(self) -> None:
        """Raises AssertionError unless each page is in one state and free + used + cached = num_pages - 1."""
        free, cached = set(self._free), set(self._cached)
        used = {page_id for page_id, count in enumerate(self._ref_counts) if count}
        if any(count < 0 for count in self._ref_counts):
            raise AssertionError(f"a reference count is negative: {self._ref_counts}")
        if len(free) != len(self._free):
            raise AssertionError(f"a page is in the free list twice: {sorted(self._free)}")
        if free & cached or free & used or cached & used:
            raise AssertionError(f"a page is in two states: {free=} {cached=} {used=}")
        if free | cached | used != set(range(1, self.num_pages)):
            raise AssertionError(f"pages are lost, or page 0 is in use: {free=} {cached=} {used=}")
        if not cached <= self._kept or self._kept & free:
            raise AssertionError(f"kept pages are cached or used: {cached=} {free=} kept={self._kept}")
