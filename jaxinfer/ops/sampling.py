"""Sampling on device: every parameter of every row in one compiled program.

Dims: S rows (one a sampled sequence), V vocabulary, N slots, B logit biases, E stop ids.

What is computed, in this order (vLLM's and OpenAI's meanings):

1. repetition penalty on tokens of the prompt and the output, then frequency and presence penalty on
   tokens of the output;
2. logit_bias;
3. min_tokens: the stop ids get -inf while the output is too short;
4. a temperature under MIN_TEMPERATURE: the argmax, the lowest id among equals;
5. else logits / temperature, min_p, top_k, top_p (each on the distribution that the one before left),
   and the argmax of logit + Gumbel noise over the tokens kept, which is a draw from their softmax.
   Tokens as likely as the last one kept are kept too.

Log-probabilities and ranks are those of the model's own distribution, before all of this (vLLM's
`raw_logprobs`).

A row's token never depends on the other rows, bit for bit: the noise comes from the row's own key, and
whatever is summed over the vocabulary is summed in integers, whose order does not matter.

`lax.cond` on what any row asks for keeps features that nobody uses free. Milliseconds of a whole call, every
row using the feature, on 2 x86 cores (AVX-512) that had other work, jax 0.12.0.1, V = 49,152:

    rows              1      32
    greedy            0.25    0.9
    penalties         0.3     3.3
    logit_bias        0.3     2.9
    min_tokens        0.2     2.7
    temperature       0.6    10
    and min_p         0.5    10
    and top_k = 50    0.7    14
    and top_k = 200   0.9    42
    and top_p = 0.9   0.7    23
    greedy, logprobs  0.4     5.2

With 32 rows about half of it is page faults: glibc gives temporaries over 32 MiB back after each call.

More rows are sampled 32 at a time, but for greedy ones. 256 rows of Llama-3.1-8B then take 270 MiB of
temporaries on a v5e (libtpu 0.0.50.1), their logits included, where all at once took 1,005: those of 32 rows
lie in VMEM. On 2 x86 cores 256 rows with V = 49,152 take 0.7 to 0.8 of the time with a temperature, top_k or
top_p, 0.6 with log-probabilities, and 64 rows 0.9 to 1.2. On a mesh the devices of a group share the rows
(`sample_shared`): 18 MiB, with 8 of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from jaxinfer.ops.sampling_batch import SamplingBatch as SamplingBatch
from jaxinfer.ops.sampling_batch import SamplingRows as SamplingRows  # users need one import
from jaxinfer.types import MAX_LOGPROBS

MIN_TEMPERATURE = 1e-5  # less is greedy: logits divided by it overflow
# lax.top_k costs 2.5 ms for k = 64 and 5 ms for k = 256 (S = 32), the search by bits 25 ms whatever k is.
MAX_SORTED_TOP_K = 128
BLOCK_ROWS = 32  # that are sampled at once
ARGMAX_BLOCK = 128  # divides the vocabularies of Llama, Qwen, Gemma and SmolLM


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["token_ids", "logprobs", "ranks", "top_ids", "top_logprobs"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Sampled:
    """One token a row: token_ids [S] int32; the rest, `token_logprobs` of them, is 0 where no row asks."""

    token_ids: Array
    logprobs: Array
    ranks: Array
    top_ids: Array
    top_logprobs: Array


def sample(
    logits: Array, batch: SamplingBatch, prompt_mask: Array, output_counts: Array, slots: Array
) -> Sampled:
    """Samples one token a row, of many rows a block at a time, so that temporaries are those of a block.

    Args:
      logits: [S, V] float32, the model's.
      batch: how, a row each.
      prompt_mask: [N, V] bool, tokens of each slot's prompt; read only if a row has penalties.
      output_counts: [N, V] int32, tokens of each slot's output; likewise.
      slots: [S] int32, each row's slot, any valid one where padded.
    """
    rows, num_rows = (logits, batch, slots), logits.shape[0]
    if num_rows <= BLOCK_ROWS:
        return _sample_block(rows, prompt_mask, output_counts)
    # The last block begins early enough to be a whole one.
    starts = np.minimum(np.arange(0, num_rows, BLOCK_ROWS), num_rows - BLOCK_ROWS)
    block = np.arange(num_rows) // BLOCK_ROWS

    def sample_block(start: Array) -> Sampled:
        of_block = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, BLOCK_ROWS), rows)
        return _sample_block(of_block, prompt_mask, output_counts)

    def sample_blocks() -> Sampled:
        sampled = lax.map(sample_block, jnp.asarray(starts))
        return jax.tree.map(lambda x: x[block, np.arange(num_rows) - starts[block]], sampled)

    changed = reduce(jnp.logical_or, _changed(batch)).any()
    return lax.cond(
        changed | batch.wants_logprobs.any(),
        sample_blocks,
        lambda: Sampled(_argmax(logits), *_no_logprobs(num_rows)),  # which needs no copies of a block
    )


def sample_shared(
    axis: str,
    logits: Array,
    batch: SamplingBatch,
    prompt_mask: Array,
    output_counts: Array,
    slots: Array,
) -> Sampled:
    """`sample` by the devices along a mesh axis, each of its part of the rows; all get all of the results."""

    def sample_part(*args: Any) -> Sampled:
        return jax.tree.map(lambda x: lax.all_gather(x, axis, tiled=True), sample(*args))

    rows, whole = PartitionSpec(axis), PartitionSpec()
    return jax.shard_map(
        sample_part,
        in_specs=(rows, rows, whole, whole, rows),
        out_specs=whole,
        axis_names={axis},
        check_vma=False,
    )(logits, batch, prompt_mask, output_counts, slots)


def _changed(batch: SamplingBatch) -> tuple[Array, Array, Array, Array]:
    """[S] bool each: rows that are drawn, penalised, biased, and whose stop ids are held back."""
    return (
        batch.column("temperature") >= MIN_TEMPERATURE,
        (batch.column("repetition_penalty") != 1.0)
        | (batch.column("presence_penalty") != 0.0)
        | (batch.column("frequency_penalty") != 0.0),
        jnp.any(batch.bias_values != 0.0, axis=1),
        batch.column("hold_stops") != 0,
    )


def _sample_block(
    rows: tuple[Array, SamplingBatch, Array], prompt_mask: Array, output_counts: Array
) -> Sampled:
    """`sample` of rows (logits, batch, slots) at once."""
    logits, batch, slots = rows
    random, penalised, biased, held = _changed(batch)

    def general(logits: Array) -> Array:
        logits = lax.cond(
            penalised.any(),
            lambda x: _penalise(x, batch, _rows_of(prompt_mask, slots), _rows_of(output_counts, slots)),
            lambda x: x,
            logits,
        )
        logits = lax.cond((biased | held).any(), lambda x: _bias(x, batch, held), lambda x: x, logits)
        return lax.cond(random.any(), lambda x: _draw(x, batch, random), _argmax, logits)

    # One condition around all of it: each inner one that is not taken still copies the logits.
    token_ids = lax.cond((random | penalised | biased | held).any(), general, _argmax, logits)
    logprobs = lax.cond(
        batch.wants_logprobs.any(),
        lambda x: token_logprobs(x, token_ids),
        lambda x: _no_logprobs(x.shape[0]),
        logits,
    )
    return Sampled(token_ids, *logprobs)


def _rows_of(x: Array, rows: Array) -> Array:
    """x[rows], on a TPU one by one: its gather of a few rows reads all of x."""

    def one_by_one(x: Array, rows: Array) -> Array:
        return lax.map(lambda row: lax.dynamic_index_in_dim(x, row, keepdims=False), rows)

    return lax.platform_dependent(x, rows, tpu=one_by_one, default=lambda x, rows: x[rows])


def _no_logprobs(num_rows: int) -> tuple[Array, Array, Array, Array]:
    """As `token_logprobs` returns them."""
    return (
        jnp.zeros((num_rows,), jnp.float32),
        jnp.zeros((num_rows,), jnp.int32),
        jnp.zeros((num_rows, MAX_LOGPROBS), jnp.int32),
        jnp.zeros((num_rows, MAX_LOGPROBS), jnp.float32),
    )


def token_logprobs(logits: Array, token_ids: Array) -> tuple[Array, Array, Array, Array]:
    """Log-probabilities under the softmax of `logits`, for sampled tokens and for a prompt's.

    Args:
      logits: [R, V] float32.
      token_ids: [R] int32.

    Returns:
      The token's log-probability [R] float32; its rank [R] int32, 1 + the number of likelier tokens;
      the likeliest MAX_LOGPROBS ids, or V where that is less, padded with id 0 [R, MAX_LOGPROBS] int32;
      and theirs, padded with -inf [R, MAX_LOGPROBS] float32.
    """
    k = min(MAX_LOGPROBS, logits.shape[-1])
    top, top_ids = lax.top_k(logits, k)
    peak = jnp.max(logits, axis=-1, keepdims=True)  # of top[:, :1], XLA's CPU compiler makes a full sort
    norm = peak + jnp.log(jnp.sum(jnp.exp(logits - peak), axis=-1, keepdims=True))  # [R, 1]
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)  # [R, 1]
    rank = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    pad = ((0, 0), (0, MAX_LOGPROBS - k))
    top_logprobs = jnp.pad(top - norm, pad, constant_values=-jnp.inf)
    return (chosen - norm)[:, 0], rank, jnp.pad(top_ids.astype(jnp.int32), pad), top_logprobs


def update_counts(output_counts: Array, slots: Array, token_ids: Array, valid: Array) -> Array:
    """Counts sampled tokens; in place where output_counts is donated.

    Args:
      output_counts: [N, V] int32.
      slots: [S] int32.
      token_ids: [S] int32.
      valid: [S] bool, False for padded rows.
    """
    rows = jnp.where(valid, slots, output_counts.shape[0])
    return output_counts.at[rows, token_ids].add(1, mode="drop")


def set_counts(
    prompt_mask: Array,
    output_counts: Array,
    slot: Array,
    token_ids: Array,
    num_prompt: Array,
    num_total: Array,
) -> tuple[Array, Array]:
    """Sets a slot's state from its tokens, at (re)admission; in place where donated.

    Args:
      prompt_mask: [N, V] bool.
      output_counts: [N, V] int32.
      slot: int32 scalar.
      token_ids: [L] int32, the sequence's tokens, padded with whatever.
      num_prompt: int32 scalar, tokens of the prompt.
      num_total: int32 scalar, tokens of prompt and output.
    """
    vocab_size = prompt_mask.shape[1]
    index = lax.iota(jnp.int32, token_ids.shape[0])
    prompt = jnp.where(index < num_prompt, token_ids, vocab_size)
    output = jnp.where((index >= num_prompt) & (index < num_total), token_ids, vocab_size)
    mask = jnp.zeros((vocab_size,), jnp.bool_).at[prompt].set(True, mode="drop")
    counts = jnp.zeros((vocab_size,), jnp.int32).at[output].add(1, mode="drop")
    return prompt_mask.at[slot].set(mask), output_counts.at[slot].set(counts)


def _argmax(x: Array) -> Array:
    """[S] int32, the lowest index of each row's maximum; some valid index for a row that holds NaN.

    0.6 ms on the CPU for S = 32 and V = 49,152, where jnp.argmax, a reduction of pairs, takes 4.6, and
    comparing the whole row with its maximum takes 1.2: what is as large as x is read once, not written.
    """
    num_rows, size = x.shape
    if size <= 2 * ARGMAX_BLOCK:
        return _argmax_short(x)
    padding = -size % ARGMAX_BLOCK
    if padding:
        x = jnp.pad(x, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    blocks = x.reshape(num_rows, -1, ARGMAX_BLOCK)
    block = _argmax_short(jnp.max(blocks, axis=2))  # [S]
    inside = _argmax_short(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0])
    return jnp.minimum(block * ARGMAX_BLOCK + inside, size - 1)


def _argmax_short(x: Array) -> Array:
    """`_argmax` by comparing the row with its maximum."""
    index = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    at_peak = x == jnp.max(x, axis=1, keepdims=True)
    return jnp.min(jnp.where(at_peak, index, x.shape[1] - 1), axis=1)


def _penalise(logits: Array, batch: SamplingBatch, prompt_mask: Array, output_counts: Array) -> Array:
    """Repetition (Keskar et al. 2019, arXiv:1909.05858), then OpenAI's frequency and presence. [S, V]."""
    repetition = batch.column("repetition_penalty")[:, None]
    seen = prompt_mask | (output_counts > 0)
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, scaled, logits)
    logits -= batch.column("frequency_penalty")[:, None] * output_counts
    return logits - batch.column("presence_penalty")[:, None] * (output_counts > 0)


