"""The KV cache of a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer_kernels.cpu.build import target_name


def unwritten_pages(shape: tuple[int, ...]) -> jax.Array:
    """One layer's pages, float32, holding anything: nobody reads what was not written, and zeros in a GiB of
    them take half a second.
    """
    call = jax.ffi.ffi_call(
        target_name("unwritten"),
        jax.ShapeDtypeStruct(shape, jnp.float32),
        has_side_effect=True,  # so that XLA does not take two layers' for one array
    )
    return call()
