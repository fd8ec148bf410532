"""Checkpoint tensors -> the decoder's parameters: the rule table and the streaming, sharded loader.

Every tensor name matches one rule or is known to be no weight, and every parameter is filled once,
a fused one from several tensors; what does not fit is reported together, by name. Tensors are read
one at a time, a shard's slice at a time, so that the host never holds much more than the model itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxinfer.config import ModelConfig
from jaxinfer.models.transformer import Transformer
from jaxinfer.parallel.layout import part_size, partitioned, runs, split_axis
from jaxinfer.parallel.mesh import parameter_sharding, tensor_parallel
from jaxinfer_checkpoints.reader import CheckpointReader, Problems

Index = tuple[slice, ...]
Transform = Literal["none", "add_one", "unpermute"]

INIT_SCALE = 0.02  # standard deviation of random weights, Hugging Face's initializer_range

_COMPARE_ROWS = 4096
_BLOCK_BYTES = 8 << 20  # read at once, in the target dtype: what bounds the temporaries
_ALIGNMENT = 64  # of a buffer that XLA's CPU client takes over without a copy


@dataclass(frozen=True)
class Rule:
    r"""A checkpoint name's pattern -> the part's path, with the pattern's groups as \1, \2 ..."""

    pattern: str
    path: str
    transform: Transform = "none"


def rules(config: ModelConfig, format: Literal["safetensors", "gguf"]) -> tuple[Rule, ...]:
    """The rule table of a format. Patterns match whole names."""
    return _gguf_rules(config) if format == "gguf" else _hugging_face_rules(config)


def _hugging_face_rules(config: ModelConfig) -> tuple[Rule, ...]:
    """Hugging Face's names are the parts' paths. Multimodal checkpoints put a prefix before them."""
    norm: Transform = "add_one" if config.norm_offset else "none"
    model = r"(?:model|language_model\.model|model\.language_model)"
    layer = model + r"\.layers\.(\d+)\."
    return (
        Rule(model + r"\.embed_tokens\.weight", "model.embed_tokens.weight"),
        Rule(r"(?:language_model\.)?lm_head\.weight", "lm_head.weight"),
        Rule(model + r"\.norm\.weight", "model.norm.weight", norm),
        Rule(layer + r"(\w+_layernorm)\.weight", r"model.layers.\1.\2.weight", norm),
        Rule(layer + r"self_attn\.([qk]_norm)\.weight", r"model.layers.\1.self_attn.\2.weight", norm),
        Rule(layer + r"self_attn\.([qkvo]_proj)\.(weight|bias)", r"model.layers.\1.self_attn.\2.\3"),
        Rule(layer + r"mlp\.(gate_proj|up_proj|down_proj)\.(weight|bias)", r"model.layers.\1.mlp.\2.\3"),
    )


def _gguf_rules(config: ModelConfig) -> tuple[Rule, ...]:
    """llama.cpp's names. Its converter interleaves the rows of Llama's q and k, two halves a head."""
    qk: Transform = "unpermute" if config.interleaved_qk else "none"
    layer = r"blk\.(\d+)\."
    ours = r"model.layers.\1."
    before_mlp = "pre_feedforward_layernorm" if config.sandwich_norms else "post_attention_layernorm"
    return (
        Rule(r"token_embd\.weight", "model.embed_tokens.weight"),
        Rule(r"output\.weight", "lm_head.weight"),
        Rule(r"output_norm\.weight", "model.norm.weight"),
        Rule(layer + r"attn_norm\.weight", ours + "input_layernorm.weight"),
        Rule(layer + r"post_attention_norm\.weight", ours + "post_attention_layernorm.weight"),
        Rule(layer + r"ffn_norm\.weight", ours + f"{before_mlp}.weight"),
        Rule(layer + r"post_ffw_norm\.weight", ours + "post_feedforward_layernorm.weight"),
        Rule(layer + r"attn_([qk])_norm\.weight", ours + r"self_attn.\2_norm.weight"),
        Rule(layer + r"attn_([qk])\.(weight|bias)", ours + r"self_attn.\2_proj.\3", qk),
        Rule(layer + r"attn_v\.(weight|bias)", ours + r"self_attn.v_proj.\2"),
        Rule(layer + r"attn_output\.(weight|bias)", ours + r"self_attn.o_proj.\2"),
        Rule(layer + r"ffn_(gate|up|down)\.(weight|bias)", ours + r"mlp.\2_proj.\3"),
    )


# Tensors that checkpoints carry and the decoder derives, or leaves to another half of the model.
NO_WEIGHTS = re.compile(
    r".*\.rotary_emb\.inv_freq|.*\.attention\.masked_bias|rope_freqs\.weight"
    r"|(?:model\.)?vision_tower\..*|(?:model\.)?multi_modal_projector\..*"
)


@dataclass(frozen=True)
class _Piece:
    """Rows or columns of a tensor of the checkpoint, in a row in a parameter; most have one piece.

    Attributes:
      path: Hugging Face's name of the tensor.
      shape: of the tensor.
      axis: 0 for rows, 1 for columns.
      source: the first one in the tensor.
      target: the first one in the parameter.
      size: how many.
    """

    path: str
    shape: tuple[int, ...]
    axis: int
    source: int
    target: int
    size: int