def _bias(logits: Array, batch: SamplingBatch, held: Array) -> Array:
    """Adds logit_bias, then puts stop ids that are held back to -inf. [S, V]."""
    rows = jnp.arange(logits.shape[0])[:, None]
    logits = logits.at[rows, batch.bias_ids].add(batch.bias_values, mode="drop")
    stop_ids = jnp.where(held[:, None] & (batch.stop_ids >= 0), batch.stop_ids, logits.shape[1])
    return logits.at[rows, stop_ids].set(-jnp.inf, mode="drop")


def _draw(logits: Array, batch: SamplingBatch, random: Array) -> Array:
    """[S] int32: where `random`, a draw after temperature and filters; else the argmax."""
    temperature = jnp.where(random, batch.column("temperature"), 1.0)[:, None]
    top_k = jnp.where(random, batch.column("top_k"), 0)
    top_p = jnp.where(random, batch.column("top_p"), 1.0)
    min_p = jnp.where(random, batch.column("min_p"), 0.0)

    z = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature  # at most 0
    kth = lax.cond((top_k > 0).any(), _kth_largest, lambda _, k: jnp.full(k.shape, -jnp.inf), z, top_k)
    z = jnp.where(z >= jnp.maximum(jnp.log(min_p), kth)[:, None], z, -jnp.inf)
    noisy = jnp.where(random[:, None], z + _gumbel(batch, z.shape[1]), logits)
    return lax.cond(
        (top_p < 1.0).any(), _nucleus_argmax, lambda _, noisy, __: _argmax(noisy), z, noisy, top_p
    )


