#!/usr/bin/env python3
"""What the TPU's attention kernels move and compute, counted without an accelerator: a table, and JSON.

At Llama-3.1-8B's and Qwen3-32B's shapes:

- bytes: those that decode's copies move, over the bytes of the pages in use;
- flops: those that prefill issues, over those that are needed, in chunks of 512 up to a context of 8k;
- cycles: of decode with 64 sequences of 4k, about the bundles of the loop over blocks that the chip's
  compiler scheduled, against the cycles that the pages' bytes take at the chip's bandwidth; beside the jax
  wheel's ragged_paged_attention. A loop in that loop, such as the one that starts copies, counts once.

The first two run the kernels interpreted, on as few heads and sequences as show the ratio. The last needs
libtpu. `--only=bytes,flops,cycles` runs a part; `--json_out=FILE` writes the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tune_kernels import find_loops

from jaxinfer_kernels import (
    AttentionMetadata,
    KVPages,
    QueryTiles,
    create_kv_pages,
    kv_pages_shape,
    paged_attention,
    prefill_tile_tokens,
)
from jaxinfer_kernels.specs import ATTENTION_SPECS, AttentionSpec
from jaxinfer_kernels.tpu import attention_body, attention_softmax

Row = dict[str, Any]

SPECS = {spec.name: spec for spec in ATTENTION_SPECS}
SHAPES = ("llama-3.1-8b", "qwen3-32b")
PAGE, CONTEXT, SEQUENCES, CHUNK = 128, 4096, 64, 512
WINDOWS = (None, 4096, 1024, 512)  # of Mistral, Gemma 3 and its smallest sizes
CHIPS = {"v5e": (819e9, 1.5e9), "v6e": (1638e9, 1.75e9)}  # bytes a second, cycles a second (cloud.google.com)
WHEEL_PAGES, WHEEL_QUERIES = 8, 32  # a block, as the wheel's own table has for 32 heads on 8 on both chips
DUMP = "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"


# --- Counted in the interpreted kernels -----------------------------------------------------------


class Counted:
    """A copy that counts its bytes whenever it is started."""

    def __init__(self, copy: Any, size: int, counted: list[int]) -> None:
        self._copy, self._size, self._counted = copy, size, counted

    def start(self) -> None:
        jax.debug.callback(lambda: self._counted.append(self._size))
        self._copy.start()

    def wait(self) -> None:
        self._copy.wait()


@contextmanager
def counting_bytes() -> Iterator[list[int]]:
    """The bytes of each copy that a kernel starts which is traced and run inside."""
    make_copy, counted = pltpu.make_async_copy, []

    def counting_copy(src: Any, dst: Any, sem: Any) -> Counted:
        return Counted(make_copy(src, dst, sem), int(np.prod(src.shape)) * src.dtype.itemsize, counted)

    pltpu.make_async_copy = counting_copy
    try:
        yield counted
        jax.effects_barrier()
    finally:
        pltpu.make_async_copy = make_copy


@contextmanager
def counting_flops() -> Iterator[list[int]]:
    """The FLOPs of each product of a kernel that is traced and run inside; products give zeros."""
    modules, counted = (attention_softmax, attention_body), []
    matmul = attention_softmax.matmul

    def counting_matmul(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
        assert contracted[0] == 1
        (rows, depth), columns = a.shape, b.size // a.shape[1]
        jax.debug.callback(lambda: counted.append(2 * rows * depth * columns))
        zeros = a[:, :1].astype(jnp.float32) * 0  # no constants, which XLA would take long to fold
        return jnp.broadcast_to(zeros, (rows, columns))

    for module in modules:
        module.matmul = counting_matmul
    try:
        yield counted
        jax.effects_barrier()
    finally:
        for module in modules:
            module.matmul = matmul


def attention_step(spec: AttentionSpec) -> Any:
    """A compiled function of metadata and pages, for queries of ones, that interprets the kernels."""

    def step(metadata: AttentionMetadata, pages: KVPages) -> KVPages:
        rows = metadata.kv_write_index.shape[0]
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        q, k, v = (jnp.ones((rows, n, spec.head_dim), "bfloat16") for n in heads)
        return paged_attention(
            *(q, k, v, pages, metadata),
            scale=1.0,
            sliding_window=spec.sliding_window,
            backend="tpu",
            interpret=True,
        )[1]

    return jax.jit(step)


def decode_bytes(name: str) -> Row:
    """Sequences of 4k, and of whatever length, of which the last page is in use in part."""
    spec, lens = SPECS[name], np.array([CONTEXT, CONTEXT - 77, CONTEXT // 2 + 1])
    spec = AttentionSpec(name, spec.num_heads // spec.num_kv_heads * 2, 2, spec.head_dim)
    width = CONTEXT // PAGE
    pages = create_kv_pages(len(lens) * width + 1, PAGE, 2, spec.head_dim, "bfloat16", "tpu")
    table = 1 + np.arange(len(lens) * width, dtype=np.int32).reshape(len(lens), width)
    ints = [jnp.asarray(x, jnp.int32) for x in (lens - 1, lens)]
    metadata = AttentionMetadata(ints[0], QueryTiles(jnp.asarray(table), *ints), None)
    with counting_bytes() as counted:
        attention_step(spec)(metadata, pages)
    used = int((-(-lens // PAGE)).sum()) * pages.data[0].nbytes
    row = len(lens) * spec.head_dim * 2
    # What the grid brings by itself: queries and outputs, new K and V as f32, each table twice.
    blocks = 2 * spec.num_heads * row + 2 * 2 * row * 2 + 2 * table.nbytes
    return dict(
        what="decode: bytes moved / in use", shape=name, value=(sum(counted) + blocks) / used, limit=1.05
    )


def prefill_flops(name: str, window: int | None) -> Row:
    """All chunks of a prompt of 8k, with one kv head: ratios are a head's."""
    spec = SPECS[name]
    spec = AttentionSpec(name, spec.num_heads // spec.num_kv_heads, 1, spec.head_dim, window)
    context, tile = 8192, prefill_tile_tokens("tpu")
    pages = create_kv_pages(context // PAGE + 1, PAGE, 1, spec.head_dim, "bfloat16", "tpu")
    table = jnp.arange(1, context // PAGE + 1, dtype=jnp.int32)[None]
    tables = jnp.tile(table, (CHUNK // tile, 1))
    with counting_flops() as counted:
        step = attention_step(spec)
        for start in range(0, context, CHUNK):
            starts = jnp.arange(start, start + CHUNK, tile, dtype=jnp.int32)
            rows = jnp.arange(start, start + CHUNK, dtype=jnp.int32)
            pages = step(AttentionMetadata(rows, None, QueryTiles(tables, starts, starts + tile)), pages)
    seen = np.minimum(np.arange(context) + 1, window or context)
    needed = 4 * int(seen.sum()) * spec.num_heads * spec.head_dim
    what = "prefill: FLOPs issued / needed" + ("" if window is None else f", window {window}")
    return dict(what=what, shape=name, value=sum(counted) / needed, limit=1.15)


# --- From the chip's compiler ---------------------------------------------------------------------


def compile_decode(chip: str, name: str, kernel: str) -> None:
    """In a process of its own, whose environment has the compiler dump what it schedules."""
    spec, width = SPECS[name], CONTEXT // PAGE
    topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{chip}:2x2")
    mesh = Mesh(np.array(topology.devices[:1]), ("x",))
    place = NamedSharding(mesh, PartitionSpec())

    def array(*shape: int, dtype: str = "bfloat16") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def ints(*shape: int) -> Any:
        return array(*shape, dtype="int32")

    q, k = (array(SEQUENCES, n, spec.head_dim) for n in (spec.num_heads, spec.num_kv_heads))
    num_pages = SEQUENCES * width + 1
    with jax.set_mesh(mesh):  # both ask which chip it is
        if kernel == "wheel":
            pool = array(num_pages, PAGE, 2 * spec.num_kv_heads, spec.head_dim)
            step = partial(
                ragged_paged_attention,
                num_kv_pages_per_block=WHEEL_PAGES,
                num_queries_per_block=WHEEL_QUERIES,
                vmem_limit_bytes=64 << 20,
            )
            tables = (ints(SEQUENCES), ints(SEQUENCES, width), ints(SEQUENCES + 1), ints(1))
            jax.jit(step).lower(q, pool, *tables).compile()
            return
        shape = kv_pages_shape(num_pages, PAGE, spec.num_kv_heads, spec.head_dim, "tpu")
        tiles = QueryTiles(ints(SEQUENCES, width), ints(SEQUENCES), ints(SEQUENCES))
        metadata = AttentionMetadata(ints(SEQUENCES), tiles, None)
        step = partial(paged_attention, scale=1.0, backend="tpu")
        args = (q, k, k, KVPages(array(*shape), None), metadata)
        jax.jit(step, donate_argnums=3).lower(*args).compile()


def block_loop(listing: str) -> int:
    """Bundles of the innermost loop that holds all products and waits for copies."""
    found = find_loops(listing)
    most = max(products for _, _, products, _ in found)
    return min(bundles for _, bundles, products, waits in found if products == most and waits)


def decode_cycles(chip: str, name: str, kernel: str) -> Row:
    """Of all blocks together, in a compilation of its own."""
    spec = SPECS[name]
    with tempfile.TemporaryDirectory() as directory:
        environment = dict(
            LIBTPU_INIT_ARGS=f"--xla_jf_dump_to={directory} {DUMP}",
            TPU_SKIP_MDS_QUERY="1",
            ALLOW_MULTIPLE_LIBTPU_LOAD="1",
            JAX_PLATFORMS="cpu",
            JAX_ENABLE_COMPILATION_CACHE="false",
        )
        result = subprocess.run(
            [sys.executable, __file__, f"--compile={chip},{name},{kernel}"],
            env={**os.environ, **environment},
            check=False,
            capture_output=True,
            text=True,
        )
        if result.returncode:
            sys.exit(f"{chip}, {name}, {kernel} does not compile:\n{result.stderr[-3000:]}")
        listings = [
            path
            for path in Path(directory).glob("*paged_attention*final_bundles.txt")
            if "schedule" not in path.name
        ]
        bundles = block_loop(listings[0].read_text())
    fetched = 512 if kernel == "ours" else WHEEL_PAGES * PAGE
    cycles = bundles * SEQUENCES * CONTEXT // fetched
    bandwidth, clock = CHIPS[chip]
    size = SEQUENCES * CONTEXT * spec.num_kv_heads * 2 * spec.head_dim * 2
    memory = round(size / bandwidth * clock)
    what = f"decode, {chip}, {kernel}: {cycles} cycles / {memory} for the bytes"
    return dict(what=what, shape=name, value=cycles / memory, limit=1.0, cycles=cycles, memory_cycles=memory)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="bytes,flops,cycles")
    parser.add_argument("--json_out", type=Path)
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        compile_decode(*args.compile.split(","))
        return
    parts, rows = args.only.split(","), []
    for name in SHAPES:
        if "bytes" in parts:
            rows.append(decode_bytes(name))
        if "flops" in parts:
            rows += [prefill_flops(name, window) for window in WINDOWS]
        if "cycles" in parts:
            rows += [decode_cycles(chip, name, kernel) for chip in CHIPS for kernel in ("ours", "wheel")]
    for row in rows:
        print(f"{row['shape']:14} {row['what']:66} {row['value']:6.3f}  (at most {row['limit']})")
    if args.json_out:
        args.json_out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
