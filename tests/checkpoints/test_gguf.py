"""GGUF files written by the gguf package's writer, read back."""

from __future__ import annotations

from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer_checkpoints import CheckpointError, open_checkpoint, read_gguf_metadata

QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def write_gguf(path: Path, weights: dict[str, tuple[np.ndarray, str]], **metadata: object) -> None:
    writer = GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, (list, tuple)):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, (weight, dtype) in weights.items():
        kind = GGMLQuantizationType[dtype]
        writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    weights = {f"w.{d}": (random_weights(6, 96), d) for d in (*QUANTIZED, "F32", "F16", "BF16")}
    weights["experts"] = (random_weights(3, 4, 64), "Q4_0")
    weights["norm"] = (random_weights(96), "F32")
    write_gguf(
        path, weights, tokens=["a", "ü", "", "漢字"], ids=[1, -2, 3], scores=[0.5, -1.0], yes=True, n=-7
    )
    return path


def test_metadata_is_plain_python(model):
    config = open_checkpoint(model).config
    assert config == {
        "general.architecture": "llama",
        "tokens": ["a", "ü", "", "漢字"],
        "ids": [1, -2, 3],
        "scores": [0.5, -1.0],
        "yes": True,
        "n": -7,
    }
    assert type(config["yes"]) is bool
    assert {type(i) for i in config["ids"]} == {int}
    assert read_gguf_metadata(model) == config


def test_shapes_are_out_by_in(model):
    reader = open_checkpoint(model)
    assert reader.format == "gguf"
    assert (reader.tensors["w.Q4_1"].shape, reader.tensors["w.Q4_1"].dtype) == ((6, 96), "Q4_1")
    assert reader.tensors["experts"].shape == (3, 4, 64)


def test_plain_types_are_views_in_their_own_dtype(model):
    reader = open_checkpoint(model)
    for name, dtype in [("F32", np.float32), ("F16", np.float16), ("BF16", ml_dtypes.bfloat16)]:
        read = reader.read(f"w.{name}")
        assert read.dtype == dtype
        assert not read.flags.owndata
        assert not read.flags.writeable
        np.testing.assert_array_equal(read, random_weights(6, 96).astype(dtype))


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_quantised_equal_gguf_reference(model, dtype):
    kind = GGMLQuantizationType[dtype]
    expected = gguf.dequantize(gguf.quantize(random_weights(6, 96), kind), kind)
    np.testing.assert_array_equal(open_checkpoint(model).read(f"w.{dtype}"), expected)


slices = st.builds(
    slice,
    st.none() | st.integers(-110, 110),
    st.none() | st.integers(-110, 110),
    st.none() | st.integers(-3, 3).filter(bool),
)


@given(data=st.data())
def test_any_slice_is_the_slice_of_the_whole(model, data):
    reader = open_checkpoint(model)
    name = data.draw(st.sampled_from(sorted(reader.tensors)))
    rank = len(reader.tensors[name].shape)
    index = tuple(data.draw(st.lists(slices, max_size=rank)))
    np.testing.assert_array_equal(reader.read(name, index), reader.read(name)[index])


def test_only_the_blocks_asked_for_are_dequantised(model, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "jaxinfer_checkpoints.mapped.dequantize",
        lambda rows, dtype: seen.append(rows.shape) or np.zeros((2, 64), np.float32),
    )
    open_checkpoint(model).read("w.Q8_0", (slice(2, 4), slice(40, 96)))
    assert seen == [(2, 2 * 34)]  # 2 rows; of 3 blocks of 34 bytes, the last 2


def write_split(directory: Path, count: int, total: int | None = None) -> list[Path]:
    paths = [directory / f"m-{no:05}-of-{count:05}.gguf" for no in range(1, count + 1)]
    for no, path in enumerate(paths):
        metadata = {"split.count": count, "split.no": no, "split.tensors.count": total or count}
        write_gguf(path, {f"blk.{no}.w": (random_weights(2, 32), "Q8_0")}, **metadata, n=no)
    return paths


def test_split_files_are_one_checkpoint(tmp_path):
    paths = write_split(tmp_path, 3)
    for path in paths:
        reader = open_checkpoint(path)
        assert list(reader.tensors) == ["blk.0.w", "blk.1.w", "blk.2.w"]
        assert reader.config["n"] == 0  # the first file's
        np.testing.assert_array_equal(reader.read("blk.2.w"), reader.read("blk.0.w"))


