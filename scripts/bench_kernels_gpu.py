"""What CUDA's compiler makes of the GPU kernels, and what they read and multiply; no GPU needed.

    .venv/bin/python scripts/bench_kernels_gpu.py [--chip=h100] [--specs=llama-3.1-8b,qwen3-32b]

Needs jax's CUDA plugin, and ptxas and nvdisasm: pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt
nvidia-cuda-nvcc nvidia-cuda-nvdisasm (the first two in jax's version). Compiles for an H100 (sm_90a)
or a B200 (sm_100a).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # what is compiled for no device cannot be read back
    "MOSAIC_GPU_DUMP_PTXAS": "1",
    "MOSAIC_GPU_DUMP_RESOURCES": "1",
    "MOSAIC_GPU_DUMP_SASS": "1",
}

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, SingleDeviceSharding

from jaxinfer.memory.gpu_targets import GPU_TARGETS
from jaxinfer_kernels import (
    AttentionMetadata,
    QueryTiles,
    create_kv_pages,
    create_mla_pages,
    kv_pages_shape,
    mla_paged_attention,
    mla_pages_shape,
    paged_attention,
)
from jaxinfer_kernels.gpu import attention, decode, mla, prefill
from jaxinfer_kernels.gpu.common import MMA_ROWS, Visibility
from jaxinfer_kernels.gpu.splits import make_work_list
from jaxinfer_kernels.gpu.targets import Target, current_target
from jaxinfer_kernels.specs import ATTENTION_SPECS, LATENT_SPECS, AttentionSpec, LatentSpec

MAX_TOKENS = 8192
THREADS = {"decode": 256, "prefill": 384}


def padded_head_dim(spec: AttentionSpec) -> int:
    """Of the pages."""
    return kv_pages_shape(1, 8, 1, spec.head_dim, "gpu")[-1]


def step(spec: AttentionSpec, kind: str, kv_dtype: str) -> tuple[Any, ...]:
    """Abstract arguments of 64 decodes or 4 tiles of prefill, and a pool for 64 sequences of 8192."""
    shape = jax.ShapeDtypeStruct
    num_tiles, width = {"decode": 64, "prefill": 4}[kind], MAX_TOKENS // spec.page_size
    vector = shape((num_tiles,), jnp.int32)
    tiles = QueryTiles(shape((num_tiles, width), jnp.int32), vector, vector)
    num_rows = num_tiles * (1 if kind == "decode" else 128)
    by_kind = (tiles, None) if kind == "decode" else (None, tiles)
    metadata = AttentionMetadata(shape((num_rows,), jnp.int32), *by_kind)
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    sizes = (64 * width, spec.page_size, spec.num_kv_heads, spec.head_dim, kv_dtype, "gpu")
    pages = jax.eval_shape(lambda: create_kv_pages(*sizes))  # type: ignore[arg-type]
    sinks = shape((spec.num_heads,), jnp.float32) if spec.sinks else None
    return (*(shape((num_rows, n, spec.head_dim), jnp.bfloat16) for n in heads), pages, metadata, sinks)


def latent_step(spec: LatentSpec) -> tuple[Any, ...]:
    """Abstract arguments of 64 decodes, and a pool for 64 sequences of 8192."""
    shape = jax.ShapeDtypeStruct
    width = MAX_TOKENS // spec.page_size
    vector = shape((64,), jnp.int32)
    metadata = AttentionMetadata(vector, QueryTiles(shape((64, width), jnp.int32), vector, vector), None)
    sizes = (64 * width, spec.page_size, spec.latent_dim, spec.rope_dim, "bfloat16", "gpu")
    pages = jax.eval_shape(lambda: create_mla_pages(*sizes))  # type: ignore[arg-type]
    dims = (spec.latent_dim, spec.rope_dim)
    queries = [shape((64, spec.num_heads, dim), jnp.bfloat16) for dim in dims]
    return (*queries, *(shape((64, dim), jnp.bfloat16) for dim in dims), pages, metadata)


def attend(spec: AttentionSpec) -> Callable[..., Any]:
    options = dict(
        scale=spec.head_dim**-0.5,
        sliding_window=spec.sliding_window,
        attention_chunk=spec.attention_chunk,
        soft_cap=spec.soft_cap,
        backend="gpu",
    )

    def run(q: Any, k: Any, v: Any, pages: Any, metadata: Any, sinks: Any) -> Any:
        return paged_attention(q, k, v, pages, metadata, sinks=sinks, **options)

    return run


def describe(chip: str) -> Any:
    """A device that is not there."""
    target = dict(target_config=GPU_TARGETS[chip], topology="1x1x1")
    return topologies.get_topology_desc(chip, platform="cuda", **target).devices[0]


def lowering_for(chip: Any) -> Any:
    """The context to lower kernels for a device in: Mosaic takes its compute capability from there."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("chip",), abstract_device=chip))


