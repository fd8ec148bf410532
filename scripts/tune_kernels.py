#!/usr/bin/env python3
"""Makes kernels/jaxinfer_kernels/data/CHIP.json: block sizes of the TPU's attention kernels, for some models.

    .venv/bin/python scripts/tune_kernels.py [--chips=v5e,v6e] [--shapes=llama-3.1-8b,qwen3-32b]

On a TPU it times each candidate (and `--chips` is not given). Elsewhere it ranks them by what the chip's
compiler schedules, which needs libtpu: bundles, about cycles, of a block of KV over its products. A schedule
says nothing of how long copies take, so that sizes of buffers are left as they are.

No candidate changes a result: how sums are associated (compute_tokens) is never tuned, and
tests/kernels/test_tuning.py holds what is committed to that.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer_kernels import AttentionMetadata, KVPages, QueryTiles, kv_pages_shape, paged_attention
from jaxinfer_kernels.specs import ATTENTION_SPECS, AttentionSpec
from jaxinfer_kernels.tpu import attention
from jaxinfer_kernels.tuning import chip_name, current_chip

DATA = Path(__file__).parents[1] / "kernels" / "jaxinfer_kernels" / "data"
SPECS = {spec.name: spec for spec in ATTENTION_SPECS}
PAGE, SEQUENCES, CONTEXT, CHUNK, TILE = 128, 64, 4096, 512, 128
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
# What a schedule can rank, and what only a clock can.
SCHEDULED = {
    "paged_attention_decode": {"unroll": (8, 4, 2)},
    "paged_attention_prefill": {"compute_rows": (512, 256, 1024)},
}
TIMED = {
    "paged_attention_decode": {"unroll": (8, 4), "num_buffers": (3, 4, 6), "sequences": (8, 4, 16)},
    "paged_attention_prefill": {"compute_rows": (512, 256, 1024), "num_buffers": (3, 4, 6)},
}
LAUNCHES, RUNS = 20, 5
Sizes = dict[str, int]


def candidates(op: str, *, timed: bool) -> list[Sizes]:
    """All combinations; the kernel's defaults come first."""
    choices = (TIMED if timed else SCHEDULED)[op]
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def use(op: str, sizes: Sizes) -> list[str]:
    """Has the kernels take these sizes, for all keys of the op; returns the keys that they ask for."""
    asked: list[str] = []

    def tuned(name: str, key: str) -> Sizes:
        if name != op:
            return {}
        asked.append(key)
        return sizes

    attention.tuned = tuned
    return asked


