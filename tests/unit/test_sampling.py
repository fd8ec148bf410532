"""Sampling against a float64 reference, transformers' processors, exact distributions, and itself alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.ops import sampling
from jaxinfer.ops.sampling import sample, set_counts, token_logprobs, update_counts
from jaxinfer.ops.sampling_batch import SamplingBatch, SamplingRows
from jaxinfer.types import MAX_LOGPROBS, RequestError, SamplingParams

GOLDEN = Path(__file__).parents[1] / "golden" / "sampling" / "processors.npz"
_sample = jax.jit(sample)


@dataclass(frozen=True)
class Row:
    """One row of a batch, and the tokens that its slot holds."""

    params: SamplingParams
    seed: int = 0
    position: int = 0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    stop_ids: frozenset[int] = field(default_factory=frozenset)


def run(logits: np.ndarray, rows: Sequence[Row], size: int = 0) -> sampling.Sampled:
    """Samples `rows` padded to `size` with rows whose logits are NaN. Each shape is compiled."""
    n, vocab_size = logits.shape
    size = max(size, n)
    host = SamplingRows(n)
    prompt_mask, counts = np.zeros((size, vocab_size), bool), np.zeros((size, vocab_size), np.int32)
    for slot, row in enumerate(rows):
        host.set(slot, row.params, row.seed, row.stop_ids)
        prompt_mask[slot, list(row.prompt)] = True
        np.add.at(counts[slot], list(row.output), 1)
    batch = host.gather(
        np.arange(n), np.array([r.position for r in rows]), np.array([len(r.output) for r in rows]), size
    )
    padded = np.full((size, vocab_size), np.nan, np.float32)
    padded[:n] = logits
    slots = np.zeros(size, np.int32)
    slots[:n] = np.arange(n)
    sampled = _sample(padded, batch, prompt_mask, counts, slots)
    return jax.tree.map(lambda x: np.asarray(x)[:n], sampled)


def noise(row: Row, vocab_size: int) -> np.ndarray:
    """[V] Gumbel noise, by jax.random alone."""
    words = jnp.array([row.seed >> 32 & 0xFFFFFFFF, row.seed & 0xFFFFFFFF], jnp.uint32)
    return np.asarray(_noise(words, row.position, vocab_size))


@partial(jax.jit, static_argnums=2)
def _noise(words: jax.Array, position: int, vocab_size: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (vocab_size,), jnp.float32)


def reference_scores(logits: np.ndarray, row: Row) -> np.ndarray:
    """[V] float64: what the row's token is drawn from, -inf where filtered out."""
    p, x = row.params, logits.astype(np.float64)
    counts = np.bincount(list(row.output), minlength=len(x))
    seen = counts > 0
    seen[list(row.prompt)] = True
    x = np.where(seen, np.where(x > 0, x / p.repetition_penalty, x * p.repetition_penalty), x)
    x = x - p.frequency_penalty * counts - p.presence_penalty * (counts > 0)
    for token_id, value in p.logit_bias.items():
        x[token_id] += value
    if len(row.output) < p.min_tokens:
        x[list(row.stop_ids)] = -np.inf
    if p.temperature < 1e-5:
        return x
    x = x / p.temperature
    x[np.exp(x - x.max()) < p.min_p] = -np.inf
    if p.top_k:
        x[x < np.sort(x)[-min(p.top_k, len(x))]] = -np.inf
    order = np.argsort(-x, kind="stable")
    probs = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    above = np.concatenate([[0.0], np.cumsum(probs[order])[:-1]])
    edge = x[order[np.flatnonzero(above < p.top_p)[-1]]] if p.top_p < 1.0 else -np.inf
    return np.where(x >= edge, x, -np.inf)


