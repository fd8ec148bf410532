"""A plan becomes padded arrays: the only place that knows padding and buckets. numpy alone, no device.

Each data-parallel group has a batch of its own, all of one bucket; a step's arrays are the groups'
batches one after another, and rows, slots and pages are numbered within the group.

Dims, of a group: S decode rows, R prefill tiles of B = prefill_tile rows, C = R * B, T = S + C tokens,
M sampled rows, P pages a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxinfer.config import CacheConfig, SchedulerConfig, padded_rows
from jaxinfer.memory.ledger import page_table_width
from jaxinfer.ops.sampling import SamplingBatch, SamplingRows
from jaxinfer.types import ScheduledSeq, StepPlan
from jaxinfer_kernels import AttentionMetadata, QueryTiles


@dataclass(frozen=True, order=True)
class Bucket:
    """The shape of a step: rows for decodes and rows for prefill, padding included."""

    num_decodes: int
    num_prefill_rows: int

    @property
    def num_rows(self) -> int:
        return self.num_decodes + self.num_prefill_rows


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "token_ids",
        "positions",
        "attention",
        "decode_slots",
        "sample_rows",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class StepBatch:
    """The model's input, as a pytree of numpy or jax arrays, of a group or of all.

    Attributes:
      token_ids: [T] int32; those of decode rows are in the slots, and 0 here.
      positions: [T] int32, -1 for padding.
      attention: which rows are whose, and their pages.
      decode_slots: [S] int32, the slot of each decode row.
      sample_rows: [M] int32, the rows whose logits are sampled.
    """

    token_ids: Any
    positions: Any
    attention: AttentionMetadata
    decode_slots: Any
    sample_rows: Any


@dataclass(frozen=True)
class BuiltStep:
    """A plan as arrays for the device.

    Attributes:
      batch: the model's input.
      sample_slots: [M] int32, the slots of the rows that are sampled; padding has the last slot.
      sampling: how to sample them.
      target_ids: [C] int32, the token after each prefill row, where a prompt asks for
        log-probabilities; else None.
      sampled: the sequences that sample, each with its row among the M of all groups.
      prefills: the sequences that prefill, each with its first row among the C of all groups.
    """

    batch: StepBatch
    sample_slots: np.ndarray
    sampling: SamplingBatch
    target_ids: np.ndarray | None
    sampled: tuple[tuple[int, ScheduledSeq], ...]
    prefills: tuple[tuple[int, ScheduledSeq], ...]


def make_buckets(config: SchedulerConfig) -> tuple[Bucket, ...]:
    """Every shape that a step can have under this configuration; a closed set.

    A start reads or compiles each, so they are few: 1, 4, 8, 16 ... max_step_seqs rows of decodes
    alone; 2, 4, 8 ... tiles of prefill alone; and, with room for all decodes, 4, 16 ... tiles of
    prefill. The largest of each is what the configuration allows.
    """
    tile = config.prefill_tile
    most = config.max_num_batched_tokens // tile * tile
    decodes = [Bucket(size, 0) for size in decode_sizes(config.max_step_seqs)]
    prefills = [Bucket(0, size) for size in _sizes(2 * tile, most, factor=2)]
    mixed = [Bucket(config.max_step_seqs, size) for size in _sizes(4 * tile, most, factor=4)]
    # A sequence alone never decodes while it prefills, but one group may while another does.
    alone = config.max_step_seqs * config.num_groups == 1
    return (*decodes, *prefills, *(() if alone else mixed))


def decode_sizes(max_step_seqs: int) -> list[int]:
    """The numbers of rows that are decoded or sampled at once; 2 rows cost what 4 cost."""
    return [1, *_sizes(4, max_step_seqs, factor=2)] if max_step_seqs > 1 else [1]


def _sizes(first: int, last: int, *, factor: int) -> list[int]:
    """first, first * factor ... below `last`, then `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return [*sizes, last]


class StepBatcher:
    """Builds the batch of each plan."""

    def __init__(self, config: SchedulerConfig, cache: CacheConfig) -> None:
        self._max_step_seqs = config.max_step_seqs
        self._tile = config.prefill_tile
        self._groups = [_GroupBatcher(config, cache) for _ in range(config.num_groups)]
        self.buckets = make_buckets(config)
        self.sample_sizes = decode_sizes(config.max_step_seqs)
        self.prefill_sizes = sorted({bucket.num_prefill_rows for bucket in self.buckets} - {0})

    def bucket(self, plan: StepPlan) -> Bucket:
        """The smallest bucket that holds the plan of every group."""
        decodes, rows = [0] * len(self._groups), [0] * len(self._groups)
        for seq in plan.decodes:
            decodes[seq.group] += 1
        for seq in plan.prefills:
            rows[seq.group] += padded_rows(seq.num_tokens, self._tile)
        return next(
            b
            for b in self.buckets
            if b.num_decodes >= max(decodes)
            and b.num_prefill_rows >= max(rows)
            and (b.num_prefill_rows > 0) == (max(rows) > 0)
        )

    def num_samples(self, bucket: Bucket) -> int:
        """M: room for each decode and for the end of each chunk, which has a tile to itself."""
        most = min(bucket.num_decodes + bucket.num_prefill_rows // self._tile, self._max_step_seqs)
        return next(size for size in self.sample_sizes if size >= most)

    def build(self, plan: StepPlan, bucket: Bucket) -> BuiltStep:
        """The plan's arrays, all fresh: the device may read them after this returns."""
        num_samples = self.num_samples(bucket)
        wants_targets = any(s.sequence.request.params.prompt_logprobs is not None for s in plan.prefills)
        if len(self._groups) == 1:
            return self._groups[0].build(plan.decodes, plan.prefills, bucket, num_samples, wants_targets)
        steps = []
        for index, group in enumerate(self._groups):
            decodes = tuple(seq for seq in plan.decodes if seq.group == index)
            prefills = tuple(seq for seq in plan.prefills if seq.group == index)
            steps.append(group.build(decodes, prefills, bucket, num_samples, wants_targets))
        return _side_by_side(steps)

    def neutral_sampling(self, size: int) -> SamplingBatch:
        """The sampling of `size` rows a group that are all padding."""
        none = np.zeros(0, np.int32)
        parts = [group.sampling_rows.gather(none, none, none, size) for group in self._groups]
        return parts[0] if len(parts) == 1 else _concatenate(parts)


def _side_by_side(steps: list[BuiltStep]) -> BuiltStep:
    """The groups' steps as one."""
    num_samples = len(steps[0].sample_slots)
    num_prefill_rows = len(steps[0].batch.token_ids) - len(steps[0].batch.decode_slots)
    targets = [step.target_ids for step in steps if step.target_ids is not None]
    return BuiltStep(
        batch=_concatenate([step.batch for step in steps]),
        sample_slots=np.concatenate([step.sample_slots for step in steps]),
        sampling=_concatenate([step.sampling for step in steps]),
        target_ids=np.concatenate(targets) if targets else None,
        sampled=tuple(
            (g * num_samples + row, seq) for g, step in enumerate(steps) for row, seq in step.sampled
        ),
        prefills=tuple(
            (g * num_prefill_rows + row, seq) for g, step in enumerate(steps) for row, seq in step.prefills
        ),
    )


def _concatenate(parts: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


class _GroupBatcher:
    """Builds a group's batch. Keeps on the host what stays the same from step to step."""

    def __init__(self, config: SchedulerConfig, cache: CacheConfig) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._tile = config.prefill_tile
        self._page_size = cache.page_size
        self.sampling_rows = SamplingRows(config.max_num_seqs)
        width = page_table_width(config.max_model_len, cache.page_size)
        self._page_table = np.zeros((config.max_num_seqs, width), np.int32)
        self._num_pages = [0] * config.max_num_seqs  # entries of the table that are a slot's own

    def build(
        self,
        decodes: tuple[ScheduledSeq, ...],
        prefills: tuple[ScheduledSeq, ...],
        bucket: Bucket,
        num_samples: int,
        wants_targets: bool,
    ) -> BuiltStep:
        """The arrays of the group's part of a plan; `wants_targets` is for `target_ids`."""
        for seq in decodes + prefills:
            self._update_slot(seq)
        num_tiles = bucket.num_prefill_rows // self._tile
        token_ids = np.zeros(bucket.num_rows, np.int32)
        positions = np.full(bucket.num_rows, -1, np.int32)
        write_index = np.zeros(bucket.num_rows, np.int32)
        decode, decode_slots = self._build_decodes(decodes, bucket.num_decodes, positions, write_index)

        tile_slots = np.zeros(num_tiles, np.int32)
        start = np.zeros(num_tiles, np.int32)
        kv_len = np.zeros(num_tiles, np.int32)
        row, tile = bucket.num_decodes, 0
        samples = list(enumerate(decodes))
        first_rows = []
        for seq in prefills:
            end = seq.start + seq.num_tokens
            at = np.arange(seq.start, end, dtype=np.int32)
            rows = slice(row, row + seq.num_tokens)
            token_ids[rows] = seq.token_ids
            positions[rows] = at
            write_index[rows] = self._write_index(seq.slot, at)
            starts = np.arange(seq.start, end, self._tile)
            tiles = slice(tile, tile + len(starts))
            tile_slots[tiles] = seq.slot
            start[tiles] = starts
            kv_len[tiles] = np.minimum(starts + self._tile, end)
            if seq.samples:
                samples.append((row + seq.num_tokens - 1, seq))
            first_rows.append(row - bucket.num_decodes)
            row += len(starts) * self._tile
            tile += len(starts)
        prefill = QueryTiles(self._page_table[tile_slots], start, kv_len) if num_tiles else None  # type: ignore[arg-type]

        rows = [i for i, _ in samples]
        sampled = tuple(seq for _, seq in samples)
        slots, sampling = self._build_sampling(sampled, num_samples)
        sample_rows = np.zeros(len(slots), np.int32)
        sample_rows[: len(rows)] = rows
        attention = AttentionMetadata(write_index, decode, prefill)  # type: ignore[arg-type]
        batch = StepBatch(token_ids, positions, attention, decode_slots, sample_rows)
        started = tuple(zip(first_rows, prefills, strict=True))
        targets = _target_ids(started, bucket.num_prefill_rows) if wants_targets else None
        return BuiltStep(batch, slots, sampling, targets, tuple(enumerate(sampled)), started)

    def _update_slot(self, seq: ScheduledSeq) -> None:
        """Takes over what is new of a slot: all of it at admission, then pages as they are added."""
        if seq.first:
            sequence = seq.sequence
            self.sampling_rows.set(seq.slot, sequence.request.params, sequence.seed, sequence.stop_ids)
            self._num_pages[seq.slot] = 0
        known = self._num_pages[seq.slot]
        if known < len(seq.page_ids):
            self._page_table[seq.slot, known : len(seq.page_ids)] = seq.page_ids[known:]
            self._num_pages[seq.slot] = len(seq.page_ids)

    def _build_decodes(
        self, decodes: tuple[ScheduledSeq, ...], size: int, positions: np.ndarray, write_index: np.ndarray
    ) -> tuple[QueryTiles | None, np.ndarray]:
        """The decode rows' tiles and slots; fills their positions and write indices."""
        count = len(decodes)
        slots = np.full(size, self._max_num_seqs, np.int32)
        slots[:count] = [seq.slot for seq in decodes]
        positions[:count] = [seq.start for seq in decodes]
        write_index[:count] = self._write_index(slots[:count], positions[:count])
        if not size:
            return None, slots
        page_table = np.zeros((size, self._page_table.shape[1]), np.int32)
        page_table[:count] = self._page_table[slots[:count]]
        start = np.maximum(positions[:size], 0)
        kv_len = np.zeros(size, np.int32)
        kv_len[:count] = start[:count] + 1
        return QueryTiles(page_table, start, kv_len), slots  # type: ignore[arg-type]

    def _build_sampling(
        self, sampled: tuple[ScheduledSeq, ...], size: int
    ) -> tuple[np.ndarray, SamplingBatch]:
        """The slots of the sequences that sample, padded, and how to sample them."""
        count = len(sampled)
        slots = np.full(size, self._max_num_seqs, np.int32)
        slots[:count] = [seq.slot for seq in sampled]
        positions = np.array([seq.start + seq.num_tokens for seq in sampled], np.int32)
        prompts = np.array([seq.sequence.num_prompt_tokens for seq in sampled], np.int32)
        return slots, self.sampling_rows.gather(slots[:count], positions, positions - prompts, size)

    def _write_index(self, slot: int | np.ndarray, positions: np.ndarray) -> np.ndarray:
        page_ids = self._page_table[slot, positions // self._page_size]
        return page_ids * self._page_size + positions % self._page_size


def _target_ids(prefills: tuple[tuple[int, ScheduledSeq], ...], num_rows: int) -> np.ndarray:
    """[C] int32: the token that follows each prefill row in its prompt."""
    target_ids = np.zeros(num_rows, np.int32)
    for row, seq in prefills:
        targets = seq.sequence.token_ids[seq.start + 1 : seq.start + 1 + seq.num_tokens]
        target_ids[row : row + len(targets)] = targets
    return target_ids
