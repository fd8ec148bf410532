"""The hash chain: which prefixes match, and that nothing else does."""

import hashlib
import random
import struct

from jaxinfer.engine.prefix_cache import PrefixCache, extend_hashes, page_hash


def register(cache: PrefixCache, token_ids: list[int], page_ids: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, len(page_ids), cache.page_size)
    for key, page_id in zip(hashes, page_ids, strict=True):
        assert cache.insert(key, page_id)
    return hashes


def test_matches_the_longest_prefix_of_full_pages():
    cache = PrefixCache(page_size=4)
    register(cache, list(range(12)), [5, 3, 9])
    assert cache.match([*range(12), 99], []) == [5, 3, 9]
    assert cache.match([*range(8), 99, 99, 99, 99, 99], []) == [5, 3]
    assert cache.match([*range(7), 99, 99], []) == [5]
    assert cache.match([99, *range(1, 12)], []) == []


def test_leaves_the_last_token_to_compute():
    cache = PrefixCache(page_size=4)
    register(cache, list(range(8)), [5, 3])
    assert cache.match(list(range(8)), []) == [5]
    assert cache.match(list(range(9)), []) == [5, 3]
    assert cache.match(list(range(4)), []) == []
    assert cache.match([0], []) == []


def test_a_page_matches_only_behind_the_same_parent():
    cache = PrefixCache(page_size=2)
    register(cache, [1, 1, 7, 7], [4, 5])
    assert cache.match([2, 2, 7, 7, 0], []) == []
    assert cache.match([7, 7, 0], []) == []


def test_the_first_page_of_a_key_stays():
    cache = PrefixCache(page_size=2)
    (key,) = register(cache, [1, 2], [4])
    assert not cache.insert(key, 6)
    assert cache.insert(key, 4)
    assert cache.match([1, 2, 3], []) == [4]


def test_a_forgotten_page_hides_those_behind_it():
    cache = PrefixCache(page_size=2)
    register(cache, [1, 2, 3, 4, 5, 6], [4, 5, 6])
    cache.forget(5)
    assert len(cache) == 2
    assert cache.match([1, 2, 3, 4, 5, 6, 7], []) == [4]
    assert cache.insert(page_hash(page_hash(b"", [1, 2]), [3, 4]), 9)
    assert cache.match([1, 2, 3, 4, 5, 6, 7], []) == [4, 9, 6]


def test_keys_are_blake2b_of_the_parent_and_the_ids():
    root = hashlib.blake2b(struct.pack("=2q", 3, 151935), digest_size=32).digest()
    assert page_hash(b"", [3, 151935]) == root
    assert page_hash(root, [4]) == hashlib.blake2b(root + struct.pack("=q", 4), digest_size=32).digest()


def test_hashes_are_worked_out_once_and_only_as_far_as_needed():
    cache = PrefixCache(page_size=2)
    register(cache, [1, 2, 3, 4], [4, 5])
    hashes: list[bytes] = []
    token_ids = [1, 2, 0, 0, 0, 0, 0, 0, 0]
    assert cache.match(token_ids, hashes) == [4]
    assert len(hashes) == 2, "the first miss ends the search"
    before = list(hashes)
    extend_hashes(hashes, token_ids, 4, 2)
    assert hashes[:2] == before
    fresh: list[bytes] = []
    extend_hashes(fresh, token_ids, 4, 2)
    assert fresh == hashes


def test_random_prefixes_agree_with_a_search_through_all_of_them():
    rng = random.Random(0)
    cache = PrefixCache(page_size=3)
    known: dict[tuple[int, ...], int] = {}  # the tokens up to a page's end -> the page
    for page_id in range(1, 400):
        token_ids = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
        hashes: list[bytes] = []
        expected = []
        for end in range(3, len(token_ids), 3):
            if tuple(token_ids[:end]) not in known:
                break
            expected.append(known[tuple(token_ids[:end])])
        assert cache.match(token_ids, hashes) == expected
        if (num_pages := len(token_ids) // 3) > 0:
            extend_hashes(hashes, token_ids, num_pages, 3)
            prefix = tuple(token_ids[: num_pages * 3])
            assert cache.insert(hashes[num_pages - 1], page_id) == (prefix not in known)
            known.setdefault(prefix, page_id)
        if rng.random() < 0.3 and known:
            prefix = rng.choice(sorted(known))
            cache.forget(known.pop(prefix))