@dataclass(frozen=True)
class _Source:
    """Where a tensor comes from."""

    name: str
    transform: Transform


def load_model(
    reader: CheckpointReader,
    model_config: ModelConfig,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
) -> Transformer:
    """The model with the checkpoint's weights, streamed leaf by leaf.

    Args:
      reader: an open checkpoint.
      model_config: made from the same checkpoint.
      dtype: of the weights; norms stay float32.
      mesh: where the parameters lie, each device's part read once; None puts all on the first device.

    Raises:
      CheckpointError: with the names of all missing, unexpected and misshapen tensors.
    """
    abstract = abstract_model(model_config, dtype, mesh)
    sources = _match(reader, model_config, abstract)

    def read(piece: _Piece, index: Index) -> np.ndarray:
        source = sources[piece.path]
        if source.transform == "unpermute":
            values = _read_unpermuted(reader, source.name, index, piece.shape, model_config.head_dim)
        else:
            values = reader.read(source.name, index)
        return values.astype(np.float32) + np.float32(1.0) if source.transform == "add_one" else values

    return _fill(abstract, model_config, read)


def random_model(
    model_config: ModelConfig, dtype: DTypeLike, seed: int, mesh: Mesh | None = None
) -> Transformer:
    """The model with random weights of Hugging Face's initial scale (load_format=dummy)."""
    abstract = abstract_model(model_config, dtype, mesh)
    order = {path: i for i, path in enumerate(_tensor_shapes(abstract, model_config))}

    def draw(piece: _Piece, index: Index) -> np.ndarray:
        shape = tuple(axis.stop - axis.start for axis in index)
        if piece.path.endswith("norm.weight"):
            return np.ones(shape, np.float32)
        # Seeded by the place, so that shards of one parameter differ.
        rng = np.random.default_rng([seed, order[piece.path], *(axis.start for axis in index)])
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(INIT_SCALE)

    return _fill(abstract, model_config, draw)


def abstract_model(config: ModelConfig, dtype: DTypeLike, mesh: Mesh | None = None) -> Transformer:
    """The model laid out for a mesh, with shapes for weights, and shardings where there is a mesh."""
    laid_out = partitioned(config, tensor_parallel(mesh))
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(laid_out, dtype)))
    leaves = []
    for path, param in nnx.to_flat_state(state):
        leaf = param.get_value()
        place = None if mesh is None else parameter_sharding(mesh, _name(path))
        leaves.append((path, param.replace(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place))))
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def _name(path: tuple[object, ...]) -> str:
    return ".".join(str(part) for part in path)


def _walk(model: Transformer) -> Iterator[tuple[str, jax.ShapeDtypeStruct]]:
    """Parameter path, and shape and dtype."""
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        yield _name(path), param.get_value()


def _tensor_shapes(abstract: Transformer, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Path -> shape of each tensor that the parameters are made of, in order."""
    return {
        piece.path: piece.shape
        for path, leaf in _walk(abstract)
        for piece in _pieces(path, leaf, config, abstract.config.tensor_parallel)
    }


def _pieces(
    path: str, leaf: jax.ShapeDtypeStruct, config: ModelConfig, tensor_parallel: int
) -> tuple[_Piece, ...]:
    """What a parameter is made of, in order. `config` is the checkpoint's."""
    axis = split_axis(path)
    if axis is None:
        return (_Piece(path, leaf.shape, 0, 0, 0, leaf.shape[0]),)
    module = path.split(".")[-2]
    pieces = []
    for run in runs(module, config, tensor_parallel):
        shape = (*leaf.shape[:axis], part_size(run.part, config), *leaf.shape[axis + 1 :])
        name = path.replace(module, run.part)
        pieces.append(_Piece(name, shape, axis, run.source, run.target, run.size))
    return tuple(pieces)


# The slice of a piece's tensor.
ReadFn = Callable[[_Piece, Index], np.ndarray]


def _fill(abstract: Transformer, config: ModelConfig, read: ReadFn) -> Transformer:
    """The model with each leaf made of what `read` gives for each shard's slice."""
    graph, state = nnx.split(abstract)
    first_device = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("one",)), PartitionSpec())
    filled = []
    for path, param in nnx.to_flat_state(state):
        leaf = param.get_value()
        pieces = _pieces(_name(path), leaf, config, abstract.config.tensor_parallel)
        shard = _read_once(read, pieces, leaf)
        array = jax.make_array_from_callback(leaf.shape, leaf.sharding or first_device, shard)
        filled.append((path, param.replace(array)))
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _read_once(
    read: ReadFn, pieces: tuple[_Piece, ...], leaf: jax.ShapeDtypeStruct
) -> Callable[[Index | None], np.ndarray]:
    """Gives a shard of a parameter, from memory where another device has it too."""
    shards: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def shard(index: Index | None) -> np.ndarray:
        bounded = _bounded(index, leaf.shape)
        key = tuple((axis.start, axis.stop) for axis in bounded)
        if key not in shards:
            shards[key] = _in_blocks(read, pieces, leaf, bounded)
        return shards[key]

    return shard


