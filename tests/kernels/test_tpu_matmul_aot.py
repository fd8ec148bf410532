"""Matmuls compiled by the TPU's real compiler, with no device: what it fuses, and what the kernels save."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer_kernels import grouped_matmul, quantized_matmul

pytest.importorskip("libtpu", reason="libtpu, the TPU's compiler, is not installed")
pytestmark = pytest.mark.aot

chips = pytest.mark.parametrize("chip", ["v5e", "v6e"])
D, F = 4096, 14336  # Llama-3.1-8B's gate
SMALL = 2**20


@pytest.fixture(autouse=True)
def _no_metadata_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def compile_for(chip: str, function: Callable[..., jax.Array], *operands: tuple[Any, ...]) -> Any:
    """operands: shapes, each with its dtype as the last entry. For one device of the chip."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{chip}:2x2")
    sharding = NamedSharding(Mesh(np.array(topology.devices[:1]), ("x",)), PartitionSpec())
    arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for *shape, dtype in operands]
    cached = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot read a TPU's executables here
    try:
        return jax.jit(function).lower(*arrays).compile()
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)


def largest_fusion_cycles(compiled: Any) -> int:
    entry = compiled.as_text().split("ENTRY", 1)[1]
    return max(int(cycles) for cycles in re.findall(r'"estimated_cycles":"(\d+)"', entry))


@chips
def test_channels_scales_need_no_expanded_weights(chip: str) -> None:
    """No temporaries but the rows' own, and the cycles of bfloat16 weights; int8 by int8 takes fewer."""
    rows = (512, D, "bfloat16")

    def plain(lhs: jax.Array, weight: jax.Array) -> jax.Array:
        return (lhs @ weight.T).astype(lhs.dtype)

    of_bfloat16 = largest_fusion_cycles(compile_for(chip, plain, rows, (F, D, "bfloat16")))
    for dtype in ("int8", "int4", "float8_e4m3fn"):
        compiled = compile_for(chip, quantized_matmul, rows, (F, D, dtype), (F, "float32"))
        assert compiled.memory_analysis().temp_size_in_bytes < SMALL, dtype
        assert largest_fusion_cycles(compiled) < 1.1 * of_bfloat16, dtype

    def both(lhs: jax.Array, weights: jax.Array, scales: jax.Array) -> jax.Array:
        return quantized_matmul(lhs, weights, scales, quantize_lhs=True)

    compiled = compile_for(chip, both, rows, (F, D, "int8"), (F, "float32"))
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 512 * D
    assert largest_fusion_cycles(compiled) < 0.6 * of_bfloat16


def in_groups(num_rows: int, group_size: int) -> tuple[tuple[Any, ...], ...]:
    return (num_rows, D, "bfloat16"), (D, F, "int4"), (D // group_size, F, "float32")


@chips
@pytest.mark.parametrize(
    ("num_rows", "group_size", "kernels"),
    [(8, 128, 0), (8, 32, 1), (512, 32, 1), (512, 64, 1), (512, 128, 1)],
)
def test_weights_in_groups_are_not_expanded_in_hbm(
    chip: str, num_rows: int, group_size: int, kernels: int
) -> None:
    """By the kernel or, for few rows, by a product a group."""
    compiled = compile_for(chip, quantized_matmul, *in_groups(num_rows, group_size))
    assert compiled.memory_analysis().temp_size_in_bytes < SMALL
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == kernels


def test_xla_alone_expands_them() -> None:
    """Why there is a kernel: 2 bytes a weight. If this fails, see whether it is still worth it."""
    compiled = compile_for("v5e", partial(quantized_matmul, backend="xla"), *in_groups(512, 128))
    assert compiled.memory_analysis().temp_size_in_bytes >= 2 * D * F


@chips
@pytest.mark.parametrize(
    ("num_rows", "num_groups", "num_inputs", "num_outputs"),
    [(1024, 8, 14336, 4096), (128, 128, 2048, 1536), (4096, 128, 768, 2048)],
)
def test_experts_are_not_copied(
    chip: str, num_rows: int, num_groups: int, num_inputs: int, num_outputs: int
) -> None:
    """Mixtral's and Qwen3-30B-A3B's products; lax.ragged_dot transposes all the matrices first."""
    operands = (
        (num_rows, num_inputs, "bfloat16"),
        (num_groups, num_outputs, num_inputs, "bfloat16"),
        (num_groups, "int32"),
    )
    compiled = compile_for(chip, grouped_matmul, *operands)
    assert compiled.memory_analysis().temp_size_in_bytes < SMALL
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 1
