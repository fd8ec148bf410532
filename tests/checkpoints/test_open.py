"""What is no checkpoint, and what does not pass verification."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer_checkpoints import CheckpointError, fingerprint, hub, open_checkpoint, read_config


def write_model(directory: Path) -> Path:
    save_file({"a": np.arange(4.0)}, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    return directory / "model.safetensors"


def test_things_that_are_no_checkpoint(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "weightless").mkdir()
    (tmp_path / "weightless" / "config.json").write_text("{}")
    for path, shown in [
        (tmp_path / "absent", "absent: no such file or directory"),
        (tmp_path, "the directory has no config.json"),
        (tmp_path / "weightless", "has neither model.safetensors nor model.safetensors.index.json"),
        (tmp_path / "notes.txt", "notes.txt: not a GGUF file"),
    ]:
        with pytest.raises(CheckpointError, match=shown) as caught:
            open_checkpoint(path)
        assert "\n" not in str(caught.value)


def test_an_unknown_tensor_is_named(tmp_path):
    write_model(tmp_path)
    with pytest.raises(CheckpointError, match="no tensor 'b'"):
        open_checkpoint(tmp_path).read("b")


def test_too_many_slices_are_refused(tmp_path):
    write_model(tmp_path)
    with pytest.raises(CheckpointError, match=r"a \[4\] has no part"):
        open_checkpoint(tmp_path).read("a", (slice(None), slice(1)))


def test_sha256_sums(tmp_path):
    weights = write_model(tmp_path)
    with pytest.raises(CheckpointError, match=r"nothing to verify model.safetensors against.*SHA256SUMS"):
        open_checkpoint(tmp_path, verify="sha256")
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    (tmp_path / "SHA256SUMS").write_text(f"{digest.upper()} *model.safetensors\n{'0' * 64}  other\n")
    assert "a" in open_checkpoint(tmp_path, verify="sha256").tensors
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    assert "a" in open_checkpoint(tmp_path, verify="size").tensors
    with pytest.raises(CheckpointError, match=r"SHA-256 differs.*: model.safetensors"):
        open_checkpoint(tmp_path, verify="sha256")


def test_the_demo_is_known_by_its_pinned_digest(tmp_path):
    """A file under the demo's name with other bytes does not pass for it."""
    import gguf

    writer = gguf.GGUFWriter(tmp_path / hub.DEMO.name, "llama")
    writer.add_tensor("a", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"SHA-256 differs.*SmolLM2"):
        open_checkpoint(tmp_path / hub.DEMO.name, verify="sha256")


def test_a_configuration_needs_no_weights(tmp_path):
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert read_config(tmp_path) == ("safetensors", {"a": 1}, ())
    assert read_config(tmp_path / "config.json") == ("safetensors", {"a": 1}, ())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not readable as JSON"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match="no such file"):
        read_config(tmp_path / "absent")


def test_the_fingerprint_tells_checkpoints_apart(tmp_path):
    """By a row of each tensor, wherever the files lie."""
    original = {"a": np.arange(12.0).reshape(4, 3), "b": np.ones((2, 5, 3), np.float16), "c": np.ones(3)}

    def fingerprint_of(name, config="{}", **changes):
        directory = tmp_path / name
        directory.mkdir()
        save_file(original | changes, directory / "model.safetensors")
        (directory / "config.json").write_text(config)
        return fingerprint(open_checkpoint(directory))

    fine_tuned = original["b"] * np.float16(1.001)
    others = [
        fingerprint_of("config", config='{"rope_theta": 1}'),
        fingerprint_of("type", b=original["b"].astype(np.float32)),
        fingerprint_of("shape", a=original["a"].reshape(3, 4)),
        fingerprint_of("name", d=np.ones(3)),
        fingerprint_of("values", b=fine_tuned),
        fingerprint_of("values of a norm", c=np.array([1.0, 1.0, 2.0])),
    ]
    assert fingerprint_of("one") == fingerprint_of("two")
    assert len({fingerprint_of("three"), *others}) == 7