def _in_blocks(
    read: ReadFn, pieces: tuple[_Piece, ...], leaf: jax.ShapeDtypeStruct, index: Index
) -> np.ndarray:
    """The parameter's slice, each piece read some rows at a time into one buffer that XLA need not copy."""
    shape = tuple(axis.stop - axis.start for axis in index)
    num_bytes = math.prod(shape) * leaf.dtype.itemsize
    raw = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    out = raw[start : start + num_bytes].view(leaf.dtype).reshape(shape)
    rows = max(1, _BLOCK_BYTES * shape[0] // max(num_bytes, 1))
    for piece in pieces:
        begin = max(index[piece.axis].start, piece.target)
        end = min(index[piece.axis].stop, piece.target + piece.size)
        if begin >= end:  # the piece lies outside the slice
            continue
        filled = _with(index, piece.axis, slice(begin, end))
        for first in range(filled[0].start, filled[0].stop, rows):
            block = _with(filled, 0, slice(first, min(first + rows, filled[0].stop)))
            source = _with(block, piece.axis, _moved(block[piece.axis], piece.source - piece.target))
            place = tuple(_moved(part, -whole.start) for part, whole in zip(block, index, strict=True))
            out[place] = read(piece, source)
    return out


def _with(index: Index, axis: int, part: slice) -> Index:
    return (*index[:axis], part, *index[axis + 1 :])


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def _bounded(index: Index | None, shape: tuple[int, ...]) -> Index:
    """The same index with start and stop given; None is all."""
    parts = index if index is not None else (slice(None),) * len(shape)
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(parts, shape, strict=True))


# --- Matching names -------------------------------------------------------------------------------


def _match(reader: CheckpointReader, config: ModelConfig, abstract: Transformer) -> dict[str, _Source]:
    """Path -> source, for the tensors of all parameters.

    Raises:
      CheckpointError: naming everything that does not fit.
    """
    shapes = _tensor_shapes(abstract, config)
    table = [(re.compile(rule.pattern), rule) for rule in rules(config, reader.format)]
    sources: dict[str, _Source] = {}
    tied_heads: list[str] = []
    problems = Problems(reader.path)
    unexpected = f"tensors that {config.architecture} has no place for"
    for name, info in reader.tensors.items():
        found = next(((match, rule) for regex, rule in table if (match := regex.fullmatch(name))), None)
        path = found[0].expand(found[1].path) if found else ""
        if path == "lm_head.weight" and config.tie_word_embeddings:
            tied_heads.append(name)
        elif found is None or path not in shapes:
            if not NO_WEIGHTS.fullmatch(name):
                problems.add(unexpected, name)
        elif path in sources:
            problems.add("tensors that are the same parameter", sources[path].name, name)
        else:
            sources[path] = _Source(name, found[1].transform)
            if tuple(info.shape) != shapes[path]:
                both = f"{list(info.shape)} instead of {list(shapes[path])}"
                problems.add("misshapen tensors", f"{name} {both}")
    embedding = sources.get("model.embed_tokens.weight")
    for name in tied_heads:
        if embedding is not None and not _equal(reader, name, embedding.name):
            problems.add(f"the head of a tied model, unlike {embedding.name}", name)
    missing = [path for path in shapes if path not in sources]
    if missing:
        problems.add("missing tensors", *missing)
    problems.raise_if_any()
    return sources


def _equal(reader: CheckpointReader, name: str, other: str) -> bool:
    """Whether two matrices of the checkpoint hold the same values."""
    rows, columns = reader.tensors[name].shape
    if reader.tensors[other].shape != (rows, columns):
        return False
    blocks = [slice(first, min(first + _COMPARE_ROWS, rows)) for first in range(0, rows, _COMPARE_ROWS)]
    return all(
        np.array_equal(
            reader.read(name, (block, slice(columns))), reader.read(other, (block, slice(columns)))
        )
        for block in blocks
    )


# --- Transforms -----------------------------------------------------------------------------------


def _read_unpermuted(
    reader: CheckpointReader, name: str, index: Index, shape: tuple[int, ...], head_dim: int
) -> np.ndarray:
    """Rows of q or k in Hugging Face's order, for any slice.

    In GGUF a head's rows go 0, H/2, 1, H/2 + 1, ...; here they go 0, 1, ..., H - 1. Whole heads are
    read, since a slice of the one order is scattered in the other.
    """
    first = index[0].start // head_dim * head_dim
    last = min(-(-index[0].stop // head_dim) * head_dim, shape[0])
    heads = reader.read(name, (slice(first, last), *index[1:]))
    pairs = heads.reshape(-1, head_dim // 2, 2, *heads.shape[1:])
    rows = pairs.swapaxes(1, 2).reshape(heads.shape)
    return rows[index[0].start - first : index[0].stop - first]
