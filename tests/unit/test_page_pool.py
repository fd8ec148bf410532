"""The page allocator against its own invariants and against a naive model of reference counts."""

import random

import pytest

from jaxinfer.engine.page_pool import PagePool


def test_hands_out_every_page_but_the_null_page():
    pool = PagePool(5)
    assert pool.allocate(5) is None
    assert pool.num_free == 4, "a failed allocation takes nothing"
    assert sorted(pool.allocate(4) or []) == [1, 2, 3, 4]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    pool.check()


def test_a_shared_page_is_free_after_its_last_owner():
    pool = PagePool(3)
    (page_id,) = pool.allocate(1) or []
    pool.share(page_id)
    pool.release([page_id])
    assert (pool.num_used, pool.num_free) == (1, 1)
    pool.release([page_id])
    assert (pool.num_used, pool.num_free, pool.num_cached) == (0, 2, 0)
    with pytest.raises(ValueError, match="no owner"):
        pool.release([page_id])
    with pytest.raises(ValueError, match="is free"):
        pool.share(page_id)
    with pytest.raises(ValueError, match="no owner"):
        pool.keep(page_id)


def test_evicts_the_least_recently_used_and_the_end_of_a_chain_first():
    evicted: list[int] = []
    pool = PagePool(5, evicted.append)
    a, b, c, d = pool.allocate(4) or []
    for page_id in (a, b, c, d):
        pool.keep(page_id)
    pool.release([a, b])
    pool.release([c, d])
    assert (pool.num_cached, pool.num_free) == (4, 4)
    pool.share(b)  # used again, and so younger than c and d when it is released
    pool.release([b])
    assert pool.allocate(4) == [a, d, c, b] == evicted
    pool.release([a, b, c, d])
    assert (pool.num_cached, pool.num_free) == (0, 4), "an evicted page isn't kept any more"
    pool.check()


def test_prefers_free_pages_to_cached_ones():
    pool = PagePool(4)
    a, b, c = pool.allocate(3) or []
    pool.keep(a)
    pool.release([a, b, c])
    assert set(pool.allocate(2) or []) == {b, c}
    assert pool.num_cached == 1


def test_needs_a_page_beside_the_null_page():
    with pytest.raises(ValueError, match="num_pages=1"):
        PagePool(1)


@pytest.mark.parametrize("seed", range(3))
def test_random_use_agrees_with_a_model(seed):
    rng = random.Random(seed)
    pool = PagePool(12, lambda page_id: kept.discard(page_id))
    kept: set[int] = set()  # content that the model says can be reused
    owners: list[list[int]] = []
    for _ in range(3000):
        action = rng.random()
        if action < 0.4:
            num_pages = rng.randint(1, 4)
            page_ids = pool.allocate(num_pages)
            in_use = {page_id for owner in owners for page_id in owner}
            assert (page_ids is None) == (num_pages > 11 - len(in_use))
            if page_ids is not None:
                assert not in_use & set(page_ids)
                assert not kept & set(page_ids), "its content was to be lost, and on_evict not told"
                owners.append(page_ids)
        elif action < 0.5 and owners:
            page_id = rng.choice(rng.choice(owners))
            pool.keep(page_id)
            kept.add(page_id)
        elif action < 0.6 and owners:
            shared = rng.choice(owners)[:2]
            for page_id in shared:
                pool.share(page_id)
            owners.append(list(shared))
        elif action < 0.7 and kept:
            page_id = rng.choice(sorted(kept))
            pool.share(page_id)
            owners.append([page_id])
        elif owners:
            pool.release(owners.pop(rng.randrange(len(owners))))
        pool.check()
        for page_id in range(1, 12):
            assert pool.ref_count(page_id) == sum(owner.count(page_id) for owner in owners)
