"""The generations of GPUs that have kernels, and what differs between them: the products.

Hopper's wgmma multiplies 64 rows at a time and adds up in registers. Blackwell's tcgen05 adds up in a memory
of its own, from which the sums are loaded; both operands lie in shared memory in tiles of the same width.
Beside the product the kernels are the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer_kernels.gpu import BLACKWELL_CAPABILITIES, HOPPER_CAPABILITIES

Ref = Any  # a Pallas reference: jax has no public type for it
Sums = Any  # scratch of products, a pytree of Refs


class Target(ABC):
    """A generation.

    Attributes:
      name: of the generation.
      capabilities: compute capabilities of its chips.
      chips: words of their names.
      num_sms: blocks that run at once, to a small factor.
      rows: what decode puts on a product's M side: the keys of one tile.
      columns: the queries on its N side are a multiple of.
      layout, transposed: of decode's sums in registers, and of its weights as the other operand.
      swizzle_bytes: of prefill's tiles of KV.
      weights_in_registers: whether prefill's weights need no shared memory.
    """

    name: ClassVar[str]
    capabilities: ClassVar[tuple[str, ...]]
    chips: ClassVar[tuple[str, ...]]
    num_sms: ClassVar[int]
    rows: ClassVar[int]
    columns: ClassVar[int]
    layout: ClassVar[Any]
    transposed: ClassVar[Any]
    swizzle_bytes: ClassVar[int]
    weights_in_registers: ClassVar[bool]

    @abstractmethod
    def value_rows(self, values: tuple[int, int]) -> tuple[slice, ...]:
        """Neighbouring columns of a page's row, the values' among them: decode's products of values."""

    @abstractmethod
    def value_columns(self, head_dim: int) -> tuple[slice, ...]:
        """The parts of a value that prefill multiplies, a product each."""

    @abstractmethod
    def sums(self, shape: tuple[int, int], products: int, warpgroups: int = 1) -> Sums:
        """Scratch types for as many products at once, of a warpgroup."""

    @abstractmethod
    def products(
        self, sums: Sums, pairs: Sequence[tuple[Ref, Ref]], warpgroup: Any = 0
    ) -> Iterator[jax.Array]:
        """The f32 products M x K by K x N of pairs in shared memory, which nothing reads after the last."""

    def multiply(self, sums: Sums, a: Ref, b: Ref, warpgroup: Any = 0) -> jax.Array:
        """One of `products`."""
        (product,) = self.products(sums, [(a, b)], warpgroup)
        return product

    def add_products(
        self,
        accs: Sequence[jax.Array],
        sums: Sums,
        pairs: Sequence[tuple[Ref, Ref]],
        warpgroup: Any = 0,
    ) -> tuple[jax.Array, ...]:
        """Each of accs and its pair's product."""
        products = self.products(sums, pairs, warpgroup)
        return tuple(acc + product for acc, product in zip(accs, products, strict=True))


@dataclass(frozen=True)
class Hopper(Target):
    """wgmma, of sm_90a. See `Target`."""

    name = "Hopper"
    capabilities = HOPPER_CAPABILITIES
    chips = ("H100", "H200", "GH200")
    num_sms = 132  # of an H100 SXM and an H200
    rows = 64
    columns = 8
    layout = plgpu.Layout.WGMMA
    transposed = plgpu.Layout.WGMMA_TRANSPOSED
    swizzle_bytes = 128
    weights_in_registers = True

    def value_rows(self, values: tuple[int, int]) -> tuple[slice, ...]:
        return (slice(*values),)

    def value_columns(self, head_dim: int) -> tuple[slice, ...]:
        return (slice(0, head_dim),)

    def sums(self, shape: tuple[int, int], products: int, warpgroups: int = 1) -> Sums:
        return ()

    def products(
        self, sums: Sums, pairs: Sequence[tuple[Ref, Ref]], warpgroup: Any = 0
    ) -> Iterator[jax.Array]:
        for a, b in pairs:

            def accumulate(ref: Ref, a: Ref = a, b: Ref = b) -> jax.Array:
                plgpu.wgmma(ref, a, b)
                return ref[...]

            shape = (a.shape[0], b.shape[1])
            yield pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