def test_missing_parts_are_named_together(tmp_path):
    paths = write_split(tmp_path, 4)
    paths[1].unlink()
    paths[3].unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00004.*m-00004-of-00004.* of which 2 were found"):
        open_checkpoint(paths[0])


def test_a_part_under_another_name_is_refused(tmp_path):
    renamed = write_split(tmp_path, 2)[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"one of 2 files.*\*-00001-of-00002\.gguf"):
        open_checkpoint(renamed)


def test_truncated_tensors_are_all_named(model, tmp_path):
    whole = model.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[:-3000])
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(cut)
    (names,) = caught.value.problems.values()
    assert names == ("w.F16", "w.BF16", "experts", "norm")
    assert all(name in str(caught.value) for name in names)
    assert "truncated" in str(caught.value)
    reader = open_checkpoint(cut, verify="none")
    np.testing.assert_array_equal(reader.read("w.F32"), random_weights(6, 96))
    with pytest.raises(CheckpointError, match="truncated: norm ends at byte"):
        reader.read("norm")


def test_a_header_cut_anywhere_is_reported(model, tmp_path):
    whole = model.read_bytes()
    header = whole.index(b"norm") + 28  # name, rank, one dim, type, offset: the last entry
    for size in range(1, header, 7):
        cut = tmp_path / f"{size}.gguf"
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"not a GGUF|truncated within its header"):
            open_checkpoint(cut)


def table_entry(name: bytes, kind: int, offset: int) -> bytes:
    """The tail of a tensor's table entry: name, type and offset stand as the writer puts them."""
    return name + (1).to_bytes(4, "little") + (96).to_bytes(8, "little") + kind.to_bytes(4, "little")


@pytest.mark.parametrize(("kind", "shown"), [(17, "IQ2_XS"), (99, "number 99")])
def test_unsupported_types_are_refused_by_name(model, tmp_path, kind, shown):
    data = model.read_bytes()
    old, new = (table_entry(b"norm", k, 0) for k in (0, kind))
    assert data.count(old) == 1
    (tmp_path / "m.gguf").write_bytes(data.replace(old, new))
    with pytest.raises(
        CheckpointError, match=f"unsupported type {shown} .known: F32, F16, BF16, Q4_0.*Q6_K.: norm"
    ):
        open_checkpoint(tmp_path / "m.gguf")


def test_overlapping_tensors_are_named(model, tmp_path):
    data = model.read_bytes()
    entry = table_entry(b"norm", 0, 0)
    at = data.index(entry) + len(entry)
    (tmp_path / "m.gguf").write_bytes(data[:at] + (0).to_bytes(8, "little") + data[at + 8 :])
    with pytest.raises(CheckpointError, match=r"overlap in m.gguf: (norm, w.Q4_0|w.Q4_0, norm)"):
        open_checkpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize(("version", "shown"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")])
def test_other_versions_are_refused(model, tmp_path, version, shown):
    data = model.read_bytes()
    (tmp_path / "m.gguf").write_bytes(data[:4] + version.to_bytes(4, "little") + data[8:])
    with pytest.raises(CheckpointError, match=f"GGUF {shown} is not supported"):
        open_checkpoint(tmp_path / "m.gguf")


def test_a_closed_reader_says_so_and_what_was_read_stays(model):
    reader = open_checkpoint(model)
    read = reader.read("norm")
    reader.close()
    np.testing.assert_array_equal(read, random_weights(96))
    with pytest.raises(CheckpointError, match="closed"):
        reader.read("norm")


@pytest.mark.slow
def test_demo_model_equals_gguf_reader(demo_path):
    reader = open_checkpoint(demo_path, verify="sha256")
    reference = gguf.GGUFReader(demo_path)
    assert {t.name: tuple(reversed(t.shape.tolist())) for t in reference.tensors} == {
        n: t.shape for n, t in reader.tensors.items()
    }
    fields = {k: f.contents() for k, f in reference.fields.items() if not k.startswith("GGUF.")}
    assert fields == reader.config
    for tensor in reference.tensors[:12]:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(reader.read(tensor.name), expected)
