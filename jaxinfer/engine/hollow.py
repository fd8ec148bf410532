"""Programs that take and give what the real ones do, and compute nothing: what is left is the host's work.

On a CPU the thread that launches a program may compute it as well, so neither its wall time nor its
processor time tells what the host alone costs. With these in place of the real ones it does: each call
checks, converts and hands over the same arrays, donates the same ones, and makes results of the same shapes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.engine.programs import Program, Programs


def hollow_programs(programs: Programs) -> Programs:
    """The programs of a step, hollowed out. For one device."""
    return replace(
        programs,
        forward={
            bucket: {index: _hollow(program) for index, program in stages.items()}
            for bucket, stages in programs.forward.items()
        },
        sample={size: _hollow(program) for size, program in programs.sample.items()},
    )


def _hollow(program: Any) -> Program:
    """A compiled program's stand-in: donated arguments come back as they are, other results are zeros."""
    infos, treedef = jax.tree.flatten(program.args_info[0])
    results, out_treedef = jax.tree.flatten(program.out_info)

    def run(*args: Any) -> Any:
        donated = [x for x, info in zip(jax.tree.leaves(args), infos, strict=True) if info.donated]
        return jax.tree.unflatten(out_treedef, [_taken(donated, r.shape, r.dtype) for r in results])

    args = jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(i.shape, i.dtype) for i in infos])
    donate = [n for n, arg in enumerate(program.args_info[0]) if any(i.donated for i in jax.tree.leaves(arg))]
    # jit would leave arguments out that nothing reads.
    return jax.jit(run, donate_argnums=donate, keep_unused=True).lower(*args).compile()


def _taken(donated: list[jax.Array], shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """The first donated array of that kind, which is then used up, or zeros."""
    for n, array in enumerate(donated):
        if (array.shape, array.dtype) == (shape, dtype):
            return donated.pop(n)
    return jnp.zeros(shape, dtype)