def step_arguments(spec: AttentionSpec, op: str, array: Any) -> tuple[Any, ...]:
    """64 decodes of 4096 tokens, or a chunk of 512 that ends there; `array` makes an argument of a shape."""
    width = CONTEXT // PAGE
    sequences, rows = (SEQUENCES, SEQUENCES) if op.endswith("decode") else (1, CHUNK)
    num_tiles = SEQUENCES if op.endswith("decode") else CHUNK // TILE
    pages = np.tile(1 + np.arange(sequences * width).reshape(sequences, width), (num_tiles // sequences, 1))
    ends = np.full(num_tiles, CONTEXT)
    if not op.endswith("decode"):
        ends = np.arange(CONTEXT - CHUNK, CONTEXT, TILE) + TILE
    starts = ends - rows // num_tiles
    tiles = QueryTiles(*(array(x.shape, jnp.int32, x) for x in (pages, starts, ends)))
    index = array((rows,), jnp.int32, np.arange(rows) + PAGE)
    by_kind = (tiles, None) if op.endswith("decode") else (None, tiles)
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    shape = kv_pages_shape(sequences * width + 1, PAGE, spec.num_kv_heads, spec.head_dim, "tpu")
    qkv = [array((rows, n, spec.head_dim), jnp.bfloat16) for n in heads]
    return (*qkv, KVPages(array(shape, jnp.bfloat16), None), AttentionMetadata(index, *by_kind))


def make_step(spec: AttentionSpec) -> Any:
    return jax.jit(partial(paged_attention, scale=spec.head_dim**-0.5, backend="tpu"), donate_argnums=3)


# --- On a device ----------------------------------------------------------------------------------


def milliseconds(spec: AttentionSpec, op: str, sizes: Sizes) -> tuple[float, str]:
    """Of a launch, the median of several runs; and the key of the sizes."""
    asked = use(op, sizes)
    make = lambda shape, dtype, value=None: (  # noqa: E731
        jnp.ones(shape, dtype) if value is None else jnp.asarray(value, dtype)
    )
    *qkv, pages, metadata = step_arguments(spec, op, make)
    step, times = make_step(spec), []
    for _ in range(RUNS + 1):  # the first compiles
        start_s = time.perf_counter()
        for _ in range(LAUNCHES):
            _, pages = step(*qkv, pages, metadata)
        jax.block_until_ready(pages)
        times.append((time.perf_counter() - start_s) / LAUNCHES * 1e3)
    return statistics.median(times[1:]), asked[0]


# --- By the compiler ------------------------------------------------------------------------------


def compile_step(chip: str, spec: AttentionSpec, op: str, sizes: Sizes) -> None:
    """In a process whose environment has the compiler dump what it schedules; prints file name and key."""
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    mesh = Mesh(np.array(topology.devices[:1]), ("x",))
    place = NamedSharding(mesh, PartitionSpec())
    asked = use(op, sizes)
    abstract = lambda shape, dtype, _=None: jax.ShapeDtypeStruct(shape, dtype, sharding=place)  # noqa: E731
    with jax.set_mesh(mesh):
        make_step(spec).lower(*step_arguments(spec, op, abstract)).compile()
    print(json.dumps([chip_name(topology.devices[0].device_kind), asked[0]]))


def bundles_a_product(chip: str, spec: AttentionSpec, op: str, sizes: Sizes) -> tuple[float, str, str]:
    """The cost, the chip's file name and the key of the sizes; infinite where it does not compile."""
    with tempfile.TemporaryDirectory() as directory:
        environment = dict(
            LIBTPU_INIT_ARGS=f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true "
            "--xla_jf_dump_llo_pass_label_regex=final_bundles",
            TPU_SKIP_MDS_QUERY="1",
            ALLOW_MULTIPLE_LIBTPU_LOAD="1",
            JAX_PLATFORMS="cpu",
            JAX_ENABLE_COMPILATION_CACHE="false",
        )
        argument = json.dumps([chip, spec.name, op, sizes])
        command = [sys.executable, __file__, f"--compile={argument}"]
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(done.stderr.strip().splitlines()[-1][:200], file=sys.stderr)
            return float("inf"), "", ""
        listings = [
            path
            for path in Path(directory).glob("*paged_attention*final_bundles.txt")
            if "schedule" not in path.name
        ]
        name, key = json.loads(done.stdout.splitlines()[-1])
        return loop_cost(listings[0].read_text(), spec, sizes), name, key


def find_loops(listing: str) -> list[list[int]]:
    """Depth, bundles, products and waits for copies of each loop, those in it counted once.

    A line is a bundle; `LB` marks the first of a loop's body, and `>`s its depth.
    """
    loops: list[list[int]] = []
    found: list[list[int]] = []
    for line in listing.splitlines():
        match = re.match(r"\s*0x[0-9a-f]+\s*(\w\w)?\s*:\s*(>*)\s*\{(.*)", line)
        if not match:
            continue
        label, depth, code = match[1], len(match[2]), match[3].lstrip()
        if depth or not code.startswith("}"):  # an empty bundle has no depth
            while loops and (depth < loops[-1][0] or (label == "LB" and depth == loops[-1][0])):
                found.append(loops.pop())
            if label == "LB":
                loops.append([depth, 0, 0, 0])
        for loop in loops:
            loop[1] += 1
            loop[2] += code.count("vmatmul")
            loop[3] += code.count("dma.done.wait")
    return found + loops


def loop_cost(listing: str, spec: AttentionSpec, sizes: Sizes) -> float:
    """Bundles a product: of decode's loop over blocks of KV, and of prefill's loop over heads and rows.

    Decode's is the innermost with all products that waits for copies; where the heads are a loop in it, the
    listing has that one's body once. Prefill's is much longer than what surrounds it.
    """
    loops = [loop for loop in find_loops(listing) if loop[2]]
    if "compute_rows" in sizes:
        return min(bundles / products for _, bundles, products, _ in loops)
    most = max(products for _, _, products, _ in loops)
    inner = min(bundles for _, bundles, products, _ in loops if products == most)
    block = min(bundles for _, bundles, products, waits in loops if products == most and waits)
    trips = spec.num_kv_heads // math.gcd(spec.num_kv_heads, sizes["unroll"])
    return (block + (trips - 1) * inner) / (most * trips)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chips", default="v5e,v6e", help=f"of {', '.join(TOPOLOGIES)}; without a TPU")
    parser.add_argument("--shapes", default="llama-3.1-8b,qwen3-32b", help="of specs.py")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        chip, shape, op, sizes = json.loads(args.compile)
        compile_step(chip, SPECS[shape], op, sizes)
        return
    timed = jax.default_backend() == "tpu"
    tables: dict[str, dict[str, dict[str, Sizes]]] = {}
    for chip, shape, op in itertools.product(
        [current_chip()] if timed else args.chips.split(","), args.shapes.split(","), SCHEDULED
    ):
        spec = replace(SPECS[shape], page_size=PAGE)
        costs: list[tuple[float, Sizes, str, str]] = []
        for sizes in candidates(op, timed=timed):
            if timed:
                cost, key = milliseconds(spec, op, sizes)
                name = chip
            else:
                cost, name, key = bundles_a_product(chip, spec, op, sizes)
            costs.append((cost, sizes, name, key))
            print(
                f"{chip:8}{shape:16}{op:26}{cost:10.3f} {'ms' if timed else 'bundles a product'}  {sizes}",
                flush=True,
            )
        cost, best, name, key = min(costs, key=lambda cost: cost[0])
        if not math.isfinite(cost):
            sys.exit(f"{op} does not compile for {chip} and {shape}")
        tables.setdefault(name, {}).setdefault(op, {})[key] = best
    DATA.mkdir(exist_ok=True)
    for name, table in tables.items():
        path = DATA / f"{name}.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        merged = {op: known.get(op, {}) | table.get(op, {}) for op in sorted(known.keys() | table.keys())}
        path.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
