#!/usr/bin/env python3
"""What the attention kernels move and compute, counted without an accelerator: a table, and JSON.

For the TPU, at Llama-3.1-8B's and Qwen3-32B's shapes:

- bytes that decode's copies move, over the bytes of the pages in use;
- FLOPs that prefill issues, over those that are needed, at chunks of 512 up to a context of 8k;
- bundles, about cycles, of the loop over blocks that the chip's compiler scheduled, against the cycles
  that a block's bytes take at the chip's bandwidth; beside the jax wheel's ragged_paged_attention.

The first two run the kernels interpreted, on as few heads and sequences as show the ratio. The last needs
libtpu. `--only=bytes,flops,cycles` runs a part; `--json_out=FILE` writes the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from jaxinfer_kernels import AttentionMetadata, KVPages, QueryTiles, create_kv_pages
from jaxinfer_kernels.specs import ATTENTION_SPECS, AttentionSpec
from jaxinfer_kernels.tpu import attention, attention_decode, attention_pipeline, attention_prefill

SPECS = {spec.name: spec for spec in ATTENTION_SPECS}
SHAPES = ("llama-3.1-8b", "qwen3-32b")
PAGE, CONTEXT, SEQUENCES, CHUNK = 128, 4096, 64, 512
CHIPS = {"v5e": (819e9, 1.5e9), "v6e": (1640e9, 1.75e9)}  # bytes a second, cycles a second (cloud.google.com)


# --- Counted in the interpreted kernels -----------------------------------------------------------


class Counted:
    """A copy that counts its bytes whenever it is started."""

    def __init__(self, copy: Any, size: int, counts: dict[str, int]) -> None:
        self._copy, self._size, self._counts = copy, size, counts

    def start(self) -> None:
        jax.debug.callback(self._add)
        self._copy.start()

    def wait(self) -> None:
        self._copy.wait()

    def _add(self) -> None:
        self._counts["bytes"] += self._size


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Counts the bytes of copies and the FLOPs of products in kernels that are traced and run inside."""
    counts = {"bytes": 0, "flops": 0}
    make_copy, matmul = pltpu.make_async_copy, attention_prefill.matmul

    def counted_copy(src: Any, dst: Any, sem: Any) -> Counted:
        return Counted(make_copy(src, dst, sem), int(np.prod(src.shape)) * src.dtype.itemsize, counts)

    def counted_matmul(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
        out = matmul(a, b, contracted)
        flops = 2 * out.size * a.shape[contracted[0]]
        jax.debug.callback(lambda: counts.__setitem__("flops", counts["flops"] + flops))
        return out

    modules = (attention_decode, attention_prefill, attention_pipeline)
    pltpu.make_async_copy = counted_copy
    for module in modules:
        module.matmul = counted_matmul
    try:
        yield counts
        jax.effects_barrier()
    finally:
        pltpu.make_async_copy = make_copy
        for module in modules:
            module.matmul = matmul


def attend(spec: AttentionSpec, metadata: AttentionMetadata, pages: KVPages, dtype: str) -> None:
    rows = metadata.kv_write_index.shape[0]
    q, k, v = (
        jnp.ones((rows, n, spec.head_dim), dtype)
        for n in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    step = jax.jit(
        lambda *args: attention.paged_attention(
            *args,
            None,
            scale=1.0,
            sliding_window=spec.sliding_window,
            attention_chunk=spec.attention_chunk,
            soft_cap=None,
            return_lse=False,
            interpret=True,
        )
    )
    jax.block_until_ready(step(q, k, v, pages, metadata))


def shard(spec: AttentionSpec, window: int | None = None) -> AttentionSpec:
    """One kv head of it: ratios are a head's."""
    return AttentionSpec(spec.name, spec.num_heads // spec.num_kv_heads, 1, spec.head_dim, window)


def decode_bytes(name: str) -> dict[str, Any]:
    """Sequences of 4k, and of whatever length, of which the last page is in use in part."""
    spec, lens = SPECS[name], np.array([CONTEXT, CONTEXT - 77, CONTEXT // 2 + 1])
    spec = AttentionSpec(name, spec.num_heads // spec.num_kv_heads * 2, 2, spec.head_dim)
    width = CONTEXT // PAGE
    pages = create_kv_pages(len(lens) * width + 1, PAGE, 2, spec.head_dim, "bfloat16", "tpu")
    table = 1 + np.arange(len(lens) * width, dtype=np.int32).reshape(len(lens), width)
    ints = [jnp.asarray(x, jnp.int32) for x in (lens - 1, lens)]
    metadata = AttentionMetadata(ints[0], QueryTiles(jnp.asarray(table), *ints), None)
    with counting() as counts:
        attend(spec, metadata, pages, "bfloat16")
    used = int((-(-lens // PAGE)).sum()) * pages.data[0].nbytes
    row = len(lens) * spec.head_dim * 2
    blocks = 2 * spec.num_heads * row + 2 * 2 * row * 2 + 2 * table.nbytes  # q, out; new K, V as f32; tables
    return dict(what="decode bytes moved / in use", shape=name, value=(counts["bytes"] + blocks) / used)


def prefill_flops(name: str, window: int | None) -> dict[str, Any]:
    """All chunks of a prompt of 8k. The interpreter runs the loops; how many blocks they pass is counted."""
    spec = shard(SPECS[name], window)
    context, tile = 8192, 128
    pages = create_kv_pages(context // PAGE + 1, PAGE, 1, spec.head_dim, "bfloat16", "tpu")
    table = jnp.arange(1, context // PAGE + 1, dtype=jnp.int32)[None]
    issued = needed = 0
    for start in range(0, context, CHUNK):
        starts = jnp.arange(start, start + CHUNK, tile, dtype=jnp.int32)
        tables = jnp.tile(table, (len(starts), 1))
        rows = jnp.arange(start, start + CHUNK, dtype=jnp.int32)
        metadata = AttentionMetadata(rows, None, QueryTiles(tables, starts, starts + tile))
        with counting() as counts:
            attend(spec, metadata, pages, "bfloat16")
        issued += counts["flops"]
        seen = np.arange(start, start + CHUNK) + 1
        seen = seen if window is None else np.minimum(seen, window)
        needed += int(4 * seen.sum() * spec.num_heads * spec.head_dim)
    what = "prefill FLOPs issued / needed" + ("" if window is None else f", window {window}")
    return dict(what=what, shape=name, value=issued / needed)


# --- From the chip's compiler ---------------------------------------------------------------------


def compile_decode(chip: str, name: str, kernel: str) -> None:
    """In a process of its own, whose environment has the compiler dump what it schedules."""
    from jax.experimental import topologies
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    spec, width = SPECS[name], CONTEXT // PAGE
    topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{chip}:2x2")
    mesh = Mesh(np.array(topology.devices[:1]), ("x",))
    place = NamedSharding(mesh, PartitionSpec())

    def array(*shape: int, dtype: str = "bfloat16") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def ints(*shape: int) -> Any:
        return array(*shape, dtype="int32")

    q, k = (array(SEQUENCES, n, spec.head_dim) for n in (spec.num_heads, spec.num_kv_heads))
    pages = SEQUENCES * width + 1
    if kernel == "wheel":
        pool = array(pages, PAGE, 2 * spec.num_kv_heads, spec.head_dim)
        step = lambda *args: ragged_paged_attention(  # noqa: E731
            *args, num_kv_pages_per_block=WHEEL_PAGES, num_queries_per_block=32, vmem_limit_bytes=64 << 20
        )
        tables = (ints(SEQUENCES), ints(SEQUENCES, width), ints(SEQUENCES + 1), ints(1))
        jax.jit(step).lower(q, pool, *tables).compile()
        return
    pool = jax.eval_shape(lambda: create_kv_pages(pages, PAGE, *k.shape[1:], "bfloat16", "tpu"))
    metadata = AttentionMetadata(
        ints(SEQUENCES), QueryTiles(ints(SEQUENCES, width), ints(SEQUENCES), ints(SEQUENCES)), None
    )
    step = lambda *args: attention.paged_attention(  # noqa: E731
        *args,
        None,
        scale=1.0,
        sliding_window=None,
        attention_chunk=None,
        soft_cap=None,
        return_lse=False,
        interpret=False,
    )
    kv_pages = KVPages(array(*pool.data.shape), None)
    jax.jit(step, donate_argnums=3).lower(q, k, k, kv_pages, metadata).compile()


WHEEL_PAGES = 8  # with 32 queries a block: of the wheel's own tuned sizes for 32 heads and 8 kv heads


def block_loop(listing: str) -> int:
    """Bundles of the innermost loop that holds all products, what it calls counted once."""
    loops: list[list[int]] = []  # depth, bundles, products
    found: list[list[int]] = []
    for line in listing.splitlines():
        match = re.match(r"\s*0x[0-9a-f]+\s*(\w\w)?\s*:\s*(>*)\s*\{(.*)", line)
        if not match:
            continue
        label, depth, code = match[1], len(match[2]), match[3]
        if depth or code.strip() != "}":
            while loops and (depth < loops[-1][0] or (label == "LB" and depth == loops[-1][0])):
                found.append(loops.pop())
            if label == "LB":
                loops.append([depth, 0, 0])
        for loop in loops:
            loop[1] += 1
            loop[2] += code.count("vmatmul")
    found += loops
    most = max(loop[2] for loop in found)
    return min(loop[1] for loop in found if loop[2] == most)


def decode_cycles(chip: str, name: str, kernel: str) -> dict[str, Any]:
    spec = SPECS[name]
    with tempfile.TemporaryDirectory() as directory:
        flags = f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true"
        environment = dict(
            LIBTPU_INIT_ARGS=flags,
            TPU_SKIP_MDS_QUERY="1",
            ALLOW_MULTIPLE_LIBTPU_LOAD="1",
            JAX_PLATFORMS="cpu",
        )
        subprocess.run(
            [sys.executable, __file__, f"--compile={chip},{name},{kernel}"],
            env={**os.environ, **environment},
            check=True,
            stderr=subprocess.DEVNULL,
        )
        listings = [
            path
            for path in Path(directory).glob("*paged_attention*final_bundles.txt")
            if "schedule" not in path.name
        ]
        bundles = block_loop(listings[0].read_text())
    tokens = 512 if kernel == "ours" else WHEEL_PAGES * PAGE
    bandwidth, clock = CHIPS[chip]
    memory = tokens * spec.num_kv_heads * 2 * spec.head_dim * 2 / bandwidth * clock
    what = f"decode cycles of a block / of its bytes, {chip}, {kernel} ({bundles} for {tokens} tokens)"
    return dict(what=what, shape=name, value=bundles / memory)


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
            rows += [prefill_flops(name, window) for window in (None, 1024, 4096)]
        if "cycles" in parts:
            rows += [decode_cycles(chip, name, kernel) for chip in CHIPS for kernel in ("ours", "wheel")]
    for row in rows:
        print(f"{row['shape']:14} {row['what']:80} {row['value']:.3f}")
    if args.json_out:
        args.json_out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
