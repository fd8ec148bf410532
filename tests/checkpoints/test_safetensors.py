"""Directories written by the safetensors package, read back."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxinfer_checkpoints import CheckpointError, open_checkpoint

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8, np.bool_)


def make_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    weights = {f"w.{np.dtype(d).name}": (8 * rng.normal(size=(5, 7))).astype(d) for d in DTYPES}
    return weights | {
        "cube": rng.normal(size=(2, 3, 4)),
        "scalar": np.array(3.5, np.float32),
        "none": np.zeros((0, 3)),
    }


def write_config(directory: Path, **config: object) -> None:
    (directory / "config.json").write_text(json.dumps(config))


def write_shards(directory: Path) -> dict[str, np.ndarray]:
    weights = {name: np.full((2, 3), i, np.float32) for i, name in enumerate("abcdef")}
    names = {"1.safetensors": "ab", "2.safetensors": "cd", "3.safetensors": "ef"}
    for file, members in names.items():
        save_file({n: weights[n] for n in members}, directory / file)
    weight_map = {n: file for file, members in names.items() for n in members}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    write_config(directory)
    return weights


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    save_file(make_weights(), path / "model.safetensors", metadata={"format": "np"})
    write_config(path, model_type="llama")
    (path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    return path


def test_config_holds_the_generation_config(model):
    reader = open_checkpoint(model)
    assert reader.format == "safetensors"
    assert reader.config == {"model_type": "llama", "generation_config": {"eos_token_id": [1, 2]}}


def test_tensors_equal_those_that_the_safetensors_package_reads(model):
    reader = open_checkpoint(model)
    with safe_open(model / "model.safetensors", framework="numpy") as reference:
        assert sorted(reader.tensors) == sorted(reference.keys())
        for name in reference.keys():  # noqa: SIM118 - it is no mapping
            read, expected = reader.read(name), reference.get_tensor(name)
            assert read.dtype == expected.dtype
            assert reader.tensors[name].shape == read.shape == expected.shape
            assert read.tobytes() == expected.tobytes()
            assert not read.flags.owndata


slices = st.builds(
    slice,
    st.none() | st.integers(-9, 9),
    st.none() | st.integers(-9, 9),
    st.none() | st.integers(-3, 3).filter(bool),
)


@given(data=st.data())
def test_any_slice_is_the_slice_of_the_whole(model, data):
    reader = open_checkpoint(model)
    name = data.draw(st.sampled_from(sorted(reader.tensors)))
    index = tuple(data.draw(st.lists(slices, max_size=len(reader.tensors[name].shape))))
    np.testing.assert_array_equal(reader.read(name, index), make_weights()[name][index])


def test_shards_are_one_checkpoint(tmp_path):
    weights = write_shards(tmp_path)
    reader = open_checkpoint(tmp_path)
    assert set(reader.tensors) == set(weights)
    for name, weight in weights.items():
        np.testing.assert_array_equal(reader.read(name), weight)


def test_missing_and_lacking_shards_are_reported_together(tmp_path):
    weights = write_shards(tmp_path)
    (tmp_path / "1.safetensors").unlink()
    save_file({"c": weights["c"], "extra": weights["d"]}, tmp_path / "2.safetensors")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.problems == {
        "1.safetensors is missing, which holds": ("a", "b"),
        "2.safetensors lacks what model.safetensors.index.json says it holds": ("d",),
    }
    assert "\n" not in str(caught.value)


def test_a_tensor_that_the_index_leaves_out_is_listed(tmp_path):
    weights = write_shards(tmp_path)
    save_file({"c": weights["c"], "d": weights["d"], "extra": weights["d"]}, tmp_path / "2.safetensors")
    assert set(open_checkpoint(tmp_path).tensors) == {*weights, "extra"}


def test_truncated_tensors_are_all_named(tmp_path):
    weights = write_shards(tmp_path)
    for file in ("1.safetensors", "3.safetensors"):
        data = (tmp_path / file).read_bytes()
        (tmp_path / file).write_bytes(data[:-30])
    with pytest.raises(CheckpointError, match=r"1.safetensors is truncated.*: a, b; 3.*: e, f") as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)
    np.testing.assert_array_equal(open_checkpoint(tmp_path, verify="none").read("c"), weights["c"])


def write_header(directory: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    write_config(directory)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_misshapen_unknown_and_overlapping_tensors(tmp_path):
    bad = {"m": entry("F32", [3], 0, 8), "u": entry("F4", [2], 8, 9), "v": entry("F4", [2], 9, 10)}
    write_header(tmp_path, bad, bytes(10))
    with pytest.raises(CheckpointError, match=r"m \(F32 \[3\] in 8 bytes\); unknown dtype F4 .*: u, v$"):
        open_checkpoint(tmp_path)
    write_header(tmp_path, {"a": entry("U8", [8], 0, 8), "b": entry("U8", [8], 4, 12)}, bytes(12))
    with pytest.raises(CheckpointError, match=r"tensors overlap in model.safetensors: a, b"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("header", "shown"),
    [
        (b"{", "not safetensors' JSON"),
        (b"[]", "not safetensors' JSON"),
        ({"a": {"dtype": "F32"}}, "not safetensors' JSON"),
        ({"a": entry("F32", [-1], 0, 4)}, "negative size"),
    ],
)
def test_malformed_headers(tmp_path, header, shown):
    write_header(tmp_path, header)
    with pytest.raises(CheckpointError, match=shown):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"", "the file is empty"),
        (b"abc", "not a safetensors file"),
        (b"\xff" * 16, "not a safetensors file"),
        ((100).to_bytes(8, "little") + b"{", "truncated within its header, at 9 of 108 bytes"),
    ],
)
def test_files_that_are_no_safetensors(tmp_path, data, shown):
    (tmp_path / "model.safetensors").write_bytes(data)
    write_config(tmp_path)
    with pytest.raises(CheckpointError, match=shown):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "shown"),
    [
        ("{}", "has no weight_map"),
        ("not JSON", "not readable as JSON"),
        ('{"weight_map": {"a": "../secret"}}', "a is in '../secret', not a file name"),
    ],
)
def test_malformed_index(tmp_path, index, shown):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    write_config(tmp_path)
    with pytest.raises(CheckpointError, match=shown):
        open_checkpoint(tmp_path)
