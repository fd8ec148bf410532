"""Which page holds which tokens: a hash chain over full pages.

A full page's K and V depend on its own tokens and on all before them, so its key is the hash of
its parent's key and its own token ids: equal keys mean equal prefixes. The key is a 256-bit
BLAKE2b digest, so that a collision, accidental or contrived, is not a concern.

The cache maps keys to pages and back. Who owns a page, and which unowned page is evicted first,
is the page pool's affair, which tells `forget` of an eviction.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 32


def page_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a full page: `parent` is the key of the page before it, b"" for the first."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], num_pages: int, page_size: int) -> None:
    """Grows a sequence's page keys in place until they cover its first `num_pages` pages, all full."""
    for i in range(len(hashes), num_pages):
        parent = hashes[-1] if hashes else b""
        hashes.append(page_hash(parent, token_ids[i * page_size : (i + 1) * page_size]))


class PrefixCache:
    """Key <-> page, one to one. Not thread safe."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def match(self, token_ids: Sequence[int], hashes: list[bytes]) -> list[int]:
        """Returns the pages that hold the longest known prefix of `token_ids`, in order.

        Never all of `token_ids`: the last one is left to compute, since its logits are wanted.
        `hashes` holds the page keys worked out so far and grows as far as the search goes. The
        caller shares the pages before it allocates any, lest they be evicted.
        """
        page_ids: list[int] = []
        for i in range((len(token_ids) - 1) // self.page_size):
            extend_hashes(hashes, token_ids, i + 1, self.page_size)
            page_id = self._page_of.get(hashes[i])
            if page_id is None:
                break
            page_ids.append(page_id)
        return page_ids

    def insert(self, key: bytes, page_id: int) -> bool:
        """Registers a full page; False, and nothing changes, where another page has that key already.

        That happens where two sequences computed the same prefix side by side; the later one's
        page stays its own.
        """
        if self._page_of.setdefault(key, page_id) != page_id:
            return False
        self._hash_of[page_id] = key
        return True

    def forget(self, page_id: int) -> None:
        """Drops a page that was evicted."""
        del self._page_of[self._hash_of.pop(page_id)]