def reference_token(logits: np.ndarray, row: Row) -> int:
    scores = reference_scores(logits, row)
    greedy = row.params.temperature < 1e-5
    return int(np.argmax(scores if greedy else scores + noise(row, len(logits))))


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 5, 40, 140, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.6, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.2, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.6, -1.1]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4, -0.3]),
    logit_bias=st.dictionaries(st.integers(0, 299), st.floats(-100, 100, width=32), max_size=4),
    min_tokens=st.integers(0, 4),
    logprobs=st.sampled_from([None, None, 0, 5]),
)
TOKENS = st.lists(st.integers(0, 299), max_size=8)
ROWS = st.builds(
    Row,
    params=PARAMS,
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**17),
    prompt=TOKENS,
    output=TOKENS,
    stop_ids=st.frozensets(st.integers(0, 299), max_size=5),
)


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**40 + 3, -1, -(2**63)])
def test_noise_is_that_of_jax_random(seed: int) -> None:
    row = Row(SamplingParams(), seed=seed, position=1234)
    host = SamplingRows(1)
    host.set(0, row.params, seed, ())
    batch = host.gather(np.array([0]), np.array([1234]), np.array([0]), 2)
    ours = np.asarray(jax.jit(sampling._gumbel, static_argnums=1)(jax.device_put(batch), 1001))
    np.testing.assert_array_equal(ours[0], noise(row, 1001))
    if 0 <= seed < 2**31:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), 1234)
        np.testing.assert_array_equal(ours[0], jax.random.gumbel(key, (1001,)))


@settings(max_examples=60)
@given(st.lists(ROWS, min_size=6, max_size=6), st.integers(0, 1000))
def test_mixtures_equal_the_reference(rows: list[Row], logits_seed: int) -> None:
    logits = (np.random.default_rng(logits_seed).standard_normal((6, 300)) * 3).astype(np.float32)
    expected = [reference_token(x, row) for x, row in zip(logits, rows, strict=True)]
    assert run(logits, rows, size=8).token_ids.tolist() == expected


@settings(max_examples=40)
@given(st.lists(ROWS, min_size=5, max_size=5), st.integers(0, 1000), st.permutations(range(5)))
def test_row_in_a_mixture_equals_the_same_row_alone(
    rows: list[Row], logits_seed: int, order: list[int]
) -> None:
    # Few distinct logits, so that ties are everywhere, the filters' edges included.
    logits = np.random.default_rng(logits_seed).integers(-8, 8, (5, 300)).astype(np.float32) / 2
    together = run(logits, rows, size=8).token_ids
    shuffled = run(logits[order], [rows[i] for i in order], size=8).token_ids
    alone = [run(logits[i : i + 1], [rows[i]]).token_ids[0] for i in range(5)]
    assert together.tolist() == alone
    assert shuffled.tolist() == together[order].tolist()


def test_many_rows_are_sampled_as_blocks_of_them_are() -> None:
    """Bit for bit, log-probabilities too; the last rows are two blocks' and padding's."""
    kinds = [
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2),
        SamplingParams(top_p=0.7, top_k=200, logprobs=0),
        SamplingParams(temperature=1.4, min_p=0.02, logit_bias={7: 9.0}),
        SamplingParams(temperature=0.0, min_tokens=4),
    ]
    rows = [
        Row(kinds[i % 5], seed=i, position=i, prompt=[i], output=[3, 200 + i], stop_ids=frozenset([5]))
        for i in range(70)
    ]
    logits = np.random.default_rng(1).integers(-8, 8, (70, 300)).astype(np.float32) / 2
    blocks = [run(logits[i : i + 32], rows[i : i + 32], size=32) for i in (0, 32, 64)]
    expected = jax.tree.map(lambda *parts: np.concatenate(parts), *blocks)
    jax.tree.map(np.testing.assert_array_equal, run(logits, rows, size=75), expected)
    assert expected.token_ids.tolist() == [reference_token(x, r) for x, r in zip(logits, rows, strict=True)]