def target_of(chip: Any) -> Target:
    with lowering_for(chip):
        return current_target()


def compile_step(chip: Any, run: Callable[..., Any], args: tuple[Any, ...], pages: int) -> tuple[Any, str]:
    """The executable for a chip, and what the compilers wrote to stdout meanwhile.

    The argument at `pages` is donated.
    """
    placed = SingleDeviceSharding(chip)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), args)
    stdout = os.dup(1)
    with tempfile.TemporaryFile("w+") as log:
        os.dup2(log.fileno(), 1)
        try:
            with lowering_for(chip):
                traced = jax.jit(run, donate_argnums=pages).trace(*args)
                executable = traced.lower(lowering_platforms=("cuda",)).compile()
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
        log.seek(0)
        return executable, log.read()


def report(chip: Any, spec: AttentionSpec, kind: str, kv_dtype: str, logs: dict[str, str]) -> dict[str, Any]:
    """One row of the table, quantised pages of 32 tokens at least."""
    if jnp.dtype(kv_dtype).itemsize == 1:
        spec = replace(spec, page_size=max(spec.page_size, 32))
    args = step(spec, kind, kv_dtype)
    row = measure(chip, attend(spec), args, 3, THREADS[kind], logs)
    count = decode_bytes if kind == "decode" else prefill_flops
    excess = count(target_of(chip), spec, kv_dtype)
    return dict(spec=spec.name, kernel=kind, kv_dtype=kv_dtype, **row, excess=excess)


def latent_report(chip: Any, spec: LatentSpec, logs: dict[str, str]) -> dict[str, Any]:
    """One row of the table: decode of latent attention."""
    run = partial(mla_paged_attention, scale=1.0, backend="gpu")
    row = measure(chip, run, latent_step(spec), 4, THREADS["decode"], logs)
    excess = latent_bytes(target_of(chip), spec)
    return dict(spec=spec.name, kernel="mla", kv_dtype="bfloat16", **row, excess=excess)


