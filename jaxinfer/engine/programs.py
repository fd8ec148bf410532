"""The compiled programs of serving, and the functions that they are compiled from.

A step is a forward pass of the model, then sampling. They are programs apart, so that the forward
pass is compiled for each bucket of rows and sampling only for each number of sampled rows.

A step's function computes one data-parallel group. On a mesh each group runs it on its own part of the
arrays, whose leading dimensions hold the groups' parts one after another.

With pipeline stages each has a forward step of its own, which hands its hidden state to the next one's; the
last has all else. Their programs' names end in the stage. A host has the programs of its own stages, and the
exchanges of several hosts' (engine/handover.py) that it has a part in.

Dims: S decode rows, C prefill rows, T = S + C, M sampled rows, D hidden.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Lowered
from jax.typing import DTypeLike

from jaxinfer.config import CacheConfig, ModelConfig, SchedulerConfig
from jaxinfer.engine.compilation import CompilationCounter, CompileTable
from jaxinfer.engine.handover import LogprobArrays, make_exchanges
from jaxinfer.engine.kv_cache import SlotState, create_kv_pages, create_slots
from jaxinfer.engine.step_batch import Bucket, StepBatch, StepBatcher
from jaxinfer.memory.ledger import PROMPT_LOGPROBS_ROWS
from jaxinfer.models.transformer import AttentionFn, Transformer, head_logits
from jaxinfer.ops.attention import make_attention
from jaxinfer.ops.sampling import (
    Sampled,
    SamplingBatch,
    sample,
    sample_shared,
    set_counts,
    token_logprobs,
    update_counts,
)
from jaxinfer.parallel.mesh import (
    constrain,
    num_groups,
    over_groups,
    page_sharding,
    read_sharding,
    row_sharding,
    rows_axis,
    stages_here,
)
from jaxinfer.types import StepPlan
from jaxinfer_kernels import KVPages

MAX_COMPILE_THREADS = 8  # each may take GBs of the host's memory for a large model
# XLA's CPU compiler would hand products to YNN too, which takes 7% longer for 512 rows.
_CPU_PREFILL_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}

Program = Callable[..., Any]


@dataclass(frozen=True)
class Programs:
    """Every program that serving can need on this host, compiled.

    A call costs the host half a microsecond for each array among its arguments, so that sampling gets
    no more of the model than the head.

    Attributes:
      by_name: all of them.
      forward: by bucket, `decode_step` or `prefill_step` by stage; its first argument is all of the
        stage's leaves.
      sample: by M, `sample_step`; its first argument is the head's weight. Only where the last stage is, as
        the two that follow.
      prompt_logprobs: by C, `prompt_logprobs_step`; likewise.
      set_counts: `set_counts_step`, which has nothing of the model.
      create_state: `create_state` by stage, which has no arguments at all.
    """

    by_name: Mapping[str, Program]
    forward: Mapping[Bucket, Mapping[int, Program]]
    sample: Mapping[int, Program]
    prompt_logprobs: Mapping[int, Program]
    set_counts: Program | None
    create_state: Mapping[int, Program]

    @classmethod
    def of(
        cls, batcher: StepBatcher, by_name: Mapping[str, Program], num_stages: int, here: Sequence[int]
    ) -> Programs:
        """The batcher's shapes, each with the programs of its name of the stages that are `here`."""

        def each(name: str) -> dict[int, Program]:
            return {index: by_name[stage_name(name, index, num_stages)] for index in here}

        def last(name: str) -> Program:
            return by_name[stage_name(name, num_stages - 1, num_stages)]

        samples = num_stages - 1 in here
        return cls(
            by_name=by_name,
            forward={bucket: each(forward_name(bucket)) for bucket in batcher.buckets},
            sample={size: last(sample_name(size)) for size in batcher.sample_sizes if samples},
            prompt_logprobs={rows: last(logprobs_name(rows)) for rows in batcher.prefill_sizes if samples},
            set_counts=last(SET_COUNTS) if samples else None,
            create_state=each(CREATE_STATE),
        )


SET_COUNTS = "set_counts_step"
CREATE_STATE = "create_state"
_STAGE = " stage "


def stage_name(name: str, index: int, num_stages: int) -> str:
    """What the program of a stage is called."""
    return name if num_stages == 1 else f"{name}{_STAGE}{index}"


