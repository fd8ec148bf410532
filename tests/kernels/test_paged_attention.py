"""Each backend of paged attention against the plain reference, over random ragged steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxinfer_kernels import Backend
from jaxinfer_kernels.specs import ATTENTION_SPECS, MODEL_SPECS, ODD_SPECS, AttentionSpec
from tests.kernels.attention_cases import BACKENDS, Room, check, make_case

SPECS = {spec.name: spec for spec in ATTENTION_SPECS}
PLAIN = AttentionSpec("plain", 4, 2, 64)

# Interpreted kernels take seconds to compile: their share is slow, but for the kinds of step.
backends = pytest.mark.parametrize(
    "backend", [pytest.param(b, marks=pytest.mark.slow) if b == "tpu" else b for b in BACKENDS]
)
STEPS = {
    "one token": ([1], []),
    "decodes": ([5, 16, 17, 129, 0, 300], []),
    "a prompt": ([], [(0, 19)]),
    "chunk after a prefix": ([], [(128, 5), (16, 9), (0, 1)]),
    "mixed": ([40, 0, 7], [(0, 6), (200, 70)]),
    "pages exactly full": ([16, 32], [(0, 16)]),
}


DTYPES = [
    ("float32", "bfloat16"),
    ("float32", "int8"),
    ("float32", "float8_e4m3fn"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "int8"),
    ("bfloat16", "float8_e4m3fn"),
]


def marked(backend: Backend, *values: object, first: bool) -> Any:
    """Of what takes backends and another parameter. The first of a kind is fast, but slow where it is
    interpreted; the others are slow and `long`.
    """
    order = ("fast", "slow", "long")
    mark = order[(backend == "tpu") + (not first)]
    return pytest.param(backend, *values, marks=() if mark == "fast" else getattr(pytest.mark, mark))


@backends
@pytest.mark.parametrize("name", [spec.name for spec in ODD_SPECS])
def test_odd_specs(backend: Backend, name: str) -> None:
    check(make_case(SPECS[name], [40, 0, 7], [(0, 6), (100, 70)], backend=backend))


@pytest.mark.parametrize(
    "backend", [pytest.param(b, marks=pytest.mark.long if b == "tpu" else pytest.mark.slow) for b in BACKENDS]
)
@pytest.mark.parametrize("name", [spec.name for spec in MODEL_SPECS])
def test_model_specs(backend: Backend, name: str) -> None:
    check(make_case(SPECS[name], [40, 0, 7], [(0, 6), (100, 70)], backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("step", STEPS)
def test_every_kind_of_step(backend: Backend, step: str) -> None:
    check(make_case(PLAIN, *STEPS[step], backend=backend))


@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        marked(backend, name, first=name == "chunk-128-everything")
        for backend in BACKENDS
        if backend != "cpu"  # which is for float32 alone
        for name in ("chunk-128-everything", "a-shard", "window-150-sinks")
    ],
)
def test_every_dtype(backend: Backend, name: str, dtype: str, kv_dtype: str) -> None:
    steps = ([40, 0, 7, 300], [(0, 6), (200, 70)])
    check(make_case(SPECS[name], *steps, dtype=dtype, kv_dtype=kv_dtype, backend=backend))


@pytest.mark.parametrize(
    ("backend", "page_size"),
    [marked(b, page_size, first=page_size == 256) for b in BACKENDS for page_size in (16, 32, 64, 128, 256)],
)
def test_page_sizes(backend: Backend, page_size: int) -> None:
    spec = replace(PLAIN, page_size=page_size)
    check(make_case(spec, [70, page_size], [(130, 9)], backend=backend))


@pytest.mark.parametrize("group", [1, 2, 4, 6, 8, 9, 17])
def test_heads_to_a_kv_head_on_a_cpu(group: int) -> None:
    """Up to 8 have a kernel each, 9 fill one vector of columns with few queries, and 17 two."""
    spec = replace(PLAIN, num_heads=2 * group, num_kv_heads=2, soft_cap=20.0)
    check(make_case(spec, [70, 1, 33], [(130, 9)], backend="cpu"))


lengths = st.lists(st.integers(0, 280), max_size=4)
chunks = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 64)), max_size=2)
ROOM = Room(decodes=4, tiles=4, pages_a_seq=20, pages=109)


@pytest.mark.parametrize(
    ("backend", "kv_dtype"),
    [
        ("cpu", "float32"),
        ("xla", "float32"),
        ("xla", "int8"),
        *[pytest.param("tpu", dtype, marks=pytest.mark.slow) for dtype in ("float32", "int8")],
    ],
)
@given(lengths, chunks, st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
@example([], [], 0)
@example([0, 0, 1, 0], [(0, 1)], 1)
@example([16, 32, 288, 288], [(0, 16), (304, 16)], 2)  # with the null page, 62 of the pool's pages
@example([320, 320, 320, 320], [(256, 64), (64, 64)], 3)  # all pages but the null page
def test_random_ragged_steps(
    backend: Backend, kv_dtype: str, decodes: list[int], prefills: list[tuple[int, int]], seed: int
) -> None:
    """One shape, so that one program serves all."""
    spec = SPECS["window-150-sinks"] if kv_dtype == "int8" else PLAIN
    spec = replace(spec, page_size=16)
    check(make_case(spec, decodes, prefills, kv_dtype=kv_dtype, backend=backend, room=ROOM, seed=seed))