def _kth_largest(z: Array, k: Array) -> Array:
    """[S] float32, each row's k-th largest value; -inf where k is 0. Exact."""
    size = z.shape[1]
    width = min(MAX_SORTED_TOP_K, size)
    k = jnp.minimum(k, size)

    def by_sorting(z: Array) -> Array:
        top = lax.top_k(z, width)[0]
        return jnp.take_along_axis(top, jnp.maximum(k - 1, 0)[:, None], axis=1)[:, 0]

    value = lax.cond((k <= width).all(), by_sorting, lambda z: _kth_largest_by_bits(z, k), z)
    return jnp.where(k > 0, value, -jnp.inf)


def _kth_largest_by_bits(z: Array, k: Array) -> Array:
    """Binary search over the values' bits, which as integers are ordered as the values are."""

    def ordered(bits: Array) -> Array:  # its own inverse
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)

    keys = ordered(lax.bitcast_convert_type(z, jnp.int32))

    def set_bit(i: Array, threshold: Array) -> Array:
        tried = threshold ^ (jnp.int32(1) << (31 - i))
        enough = jnp.sum(keys >= tried[:, None], axis=1, dtype=jnp.int32) >= k
        return jnp.where(enough, tried, threshold)

    lowest = jnp.full(k.shape, jnp.iinfo(jnp.int32).min, jnp.int32)
    return lax.bitcast_convert_type(ordered(lax.fori_loop(0, 32, set_bit, lowest)), jnp.float32)