def stage_index(name: str) -> int:
    """Which stage's program is called so."""
    return int(name.rpartition(_STAGE)[2]) if _STAGE in name else 0


def forward_name(bucket: Bucket) -> str:
    """A decode step by its rows, a prefill step by its rows of decode and of prefill."""
    if bucket.num_prefill_rows:
        return f"prefill_step {bucket.num_decodes}+{bucket.num_prefill_rows}"
    return f"decode_step {bucket.num_decodes}"


def sample_name(size: int) -> str:
    """By the sampled rows."""
    return f"sample_step {size}"


def logprobs_name(rows: int) -> str:
    """By the prefill rows."""
    return f"prompt_logprobs_step {rows}"


def first_needed(batcher: StepBatcher, num_stages: int, here: Sequence[int]) -> list[str]:
    """The programs of the stages `here` that a short prompt by itself needs: of each kind the smallest."""
    prefill = next(bucket for bucket in batcher.buckets if bucket.num_prefill_rows)
    of_each = (CREATE_STATE, forward_name(prefill), forward_name(batcher.buckets[0]))
    names = [stage_name(name, index, num_stages) for name in of_each for index in here]
    if num_stages - 1 in here:
        names.append(stage_name(sample_name(batcher.sample_sizes[0]), num_stages - 1, num_stages))
    return names


def decode_step(
    model: Transformer,
    kv_pages: tuple[KVPages, ...],
    carried: jax.Array,
    batch: StepBatch,
    *,
    attend: AttentionFn,
) -> tuple[tuple[KVPages, ...], jax.Array]:
    """One token of each decode row: the pages, and the hidden state of the sampled rows [M, D].

    The first stage carries on from the slots' last tokens, the next ones from hidden states [D, S]; only
    the last gives the sampled rows.
    """
    stage = model.config.stage
    inputs = carried[batch.decode_slots] if stage.is_first else carried
    hidden, kv_pages = model(inputs, batch.positions, kv_pages, batch.attention, attend)
    return kv_pages, hidden[batch.sample_rows] if stage.is_last else hidden


def prefill_step(
    model: Transformer,
    kv_pages: tuple[KVPages, ...],
    carried: jax.Array,
    batch: StepBatch,
    *,
    attend: AttentionFn,
) -> tuple[tuple[KVPages, ...], jax.Array] | tuple[tuple[KVPages, ...], jax.Array, jax.Array]:
    """Chunks of prompts, and the decodes that ride along: as `decode_step`, with hidden states [D, T] between
    stages. The last gives the prefill rows' hidden state [C, D] too.
    """
    stage = model.config.stage
    num_decodes = batch.decode_slots.shape[0]
    inputs = carried
    if stage.is_first:
        inputs = batch.token_ids.at[:num_decodes].set(carried[batch.decode_slots])
    hidden, kv_pages = model(inputs, batch.positions, kv_pages, batch.attention, attend)
    if not stage.is_last:
        return kv_pages, hidden
    return kv_pages, hidden[batch.sample_rows], hidden[num_decodes:]


def sample_step(
    head: jax.Array,
    slots: SlotState,
    hidden: jax.Array,
    sample_slots: jax.Array,
    sampling: SamplingBatch,
    *,
    config: ModelConfig,
) -> tuple[SlotState, Sampled]:
    """A token of each hidden state [M, D], which its slot keeps."""
    axis = rows_axis(hidden.shape[0])
    sample_slots = constrain(sample_slots)  # else the compiler shares out their other uses too
    logits = head_logits(config, head, hidden, axis)
    sample_rows = sample if axis is None else partial(sample_shared, axis)
    sampled = sample_rows(logits, sampling, slots.prompt_mask, slots.output_counts, sample_slots)
    valid = sample_slots < slots.last_tokens.shape[0] - 1
    counts = update_counts(slots.output_counts, sample_slots, sampled.token_ids, valid)
    last_tokens = slots.last_tokens.at[sample_slots].set(sampled.token_ids)
    return SlotState(last_tokens, slots.prompt_mask, counts), sampled


