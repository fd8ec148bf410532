#!/usr/bin/env python3
"""Makes kernels/jaxinfer_kernels/data/CHIP.json: block sizes of the TPU's kernels, for some models.

    .venv/bin/python scripts/tune_kernels.py [--chips=v5e,v6e] [--models=llama-3.1-8b] [--ops=int4_matmul]

On a TPU it times each candidate (and `--chips` is not given). Elsewhere it ranks them by what the chip's
compiler schedules, which needs libtpu: bundles, about cycles, of a loop's body over its products. A schedule
says nothing of how long copies take, so that sizes of buffers are left as they are.

No candidate changes a result: how sums are associated (attention's compute_tokens, the inputs of a matmul's
block) is never tuned, and tests/kernels/test_tuning.py holds what is committed to that.
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tuning_cases import SCHEDULED, SPECS, Case, Sizes, find_cases

from jaxinfer_kernels.tuning import chip_name, current_chip

DATA = Path(__file__).parents[1] / "kernels" / "jaxinfer_kernels" / "data"
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
MODELS = ("llama-3.1-8b", "qwen3-32b", "mixtral-8x7b", "qwen3-30b-a3b")
LAUNCHES, RUNS = 20, 5


# --- On a device ----------------------------------------------------------------------------------


def milliseconds(case: Case, sizes: Sizes) -> tuple[float, str]:
    """Of a launch, the median of several runs; and the key of the sizes."""
    asked = case.use(sizes)

    def array(shape: tuple[int, ...], dtype: Any, value: Any = None) -> jax.Array:
        return jnp.ones(shape, dtype) if value is None else jnp.asarray(value, dtype)

    args = case.arguments(array)
    step, times = case.step(), []
    for _ in range(RUNS + 1):  # the first compiles
        start_s, out = time.perf_counter(), None
        for _ in range(LAUNCHES):
            out, args[case.in_place] = step(*args)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start_s) / LAUNCHES * 1e3)
    return statistics.median(times[1:]), asked[0]


# --- By the compiler ------------------------------------------------------------------------------


def compile_step(chip: str, case: Case, sizes: Sizes) -> None:
    """In a process whose environment has the compiler dump what it schedules; prints file name and key."""
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    mesh = Mesh(np.array(topology.devices[:1]), ("x",))
    place = NamedSharding(mesh, PartitionSpec())
    asked = case.use(sizes)
    abstract = lambda shape, dtype, _=None: jax.ShapeDtypeStruct(shape, dtype, sharding=place)  # noqa: E731
    with jax.set_mesh(mesh):
        case.step().lower(*case.arguments(abstract)).compile()
    print(json.dumps([chip_name(topology.devices[0].device_kind), asked[0]]))


def bundles_a_product(chip: str, case: Case, sizes: Sizes) -> tuple[float, str, str]:
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
        argument = json.dumps([chip, asdict(case), sizes])
        command = [sys.executable, __file__, f"--compile={argument}"]
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(done.stderr.strip().splitlines()[-1][:200], file=sys.stderr)
            return float("inf"), "", ""
        listings = [
            path
            for path in Path(directory).glob(f"*{case.op}*final_bundles.txt")
            if "schedule" not in path.name
        ]
        name, key = json.loads(done.stdout.splitlines()[-1])
        return loop_cost(listings[0].read_text(), case, sizes), name, key


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


def loop_cost(listing: str, case: Case, sizes: Sizes) -> float:
    """Bundles a product: of decode's loop over KV, prefill's over heads and rows, a matmul's over blocks.

    Decode's is the innermost with all products that waits for copies; where the heads are a loop in it, the
    listing has that one's body once. Prefill's is much longer than what surrounds it.
    """
    loops = [loop for loop in find_loops(listing) if loop[2]]
    if case.op != "paged_attention_decode":
        return min(bundles / products for _, bundles, products, _ in loops)
    most = max(products for _, _, products, _ in loops)
    inner = min(bundles for _, bundles, products, _ in loops if products == most)
    block = min(bundles for _, bundles, products, waits in loops if products == most and waits)
    num_kv_heads = SPECS[case.model].num_kv_heads
    trips = num_kv_heads // math.gcd(num_kv_heads, sizes["unroll"])
    return (block + (trips - 1) * inner) / (most * trips)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chips", default="v5e,v6e", help=f"of {', '.join(TOPOLOGIES)}; without a TPU")
    parser.add_argument("--models", default=",".join(MODELS), help="of specs.py and tuning_cases.py")
    parser.add_argument("--ops", default=",".join(SCHEDULED), help="all unless given")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        chip, case, sizes = json.loads(args.compile)
        compile_step(chip, Case(**case), sizes)
        return
    timed = jax.default_backend() == "tpu"
    tables: dict[str, dict[str, dict[str, Sizes]]] = {}
    cases = find_cases(args.ops.split(","), args.models.split(","))
    for chip, case in itertools.product([current_chip()] if timed else args.chips.split(","), cases):
        costs: list[tuple[float, Sizes, str, str]] = []
        for sizes in case.candidates(timed=timed):
            if timed:
                cost, key = milliseconds(case, sizes)
                name = chip
            else:
                cost, name, key = bundles_a_product(chip, case, sizes)
            costs.append((cost, sizes, name, key))
            unit = "ms" if timed else "bundles a product"
            print(f"{chip:8}{case.op:25}{key:38}{cost:10.3f} {unit}  {sizes}", flush=True)
        cost, best, name, key = min(costs, key=lambda cost: cost[0])
        if not math.isfinite(cost):
            sys.exit(f"{case} does not compile for {chip}")
        tables.setdefault(name, {}).setdefault(case.op, {})[key] = best
    DATA.mkdir(exist_ok=True)
    for name, table in tables.items():
        path = DATA / f"{name}.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        merged = {op: known.get(op, {}) | table.get(op, {}) for op in sorted(known.keys() | table.keys())}
        path.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