def test_many_greedy_rows() -> None:
    logits = np.random.default_rng(0).standard_normal((70, 300)).astype(np.float32)
    sampled = run(logits, [Row(SamplingParams(temperature=0.0))] * 70)
    np.testing.assert_array_equal(sampled.token_ids, logits.argmax(axis=1))
    assert not sampled.logprobs.any()


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [49152, 32003])
def test_tokens_of_real_vocabularies_do_not_depend_on_the_batch(vocab_size: int) -> None:
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=1.5, top_p=0.5, top_k=500),
        SamplingParams(temperature=0.7, min_p=0.05),
        SamplingParams(top_k=50, repetition_penalty=1.1),
    ]
    rows = [Row(kinds[i % len(kinds)], seed=i, position=i, prompt=[1, 2], output=[3]) for i in range(32)]
    logits = (np.random.default_rng(0).standard_normal((32, vocab_size)) * 2).astype(np.float32)
    together = run(logits, rows).token_ids.tolist()
    assert [run(logits[i : i + 1], [rows[i]]).token_ids[0] for i in range(32)] == together
    assert run(logits[:5], rows[:5], size=8).token_ids.tolist() == together[:5]


def test_tokens_are_drawn_as_transformers_processors_leave_them() -> None:
    golden = np.load(GOLDEN)
    arrays = (golden[name] for name in ("logits", "tokens", "cases", "scores"))
    for logits, tokens, case, scores in zip(*arrays, strict=True):
        repetition, temperature, min_p, top_k, top_p = (float(x) for x in case)
        params = SamplingParams(
            temperature=temperature, top_k=int(top_k), top_p=top_p, min_p=min_p, repetition_penalty=repetition
        )
        rows = [Row(params, seed=3, position=i, prompt=tokens[:10], output=tokens[10:]) for i in range(64)]
        expected = [int(np.argmax(scores + noise(row, len(scores)))) for row in rows]
        assert run(np.tile(logits, (64, 1)), rows).token_ids.tolist() == expected, case


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.4, top_k=12),
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=2.0, top_k=30, top_p=0.6, min_p=0.05),
        SamplingParams(presence_penalty=1.5, frequency_penalty=0.5, logit_bias={7: 2.0}),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "filters", "penalties"],
)
def test_frequencies_fit_the_exact_distribution(params: SamplingParams) -> None:
    num_draws, vocab_size = 20_000, 40
    logits = np.random.default_rng(5).standard_normal(vocab_size).astype(np.float32)
    # Half of the draws differ in position, half in seed: both must be independent.
    rows = [Row(params, i // 10_000 * i, position=i % 10_000, output=[1, 2, 2]) for i in range(num_draws)]
    scores = reference_scores(logits, rows[0])
    probs = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    observed = np.bincount(run(np.tile(logits, (num_draws, 1)), rows).token_ids, minlength=vocab_size)
    assert observed[probs == 0].sum() == 0
    expected = probs[probs > 0] * num_draws
    statistic = ((observed[probs > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    # Wilson and Hilferty's normal approximation of chi-square: four standard deviations.
    assert ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5 < 4.0


def widen(logits: np.ndarray, vocab_size: int) -> np.ndarray:
    """With further tokens, which are never drawn."""
    padding = [(0, 0), (0, vocab_size - logits.shape[1])]
    return np.pad(logits, padding, constant_values=-np.inf)


def test_greedy_takes_the_first_of_equals() -> None:
    logits = widen(np.array([[0, 3, 1, 3, 3], [-np.inf, -np.inf, -2, -3, -2]], np.float32), 300)
    rows = [Row(SamplingParams(temperature=0.0)), Row(SamplingParams(temperature=1e-6, top_p=0.5))]
    assert run(logits, rows, size=8).token_ids.tolist() == [1, 2]


def test_argmax_of_any_size_is_the_first_of_equals() -> None:
    rng = np.random.default_rng(3)
    for size in (1, 127, 256, 257, 1000, 1024, 4099):
        x = rng.integers(-1000, 3, (5, size)).astype(np.float32)
        x[3] = -np.inf
        x[4, size // 2] = np.nan
        found = np.asarray(jax.jit(sampling._argmax)(x))
        np.testing.assert_array_equal(found[:4], x[:4].argmax(axis=1))
        assert 0 <= found[4] < size


@pytest.mark.parametrize("vocab_size", [1, 300, 2**18])
def test_mass_in_fixed_point_fits_and_is_fine(vocab_size: int) -> None:
    rng = np.random.default_rng(6)
    z = np.zeros((4, vocab_size), np.float32)  # the first row is as flat as can be
    z[1:] = -rng.exponential(4.0, (3, vocab_size))
    z[2] *= 10
    z[3, 1:] = -np.inf
    z[:, 0] = 0.0
    mass = np.asarray(jax.jit(sampling._fixed_point_mass)(z)).astype(np.float64)
    exact = np.exp(z.astype(np.float64))
    assert mass.sum(axis=1).max() < 2**32
    np.testing.assert_allclose(
        mass / mass.sum(axis=1, keepdims=True),
        exact / exact.sum(axis=1, keepdims=True),
        rtol=2e-5,
        atol=2**-28,
    )


def test_tokens_as_likely_as_the_last_one_kept_are_kept() -> None:
    logits = widen(np.tile(np.array([2, 1, 1, 1, 0], np.float32), (400, 1)), 40)
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.6), SamplingParams(min_p=0.36)):
        rows = [Row(params, seed=9, position=i) for i in range(400)]
        assert set(run(logits, rows, size=20_000).token_ids.tolist()) == {0, 1, 2, 3}


def test_kth_largest_is_exact_either_way() -> None:
    rng = np.random.default_rng(2)
    x = np.concatenate([rng.standard_normal((3, 500)), rng.integers(-3, 3, (3, 500))]).astype(np.float32)
    x[3, ::7] = -0.0
    x[4, 100:] = -np.inf
    x[5] = 1e-39  # subnormal
    for k in (1, 2, 100, 101, 128, 129, 499, 500):
        expected = np.sort(x, axis=1)[:, -k]
        ks = jnp.full((6,), k, jnp.int32)
        np.testing.assert_array_equal(jax.jit(sampling._kth_largest_by_bits)(x, ks), expected)
        np.testing.assert_array_equal(jax.jit(sampling._kth_largest)(x, ks), expected)
    off = jax.jit(sampling._kth_largest)(x, jnp.array([0, 3, 0, 500, 501, 200]))
    assert np.isneginf(np.asarray(off)[[0, 2]]).all()
    assert off[4] == x[4].min()


def test_stop_ids_are_held_back_until_min_tokens() -> None:
    logits = widen(np.array([[5, 4, 3, 2, 1]] * 3, np.float32), 300)
    params = SamplingParams(temperature=0.0, min_tokens=2)
    outputs: list[list[int]] = [[], [2], [2, 2]]
    rows = [Row(params, output=out, stop_ids=frozenset({0, 1})) for out in outputs]
    assert run(logits, rows, size=8).token_ids.tolist() == [2, 2, 0]


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = (np.random.default_rng(4).standard_normal((2, 300)) * 3).astype(np.float32)
    params = SamplingParams(
        temperature=0.3, top_k=3, repetition_penalty=1.5, logit_bias={11: 100.0}, logprobs=2
    )
    sampled = run(logits, [Row(params, prompt=[11]), Row(SamplingParams(temperature=0.0))], size=8)
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    assert sampled.token_ids[0] == 11
    np.testing.assert_allclose(sampled.logprobs[0], exact[0, 11], rtol=0, atol=1e-5)
    assert sampled.ranks.tolist() == [1 + (logits[0] > logits[0, 11]).sum(), 1]
    order = np.argsort(-logits, axis=1)[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(sampled.top_ids, order)
    np.testing.assert_allclose(sampled.top_logprobs, np.take_along_axis(exact, order, 1), rtol=0, atol=1e-5)


def test_logprobs_of_a_vocabulary_smaller_than_the_alternatives() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32))
    logprob, rank, top_ids, top = token_logprobs(jnp.asarray(logits), jnp.array([3]))
    np.testing.assert_allclose(logprob, np.log([0.125]), rtol=0, atol=1e-6)
    assert rank.tolist() == [3]
    assert top_ids.tolist() == [[0, 1, 2, 3] + [0] * (MAX_LOGPROBS - 4)]
    assert np.isneginf(np.asarray(top)[0, 4:]).all()


def test_counts_follow_admission_and_sampling() -> None:
    mask, counts = jnp.ones((3, 10), bool), jnp.full((3, 10), 5, jnp.int32)
    token_ids = jnp.array([1, 2, 2, 7, 7, 8, 9, 9], jnp.int32)
    mask, counts = jax.jit(set_counts)(mask, counts, 1, token_ids, 3, 6)
    assert np.flatnonzero(mask[1]).tolist() == [1, 2]
    assert counts[1].tolist() == [0, 0, 0, 0, 0, 0, 0, 2, 1, 0]
    assert bool(mask[0].all())
    assert counts[0].tolist() == [5] * 10
    slots, valid = jnp.array([1, 1, 2, 0]), jnp.array([True, True, True, False])
    counts = jax.jit(update_counts)(counts, slots, jnp.array([7, 0, 3, 4]), valid)
    assert counts[1].tolist() == [1, 0, 0, 0, 0, 0, 0, 3, 1, 0]
    assert counts[2].tolist() == [5, 5, 5, 6, 5, 5, 5, 5, 5, 5]
    assert counts[0].tolist() == [5] * 10


def test_counts_are_read_and_updated_in_place() -> None:
    num_slots, vocab_size, num_rows = 64, 5000, 2

    def step(logits: jax.Array, batch: SamplingBatch, mask: jax.Array, counts: jax.Array) -> tuple:
        slots = jnp.arange(num_rows)
        sampled = sample(logits, batch, mask, counts, slots)
        return sampled, mask, update_counts(counts, slots, sampled.token_ids, slots >= 0)

    batch = SamplingRows(num_rows).gather(np.arange(2), np.zeros(2), np.zeros(2), num_rows)
    mask, counts = np.zeros((num_slots, vocab_size), bool), np.zeros((num_slots, vocab_size), np.int32)
    logits = np.zeros((num_rows, vocab_size), np.float32)
    compiled = jax.jit(step, donate_argnums=(2, 3)).lower(logits, batch, mask, counts).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == mask.nbytes + counts.nbytes
    assert memory.temp_size_in_bytes < counts.nbytes


def test_one_program_serves_every_mixture() -> None:
    host, slots = SamplingRows(2), np.arange(2)
    logits, mask = np.zeros((2, 400), np.float32), np.zeros((2, 400), bool)
    traced: list[int] = []

    @jax.jit
    def compiled(*args: Any) -> sampling.Sampled:
        traced.append(1)
        return sample(*args)

    kinds = (SamplingParams(temperature=0.0), SamplingParams(top_k=300, top_p=0.5, min_p=0.1, logprobs=3))
    for params in (*kinds, replace(kinds[1], presence_penalty=1.0, logit_bias={3: -100.0})):
        host.set(1, params, seed=1, stop_ids=(4,))
        compiled(logits, host.gather(slots, slots, slots, 2), mask, mask.astype(np.int32), slots)
    assert len(traced) == 1


def test_a_new_sequence_takes_nothing_from_the_slots_last_one() -> None:
    host, fresh = SamplingRows(2), SamplingRows(2)
    last = SamplingParams(logit_bias={3: 1.0, 4: 2.0}, min_tokens=9, logprobs=4)
    host.set(0, last, seed=2**50, stop_ids=(1, 2, 3))
    for rows in (host, fresh):
        rows.set(0, SamplingParams(top_k=4, logit_bias={5: 1.0}), seed=8, stop_ids=(6,))
    args = np.array([0]), np.array([3]), np.array([1]), 4
    jax.tree.map(np.testing.assert_array_equal, host.gather(*args), fresh.gather(*args))


def test_too_many_stop_ids_are_refused() -> None:
    with pytest.raises(RequestError, match=r"81 ids end this sequence.*at most 80") as error:
        SamplingRows(1).set(0, SamplingParams(), seed=0, stop_ids=range(81))
    assert error.value.param == "stop_token_ids"
