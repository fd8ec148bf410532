"""The model's attention on a mesh: each device attends with its own heads, to its own part of the pages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxinfer.parallel.mesh import TENSOR
from jaxinfer_kernels import Backend, paged_attention


def make_attention(mesh: Mesh | None, backend: Backend = "xla") -> Callable[..., tuple[jax.Array, Any]]:
    """Paged attention as the model calls it, within a step over `mesh`; the same object for every layer.

    A backend's kernel is interpreted where the devices are not its own.
    """
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    interpret = backend in ("tpu", "gpu") and device.platform != backend
    attend = partial(paged_attention, backend=backend, interpret=interpret)
    return attend if mesh is None else partial(_over_heads, attend)


def _over_heads(
    attend: Callable[..., Any],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_pages: Any,
    metadata: Any,
    **options: Any,
) -> tuple[jax.Array, Any]:
    """`attend` by each device of a group. Heads are dimension 1 of q, k, v and of the pages."""
    heads = PartitionSpec(None, TENSOR)
    return jax.shard_map(
        partial(attend, **options),
        in_specs=(heads, heads, heads, heads, PartitionSpec()),
        out_specs=(heads, heads),
        axis_names={TENSOR},
        check_vma=False,
    )(q, k, v, kv_pages, metadata)