def prompt_logprobs_step(
    head: jax.Array, hidden: jax.Array, target_ids: jax.Array, *, config: ModelConfig
) -> LogprobArrays:
    """Log-probabilities of the token after each of C rows, some at a time so that logits stay small."""
    rows = PROMPT_LOGPROBS_ROWS
    tiles = (hidden.reshape(-1, rows, hidden.shape[-1]), target_ids.reshape(-1, rows))
    out = jax.lax.map(lambda tile: token_logprobs(head_logits(config, head, tile[0]), tile[1]), tiles)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), out)


def set_counts_step(
    slots: SlotState, slot: jax.Array, token_ids: jax.Array, num_prompt: jax.Array, num_total: jax.Array
) -> SlotState:
    """Sets a slot's counts of tokens at the admission of a sequence with penalties.

    Args:
      slots: of the group.
      slot: int32 [1]; the last slot where the sequence is another group's.
      token_ids: int32 [1, max_model_len], padded with whatever.
      num_prompt: int32 [1], tokens of the prompt.
      num_total: int32 [1], tokens of prompt and output.
    """
    mask, counts = set_counts(
        slots.prompt_mask, slots.output_counts, slot[0], token_ids[0], num_prompt[0], num_total[0]
    )
    return SlotState(slots.last_tokens, mask, counts)


def compile_programs(
    stages: Sequence[Transformer],
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    meshes: Sequence[Mesh | None] = (None,),
    counter: CompilationCounter | None = None,
    made: Mapping[str, Program] = MappingProxyType({}),
) -> Programs:
    """Compiles all that this host needs but those that are `made`, as many at once as there are cores, and
    logs what each took.

    The model's `stages`, one a mesh, may be abstract: only their shapes and shardings are read.
    """
    batcher = StepBatcher(scheduler, cache)
    table = CompileTable(counter or CompilationCounter())
    here = stages_here(meshes)
    exchanges = make_exchanges(batcher, scheduler, stages[0].config.hidden_size, stages[0].dtype, meshes)
    lowerings: dict[str, Callable[[], Lowered]] = {}
    for index in here:
        lowerings |= step_lowerings(
            stages[index], batcher, cache, scheduler, meshes[index], delivers=bool(exchanges)
        )
    lowerings |= {name: exchange.lower for name, exchange in exchanges.items()}
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_COMPILE_THREADS)) as pool:
        futures = {
            name: pool.submit(table.make, name, lambda lower: lower().compile(), lower)
            for name, lower in lowerings.items()
            if name not in made
        }
        compiled = {name: future.result() for name, future in futures.items()}
    table.log(compiled)
    programs = {**made, **compiled}
    return Programs.of(batcher, {name: programs[name] for name in lowerings}, len(stages), here)