def measure(
    chip: Any, run: Callable[..., Any], args: tuple[Any, ...], pages: int, threads: int, logs: dict[str, str]
) -> dict[str, Any]:
    """What the compiler says of one step, of which the argument at `pages` is written in place.

    `logs` by kernel: the compiler is silent about one that it has had before.
    """
    executable, log = compile_step(chip, run, args, pages)
    (kernel_hash,) = re.findall(r'kernel_hash = "(.*?)", module', executable.as_text())
    log = logs.setdefault(kernel_hash, log)
    memory, pool = executable.memory_analysis(), jax.tree.leaves(args[pages])
    copied = "|".join(re.escape(",".join(map(str, leaf.shape))) for leaf in pool)
    (registers,) = re.findall(r"Used (\d+) registers", log)
    ((stores, loads),) = re.findall(r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    (smem,) = re.findall(r"smem_scratch_bytes=(\d+)", log)
    by_registers = 65536 // (-(-int(registers) // 8) * 8 * threads)
    return dict(
        registers=int(registers),
        spill_bytes=int(stores) + int(loads),
        smem_bytes=int(smem),
        blocks_per_sm=min(by_registers, 233472 // (int(smem) + 1024)),
        mmas=log.count("HGMMA") + log.count("UTCHMMA"),
        tma_loads=log.count("UTMALDG"),
        kernels=executable.as_text().count('custom_call_target="mosaic_gpu'),
        pool_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in pool),
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        pool_copies=len(re.findall(rf"\[({copied})\][^ ]* copy\(", executable.as_text())),
    )


def decode_bytes(target: Target, spec: AttentionSpec, kv_dtype: str) -> float:
    """Bytes moved at 64 sequences of 4096 over those of K and V that the queries see, the heads' own."""
    length, num_rows = 4096, 64
    visibility = Visibility(spec.sliding_window, spec.attention_chunk)
    first = int(visibility.first(jnp.int32(length - 1)))
    pages = -(-length // spec.page_size) - first // spec.page_size
    size = jnp.dtype(kv_dtype).itemsize
    scales = 4 if size == 1 else 0
    token = 2 * spec.num_kv_heads * (padded_head_dim(spec) * size + scales)
    lens = jnp.full(num_rows, length, jnp.int32)
    work = make_work_list(lens, MAX_TOKENS, visibility, target.rows)
    head_dim = padded_head_dim(spec)
    rows = target.value_rows((head_dim, 2 * head_dim))
    columns = target.columns * -(-spec.num_heads // spec.num_kv_heads // target.columns)
    results = spec.num_heads * (rows[-1].stop - rows[0].start + decode.SKEW) + spec.num_kv_heads * columns
    results *= 4 * 2  # written and read
    moved = num_rows * pages * spec.page_size * token + int(work.num_items[0]) * results
    needed = 2 * spec.num_kv_heads * (spec.head_dim * size + scales) * (length - first) * num_rows
    return round(moved / needed, 3)


def latent_bytes(target: Target, spec: LatentSpec) -> float:
    """As `decode_bytes`; all blocks of heads but the first find the rows in L2."""
    length, num_rows = 4096, 64
    *_, width = mla_pages_shape(1, spec.page_size, spec.latent_dim, spec.rope_dim, "gpu")
    lens, splits = jnp.full(num_rows, length, jnp.int32), mla.MIN_SPLIT_TOKENS
    work = make_work_list(lens, MAX_TOKENS, Visibility(None, None), target.rows, min_split_tokens=splits)
    results = spec.num_heads * (spec.latent_dim + decode.SKEW + 1) * 4 * 2
    moved = num_rows * length * width * 2 + int(work.num_items[0]) * results
    return round(moved / (num_rows * length * (spec.latent_dim + spec.rope_dim) * 2), 3)


def prefill_flops(target: Target, spec: AttentionSpec, kv_dtype: str) -> float:
    """Products issued over products needed, for a chunk of 512 that ends at 8192, the heads' padding too."""
    visibility = Visibility(spec.sliding_window, spec.attention_chunk)
    head_dim = padded_head_dim(spec)
    itemsize = jnp.dtype(kv_dtype).itemsize
    kv_tile, _ = attention.prefill_launch(target, head_dim, spec.page_size, visibility, itemsize)
    tops = jnp.arange(8192 - 512, 8192, MMA_ROWS, dtype=jnp.int32)
    blocks = tops // 128 * 128
    begin = visibility.first(blocks) // kv_tile * kv_tile
    first, _, _, end = prefill.seen_tiles(visibility, kv_tile, begin, tops, tops + MMA_ROWS)
    issued = int((end - first).sum()) * kv_tile * MMA_ROWS * head_dim
    positions = np.arange(8192 - 512, 8192)
    seen = positions - np.asarray(visibility.first(jnp.asarray(positions))) + 1
    return round(issued / (int(seen.sum()) * spec.head_dim), 3)


def main() -> None:
    names = [spec.name for spec in (*ATTENTION_SPECS, *LATENT_SPECS)]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chip", default="h100", choices=("h100", "h200", "b200"))
    parser.add_argument("--specs", default="llama-3.1-8b,qwen3-32b", help=f"of {', '.join(names)}; or all")
    parser.add_argument("--kv_dtypes", default="bfloat16")
    parser.add_argument("--json", help="writes the table here too")
    args = parser.parse_args()
    chip = describe(args.chip)
    wanted = names if args.specs == "all" else args.specs.split(",")
    columns = ("registers", "spill_bytes", "smem_bytes", "blocks_per_sm", "mmas", "tma_loads", "excess")
    print(f"{'spec':24}{'kernel':9}{'cache':15}" + "".join(f"{name:>15}" for name in columns))
    rows: list[dict[str, Any]] = []
    logs: dict[str, str] = {}

    def add(row: dict[str, Any]) -> None:
        rows.append(dict(chip=args.chip) | row)
        line = "".join(f"{row[name]:>15}" for name in columns)
        print(f"{row['spec']:24}{row['kernel']:9}{row['kv_dtype']:15}{line}", flush=True)

    for spec in ATTENTION_SPECS:
        for kv_dtype in args.kv_dtypes.split(","):
            for kind in ("decode", "prefill"):
                if spec.name in wanted:
                    add(report(chip, spec, kind, kv_dtype, logs))
    for spec in LATENT_SPECS:
        if spec.name in wanted:
            add(latent_report(chip, spec, logs))
    print("excess: decode, bytes moved over bytes seen; prefill, products issued over products needed")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
