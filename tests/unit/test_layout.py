"""How heads, feed-forward and vocabulary are laid out for T devices: by hand, and as invariants."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.config import (
    ConfigError,
    LayerConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    RopeConfig,
    parse_mesh,
)
from jaxinfer.parallel.layout import Run, device_share, padding, partitioned, runs
from jaxinfer.parallel.stages import stage_models


def model(num_q: int, num_kv: int, ffn: int = 48, vocab: int = 160, head_dim: int = 2) -> ModelConfig:
    return ModelConfig(
        architecture="Test",
        vocab_size=vocab,
        hidden_size=8,
        intermediate_size=ffn,
        num_attention_heads=num_q,
        num_key_value_heads=num_kv,
        head_dim=head_dim,
        layers=(LayerConfig(RopeConfig()),),
        rms_norm_eps=1e-6,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )


@pytest.mark.parametrize(
    ("heads", "devices", "laid_out"),
    [
        ((32, 8), 1, (32, 8)),  # Llama-3.1-8B
        ((32, 8), 8, (32, 8)),
        ((64, 8), 16, (64, 16)),  # a 70B on 16 chips: each kv head twice
        ((4, 2), 4, (4, 4)),
        ((28, 4), 8, (32, 8)),  # Qwen2.5-7B: 7 query heads a kv head, dealt 4 and 3
        ((9, 3), 2, (12, 4)),  # the demo: a kv head of zeros with its 3 query heads
        ((9, 3), 4, (12, 4)),
        ((9, 3), 8, (16, 8)),  # 3 query heads a kv head, dealt 2 and 1; 6 slots padded to 8
    ],
)
def test_known_models(heads: tuple[int, int], devices: int, laid_out: tuple[int, int]) -> None:
    whole = partitioned(model(*heads), devices)
    assert (whole.num_attention_heads, whole.num_key_value_heads) == laid_out
    changed = {"num_attention_heads", "num_key_value_heads"} & set(padding(model(*heads), devices))
    assert bool(changed) == (heads != laid_out)


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 24))
def test_every_head_keeps_its_kv_head(num_kv: int, group: int, devices: int) -> None:
    """Whatever T: a query head lies once, on the device and beside the kv head that it attends with."""
    config = model(num_kv * group, num_kv, head_dim=1)
    if devices > num_kv * group:
        with pytest.raises(ConfigError, match=f"num_attention_heads={num_kv * group}"):
            partitioned(config, devices)
        return
    whole = partitioned(config, devices)
    num_q, num_k = whole.num_attention_heads, whole.num_key_value_heads
    assert num_q % devices == num_k % devices == num_q % num_k == 0
    rows: dict[int, tuple[str, int]] = {}
    for run in runs("qkv_proj", config, devices):
        rows |= {run.target + i: (run.part, run.source + i) for i in range(run.size)}
    block = (num_q + 2 * num_k) // devices
    seen = []
    for row, (part, head) in rows.items():
        device, place = divmod(row, block)
        if part != "q_proj":
            continue
        seen.append(head)
        local_kv = place // (num_q // num_k)
        k_row = device * block + num_q // devices + local_kv
        assert rows[k_row] == ("k_proj", head // group)
        assert rows[k_row + num_k // devices] == ("v_proj", head // group)
    assert sorted(seen) == list(range(num_kv * group))
    columns = {
        run.target + i: run.source + i for run in runs("o_proj", config, devices) for i in range(run.size)
    }
    by_slot = {device * (num_q // devices) + place: head for device, place, head in _slots(rows, block)}
    assert columns == by_slot


def _slots(rows: dict[int, tuple[str, int]], block: int) -> list[tuple[int, int, int]]:
    """(device, its query slot, head) of each row of q."""
    return [(row // block, row % block, head) for row, (part, head) in rows.items() if part == "q_proj"]


def test_gate_and_up_come_in_blocks_padded_at_the_end() -> None:
    assert runs("gate_up_proj", model(4, 2, ffn=10), 4) == (
        Run("gate_proj", 0, 0, 3),
        Run("up_proj", 0, 3, 3),
        Run("gate_proj", 3, 6, 3),
        Run("up_proj", 3, 9, 3),
        Run("gate_proj", 6, 12, 3),
        Run("up_proj", 6, 15, 3),
        Run("gate_proj", 9, 18, 1),
        Run("up_proj", 9, 21, 1),
    )
    assert padding(model(4, 2, ffn=10, vocab=161), 4) == {
        "num_key_value_heads": (2, 4),
        "intermediate_size": (10, 12),
        "vocab_size": (161, 164),
    }


def test_a_device_share() -> None:
    share = device_share(model(32, 8, ffn=14336, vocab=128256), 4)
    sizes = (share.num_attention_heads, share.num_key_value_heads, share.intermediate_size, share.vocab_size)
    assert sizes == (8, 2, 3584, 32064)


def test_a_device_has_whole_experts_or_a_part_of_each() -> None:
    """8 experts over 4 devices: 2 each; 6 over 4: an ffn of 10 is padded to 12, and 3 of it each."""
    for num_experts, expert_parallel, ffn, laid_out in ((8, 4, 10, 10), (6, 1, 3, 12)):
        layer = LayerConfig(RopeConfig(), moe=MoeConfig(num_experts, 2, 10, True))
        config = replace(model(32, 8), layers=(layer, LayerConfig(RopeConfig())))
        (first, second) = device_share(config, 4).layers
        assert first.moe is not None
        assert (first.moe.num_experts, first.moe.expert_parallel) == (num_experts, expert_parallel)
        assert first.moe.moe_intermediate_size == ffn
        assert second.moe is None
        changed = {"moe_intermediate_size": (10, laid_out)} if laid_out != 10 else {}
        assert padding(config, 4) == changed


def test_a_mesh_is_data_by_tensor() -> None:
    assert parse_mesh("2x4") == MeshConfig(data=2, tensor=4)
    assert str(parse_mesh("2x4")) == "2x4"
    for text in ("2", "0x1", "2x", "ax1", "", "2x0x1", "1x1x1x1"):
        with pytest.raises(ConfigError, match="DxT"):
            parse_mesh(text)


def test_a_mesh_may_have_stages() -> None:
    mesh = parse_mesh("3x2x4")
    assert mesh == MeshConfig(data=2, tensor=4, pipe=3)
    assert (str(mesh), mesh.num_devices, mesh.stage) == ("3x2x4", 24, parse_mesh("2x4"))
    assert parse_mesh("1x2x4") == parse_mesh("2x4")


@pytest.mark.parametrize(
    ("num_layers", "counts"),
    [
        (8, (8,)),
        (8, (4, 4)),
        (7, (4, 3)),
        (4, (1, 2, 1)),
        (5, (2, 2, 1)),
        (9, (2, 3, 2, 2)),
        (11, (3, 3, 3, 2)),
        (4, (1, 1, 1, 1)),
    ],
)
def test_stages_have_all_layers_in_order(num_layers: int, counts: tuple[int, ...]) -> None:
    """Those in the middle, which hold no embedding and no head, get one more before the first does."""
    windows = tuple(LayerConfig(RopeConfig(), sliding_window=i + 1) for i in range(num_layers))
    whole = replace(model(32, 8), layers=windows)
    stages = stage_models(whole, len(counts))
    assert tuple(stage.num_hidden_layers for stage in stages) == counts
    assert sum((stage.layers for stage in stages), ()) == windows
    assert [stage.stage.first_layer for stage in stages] == [sum(counts[:i]) for i in range(len(counts))]
    assert [stage.stage.is_first for stage in stages] == [i == 0 for i in range(len(counts))]
    assert [stage.stage.is_last for stage in stages] == [i == len(counts) - 1 for i in range(len(counts))]


def test_a_tied_embedding_lies_on_the_first_and_the_last_stage() -> None:
    whole = replace(model(32, 8), layers=(LayerConfig(RopeConfig()),) * 3)
    for tied in (True, False):
        stages = stage_models(replace(whole, tie_word_embeddings=tied), 3)
        assert [stage.has_embedding for stage in stages] == [True, False, tied]


def test_more_stages_than_layers_are_refused() -> None:
    whole = replace(model(32, 8), layers=(LayerConfig(RopeConfig()),) * 3)
    with pytest.raises(ConfigError, match=r"4 pipeline stages need as many layers, .*: use 1 to 3"):
        stage_models(whole, 4)