def _nucleus_argmax(z: Array, noisy: Array, top_p: Array) -> Array:
    """[S] int32, the argmax of `noisy` over each row's nucleus, which is never computed.

    A token is in the nucleus if the tokens likelier than it hold less than top_p of the mass. So: take the
    argmax over all tokens; if it is outside, so is everything that is no likelier, and the next try is among
    what is likelier. What is found is the argmax over the nucleus, exactly. A round takes
    2 ms for S = 32, V = 49,152, and few are needed; a search of the nucleus's edge by bits takes 33 ms.

    Args:
      z: [S, V] float32, logits at most 0, -inf where filtered out.
      noisy: [S, V] float32, the same with noise.
      top_p: [S] float32.
    """
    weights = _fixed_point_mass(z)

    def mass(chosen: Array) -> Array:
        return jnp.sum(jnp.where(chosen, weights, 0), axis=1, dtype=jnp.uint32).astype(jnp.float32)

    limit = jnp.where(top_p < 1.0, top_p * mass(weights > 0), jnp.inf)

    def round_(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        _, pivot, _ = state
        tried = _argmax(jnp.where(z > pivot[:, None], noisy, -jnp.inf))
        value = jnp.take_along_axis(z, tried[:, None], axis=1)
        above = mass(z > value)
        outside = (above > 0) & (above >= limit)
        # A row that is done keeps its pivot, so that its next argmax is the same.
        return tried, jnp.where(outside, value[:, 0], pivot), outside.any()

    rows = z.shape[0]
    start = (jnp.zeros((rows,), jnp.int32), jnp.full((rows,), -jnp.inf), jnp.bool_(True))
    return lax.while_loop(lambda state: state[2], round_, start)[0]


def _fixed_point_mass(z: Array) -> Array:
    """[S, V] uint32, exp(z) in units so small that a row's sum still fits: at least 2**-31 of the sum.

    For V <= 2**18. What a row's token leaves out by rounding to 0 is 1e-5 of the mass at most (V = 49,152).
    """
    finest = jnp.where(z > -jnp.inf, jnp.exp(z) * 2.0**29 + 0.5, 0.0).astype(jnp.int32).astype(jnp.uint32)
    bound = jnp.sum(finest >> 16, axis=1, dtype=jnp.uint32) + jnp.uint32(2 * z.shape[1])  # in units of 2**16
    excess = 16 - lax.clz(bound).astype(jnp.int32)  # bits of the sum over 32
    shift = jnp.maximum(excess, 0).astype(jnp.uint32)[:, None]
    return (finest + ((jnp.uint32(1) << shift) >> 1)) >> shift


def _gumbel(batch: SamplingBatch, size: int) -> Array:
    """[S, size] float32: jax.random.gumbel(fold_in(key of the row's seed, position), (size,)), bit for bit.

    Written out because on the CPU jax's own loop over the rounds takes 14 ms for S = 32 and
    V = 49,152, and this, one fused pass, 3.
    """
    seed = [lax.bitcast_convert_type(batch.column(name), jnp.uint32) for name in ("seed_high", "seed_low")]
    zero = jnp.uint32(0)
    position = batch.column("position").astype(jnp.uint32)
    high, low = _threefry(seed[0], seed[1], zero, position)  # fold_in
    counter = lax.broadcasted_iota(jnp.uint32, (position.shape[0], size), 1)
    first, second = _threefry(high[:, None], low[:, None], zero, counter)
    mantissa = ((first ^ second) >> 9) | jnp.uint32(0x3F800000)
    uniform = lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0
    return -jnp.log(-jnp.log(jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)))


def _threefry(key_high: Array, key_low: Array, x0: Array, x1: Array) -> tuple[Array, Array]:
    """Threefry-2x32 of 20 rounds (Salmon et al. 2011, Random123), elementwise on uint32."""
    keys = (key_high, key_low, key_high ^ key_low ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << rotation) | (x1 >> (32 - rotation))) ^ x0
        x0, x1 = x0 + keys[(group + 1) % 3], x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1