def step_lowerings(
    model: Transformer,
    batcher: StepBatcher,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    mesh: Mesh | None = None,
    *,
    delivers: bool = False,
) -> dict[str, Callable[[], Lowered]]:
    """By name, what lowers each program that serving can need of a stage.

    Args:
      model: the stage; may be abstract: only its shapes and shardings are read.
      batcher: of the same cache and limits.
      cache: its size.
      scheduler: limits.
      mesh: the stage's, whose devices need not be there; None is one device that is.
      delivers: whether an exchange brings to the hosts what they read.
    """
    config, stage = model.config, model.config.stage
    rows_lie = None if mesh is None else row_sharding(mesh)
    pages_lie = None if mesh is None else page_sharding(mesh)
    read_lies = rows_lie if mesh is None or delivers else read_sharding(mesh)
    leaves, treedef = jax.tree.flatten(model)
    params = [_abstract(leaf, None if mesh is None else leaf.sharding) for leaf in leaves]
    kv_pages = _abstract(jax.eval_shape(lambda: create_kv_pages(config, cache, mesh)), pages_lie)
    slots = _abstract(jax.eval_shape(lambda: create_slots(config, scheduler.max_num_seqs, mesh)), rows_lie)
    attend = make_attention(mesh, cache.backend)
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform

    def rows(*shape: int, dtype: DTypeLike = np.int32) -> jax.ShapeDtypeStruct:
        whole = (shape[0] * num_groups(mesh), *shape[1:])
        return jax.ShapeDtypeStruct(whole, dtype, sharding=rows_lie)

    def head() -> Any:
        return jax.tree.unflatten(treedef, params).head_weight

    def with_model(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(params: list[jax.Array], *args: Any) -> Any:
            return step(jax.tree.unflatten(treedef, params), *args, attend=attend)

        run.__name__ = step.__name__
        return run

    def with_config(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            return step(*args, config=config)

        run.__name__ = step.__name__
        return run

    def lower_forward(bucket: Bucket) -> Lowered:
        batch = _abstract(batcher.build(StepPlan(0, (), ()), bucket).batch, rows_lie)
        handed = rows(config.hidden_size, bucket.num_rows, dtype=model.dtype)
        args = (params, kv_pages, slots.last_tokens if stage.is_first else handed, batch)
        step = prefill_step if bucket.num_prefill_rows else decode_step
        num_results = 2 if bucket.num_prefill_rows and stage.is_last else 1
        out = (pages_lie, *(rows_lie,) * num_results)
        options = _CPU_PREFILL_OPTIONS if bucket.num_prefill_rows and platform == "cpu" else None
        return _lower(with_model(step), mesh, args, out=out, donate=1, options=options)

    def lower_sample(size: int) -> Lowered:
        sampling = _abstract(batcher.neutral_sampling(size), rows_lie)
        args = (head(), slots, rows(size, config.hidden_size, dtype=model.dtype), rows(size), sampling)
        return _lower(with_config(sample_step), mesh, args, out=(rows_lie, read_lies), donate=1)

    def lower_prompt_logprobs(size: int) -> Lowered:
        args = (head(), rows(size, config.hidden_size, dtype=model.dtype), rows(size))
        return _lower(with_config(prompt_logprobs_step), mesh, args, out=read_lies)

    def lower_set_counts() -> Lowered:
        args = (slots, rows(1), rows(1, scheduler.max_model_len), rows(1), rows(1))
        return _lower(set_counts_step, mesh, args, num_shared=0, out=rows_lie, donate=0)

    def lower_create_state() -> Lowered:
        def create_state() -> tuple[tuple[KVPages, ...], SlotState | None]:
            """The stage's cache, and the last one's slots, which are zeros."""
            slots = create_slots(config, scheduler.max_num_seqs, mesh) if stage.is_last else None
            return create_kv_pages(config, cache, mesh), slots

        return jax.jit(create_state, out_shardings=None if mesh is None else (pages_lie, rows_lie)).lower()

    lowerings: dict[str, Callable[[], Lowered]] = {
        forward_name(bucket): partial(lower_forward, bucket) for bucket in batcher.buckets
    }
    if stage.is_last:
        lowerings |= {
            **{sample_name(size): partial(lower_sample, size) for size in batcher.sample_sizes},
            **{logprobs_name(rows): partial(lower_prompt_logprobs, rows) for rows in batcher.prefill_sizes},
            SET_COUNTS: lower_set_counts,
        }
    lowerings[CREATE_STATE] = lower_create_state
    return {stage_name(name, stage.index, stage.num_stages): lower for name, lower in lowerings.items()}


def _abstract(tree: Any, sharding: NamedSharding | None) -> Any:
    """The shapes of a pytree's arrays, which all lie alike."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def _lower(
    step: Callable[..., Any],
    mesh: Mesh | None,
    args: tuple[Any, ...],
    *,
    out: Any,
    num_shared: int = 1,
    donate: int | tuple[int, ...] = (),
    options: dict[str, Any] | None = None,
) -> Lowered:
    """Lowers a step for abstract arguments.

    Args:
      step: computes one group.
      mesh: of all groups; None is one group on one device.
      args: all groups' arguments.
      out: on a mesh, where the results lie: a sharding for each, or for all.
      num_shared: leading arguments that groups have in common.
      donate: arguments whose memory the results take.
      options: the compiler's.
    """
    if mesh is None:

        def one(*args: Any) -> Any:
            # jax would give the same function's executable again: one that was read from the persistent cache
            # cannot be bundled (compilation.py).
            return step(*args)

        one.__name__ = step.__name__
        return jax.jit(one, donate_argnums=donate, compiler_options=options).lower(*args)
    whole = over_groups(step, mesh, num_shared=num_shared)
    whole.__name__ = step.__name__
    return jax.jit(whole, donate_argnums=donate, out_shardings=out, compiler_options=options).lower(*args)