@dataclass(frozen=True)
class Blackwell(Target):
    """tcgen05, of sm_100a (the B200; not the consumers' sm_120). See `Target`.

    Decode's products have 128 rows, prefill's 64, a warpgroup's own, which jax divides into two halves of
    their columns: tiles of 64 keys then are 64 bytes wide.
    """

    name = "Blackwell"
    capabilities = BLACKWELL_CAPABILITIES
    chips = ("B200", "GB200")
    num_sms = 148  # of a B200
    rows = 128
    columns = 16
    layout = plgpu.Layout.TCGEN05
    transposed = plgpu.Layout.TCGEN05_TRANSPOSED
    swizzle_bytes = 64
    weights_in_registers = False

    def value_rows(self, values: tuple[int, int]) -> tuple[slice, ...]:
        begin, end = values
        # Heads of 64 and 192 get the columns before theirs too, whose products nobody reads.
        begin = max(0, end - -(-(end - begin) // self.rows) * self.rows)
        return tuple(slice(first, first + self.rows) for first in range(begin, end, self.rows))

    def value_columns(self, head_dim: int) -> tuple[slice, ...]:
        size = 128 if head_dim % 128 == 0 else 64
        return tuple(slice(first, first + size) for first in range(0, head_dim, size))

    def sums(self, shape: tuple[int, int], products: int, warpgroups: int = 1) -> Sums:
        barrier = plgpu.Barrier(num_barriers=warpgroups, orders_tensor_core=True)
        return dict(
            memory=plgpu.TMEM((warpgroups * products, *shape), jnp.float32), done=barrier, loaded=barrier
        )

    def products(
        self, sums: Sums, pairs: Sequence[tuple[Ref, Ref]], warpgroup: Any = 0
    ) -> Iterator[jax.Array]:
        """Starts all of them and waits, and loads each as it is asked for: there are few registers."""
        done, loaded = sums["done"].at[warpgroup], sums["loaded"].at[warpgroup]
        refs = [sums["memory"].at[warpgroup * len(pairs) + index] for index in range(len(pairs))]
        for ref, pair in zip(refs, pairs, strict=True):
            plgpu.tcgen05_mma(ref, *pair, accumulate=False)
        plgpu.tcgen05_commit_arrive(done)
        plgpu.barrier_wait(done)
        layout = self.layout if refs[0].shape[0] == self.rows else plgpu.Layout.WGMMA
        for ref in refs:
            yield plgpu.async_load_tmem(ref, layout=layout)
        # One thread starts the next products, and all have loaded these.
        plgpu.wait_load_tmem()
        plgpu.barrier_arrive(loaded)
        plgpu.barrier_wait(loaded)


TARGETS: tuple[Target, ...] = (Hopper(), Blackwell())


def current_target() -> Target:
    """Of the device that is compiled for, of the mesh that is set or the first; Hopper's where it is no GPU.

    Raises:
      ValueError: it is of another generation.
    """
    device = jax.devices()[0]
    if device.platform != "gpu":
        device = jax.sharding.get_abstract_mesh().abstract_device
        if getattr(device, "platform", None) != "gpu":
            return TARGETS[0]
    capability = getattr(device, "compute_capability", None)  # a mesh of no devices here has none
    for target in TARGETS:
        if capability in target.capabilities or set(device.device_kind.split()) & set(target.chips):
            return target
    known = " and ".join(f"{target.name} ({', '.join(target.capabilities)})" for target in TARGETS)
    raise ValueError(
        f"backend='gpu' has kernels for {known}, and {device.device_kind} is of compute capability "
        f"{capability}: use backend='xla'"
    )
