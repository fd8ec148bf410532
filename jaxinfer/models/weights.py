"""Checkpoint tensors -> the decoder's parameters: the streaming, sharded loader.

Every parameter is filled once, a fused or stacked one from several tensors. A few parameters are read at
once, a shard's slice at a time, so that the host never holds much more than the model itself.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxinfer.config import ModelConfig, StageConfig
from jaxinfer.models.transformer import Transformer
from jaxinfer.models.weight_names import Source, match_names
from jaxinfer.parallel.layout import expert_runs, moe_of, part_size, partitioned, runs, split_axis
from jaxinfer.parallel.mesh import parameter_sharding, stages_here, tensor_parallel
from jaxinfer.parallel.stages import stage_models
from jaxinfer_checkpoints.reader import CheckpointReader

Index = tuple[slice, ...]

INIT_SCALE = 0.02  # standard deviation of random weights, Hugging Face's initializer_range

_MAX_READ_THREADS = 4  # parameters that are read at once, each a tensor or two of the host's memory
_BLOCK_BYTES = 8 << 20  # read at once, in the target dtype: what bounds the temporaries


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
      expert: which matrix of a parameter that stacks those of all experts, and whose rows and columns
        the others are then about; None of other parameters.
    """

    path: str
    shape: tuple[int, ...]
    axis: int
    source: int
    target: int
    size: int
    expert: int | None = None


def load_model(
    reader: CheckpointReader,
    model_config: ModelConfig,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
) -> Transformer:
    """The whole model on one mesh; see `load_stages`."""
    return load_stages(reader, model_config, dtype, (mesh,))[0]


def load_stages(
    reader: CheckpointReader, model_config: ModelConfig, dtype: DTypeLike, meshes: Sequence[Mesh | None]
) -> dict[int, Transformer]:
    """Those of the model's pipeline stages that this host has a part of, by number, with the checkpoint's
    weights, streamed leaf by leaf.

    Args:
      reader: an open checkpoint.
      model_config: made from the same checkpoint.
      dtype: of the weights; norms stay float32.
      meshes: where the parameters of each stage lie, each device's part read once; None puts all on the
        first device.

    Raises:
      CheckpointError: with the names of all missing, unexpected and misshapen tensors.
    """
    stages = abstract_stages(model_config, dtype, meshes)
    sources = match_names(reader, model_config, _tensor_shapes(stages, model_config))

    def read(piece: _Piece, index: Index) -> np.ndarray:
        source = sources[piece.path]
        if source.transform == "unpermute":
            values = _read_unpermuted(reader, source.name, index, piece.shape, model_config.head_dim)
        else:
            values = _read_rows(reader, source, index)
        return values.astype(np.float32) + np.float32(1.0) if source.transform == "add_one" else values

    return {index: _fill(stages[index], model_config, read) for index in stages_here(meshes)}


def random_stages(
    model_config: ModelConfig, dtype: DTypeLike, seed: int, meshes: Sequence[Mesh | None]
) -> dict[int, Transformer]:
    """The same with random weights of Hugging Face's initial scale (load_format=dummy)."""
    stages = abstract_stages(model_config, dtype, meshes)
    order = {path: i for i, path in enumerate(_tensor_shapes(stages, model_config))}

    def draw(piece: _Piece, index: Index) -> np.ndarray:
        shape = tuple(axis.stop - axis.start for axis in index)
        if piece.path.endswith("norm.weight"):
            return np.ones(shape, np.float32)
        # Seeded by the place, so that shards of one parameter differ.
        rng = np.random.default_rng([seed, order[piece.path], *(axis.start for axis in index)])
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(INIT_SCALE)

    return {index: _fill(stages[index], model_config, draw) for index in stages_here(meshes)}


def abstract_stages(
    config: ModelConfig, dtype: DTypeLike, meshes: Sequence[Mesh | None]
) -> tuple[Transformer, ...]:
    """The model's pipeline stages, one a mesh, each as `abstract_model` gives it."""
    models = stage_models(config, len(meshes))
    return tuple(abstract_model(model, dtype, mesh) for model, mesh in zip(models, meshes, strict=True))


def abstract_model(config: ModelConfig, dtype: DTypeLike, mesh: Mesh | None = None) -> Transformer:
    """The model laid out for a mesh, with shapes for weights, and shardings where there is a mesh."""
    laid_out = partitioned(config, tensor_parallel(mesh))
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(laid_out, dtype)))
    leaves = []
    for path, param in nnx.to_flat_state(state):
        leaf = param.get_value()
        place = None if mesh is None else parameter_sharding(mesh, _name(path, config.stage), laid_out)
        leaves.append((path, param.replace(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place))))
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def _name(path: tuple[object, ...], stage: StageConfig) -> str:
    """Hugging Face's, which numbers the whole model's layers."""
    if "layers" in path:
        model, layers, index, *rest = path
        path = (model, layers, int(str(index)) + stage.first_layer, *rest)
    return ".".join(str(part) for part in path)


def _walk(model: Transformer) -> Iterator[tuple[str, jax.ShapeDtypeStruct]]:
    """Parameter path, and shape and dtype."""
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        yield _name(path, model.config.stage), param.get_value()


def _tensor_shapes(stages: Sequence[Transformer], config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Path -> shape of each tensor that the parameters are made of, in order."""
    return {
        piece.path: piece.shape
        for stage in stages
        for path, leaf in _walk(stage)
        for piece in _pieces(path, leaf, config, stage.config)
    }


def _pieces(
    path: str, leaf: jax.ShapeDtypeStruct, config: ModelConfig, laid_out: ModelConfig
) -> tuple[_Piece, ...]:
    """What a parameter is made of, in order. `config` is the checkpoint's, `laid_out` the stage's."""
    if ".experts." in path:
        return _expert_pieces(path, leaf, config, laid_out)
    axis = split_axis(path, laid_out)
    if axis is None:
        return (_Piece(path, leaf.shape, 0, 0, 0, leaf.shape[0]),)
    module = path.split(".")[-2]
    pieces = []
    for run in runs(module, config, laid_out.tensor_parallel):
        shape = (*leaf.shape[:axis], part_size(run.part, config), *leaf.shape[axis + 1 :])
        name = path.replace(module, run.part)
        pieces.append(_Piece(name, shape, axis, run.source, run.target, run.size))
    return tuple(pieces)


def _expert_pieces(
    path: str, leaf: jax.ShapeDtypeStruct, config: ModelConfig, laid_out: ModelConfig
) -> tuple[_Piece, ...]:
    """Of a parameter [E, rows, columns]: the gate and up of each expert, or its down."""
    moe = moe_of(path, config)
    num_blocks = laid_out.tensor_parallel // moe_of(path, laid_out).expert_parallel
    experts, module = path.rsplit(".", 1)
    if module == "down_proj":
        axis, shape = 1, (leaf.shape[1], moe.moe_intermediate_size)
    else:
        axis, shape = 0, (moe.moe_intermediate_size, leaf.shape[2])
    return tuple(
        _Piece(f"{experts}.{i}.{run.part}.weight", shape, axis, run.source, run.target, run.size, expert=i)
        for i in range(moe.num_experts)
        for run in expert_runs(module, moe, num_blocks)
    )


# The slice of a piece's tensor.
ReadFn = Callable[[_Piece, Index], np.ndarray]


def _fill(abstract: Transformer, config: ModelConfig, read: ReadFn) -> Transformer:
    """The model with each leaf made of what `read` gives for each shard's slice."""
    graph, state = nnx.split(abstract)
    first_device = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("one",)), PartitionSpec())

    def make(path: tuple[object, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = _name(path, abstract.config.stage)
        shard = _read_once(read, _pieces(name, leaf, config, abstract.config), leaf)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding or first_device, shard)

    flat = nnx.to_flat_state(state)
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_READ_THREADS)) as pool:
        try:
            arrays = list(pool.map(make, flat.paths, [param.get_value() for param in flat.leaves]))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    filled = ((path, param.replace(array)) for (path, param), array in zip(flat, arrays, strict=True))
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
    # Zeros, as numpy's would be; but numpy asks for huge pages at once, which takes three times as long.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    out = np.frombuffer(memory, leaf.dtype).reshape(shape)
    for piece in pieces:
        if piece.expert is None:
            _read_piece(read, piece, out, index)
        elif index[0].start <= piece.expert < index[0].stop:
            _read_piece(read, piece, out[piece.expert - index[0].start], index[1:])
    return out


def _read_piece(read: ReadFn, piece: _Piece, out: np.ndarray, index: Index) -> None:
    """Fills what lies in the piece of `out`, the slice `index` of a parameter or of an expert's matrix."""
    begin = max(index[piece.axis].start, piece.target)
    end = min(index[piece.axis].stop, piece.target + piece.size)
    if begin >= end:  # the piece lies outside the slice
        return
    rows = max(1, _BLOCK_BYTES * out.shape[0] // max(out.nbytes, 1))
    filled = _with(index, piece.axis, slice(begin, end))
    for first in range(filled[0].start, filled[0].stop, rows):
        block = _with(filled, 0, slice(first, min(first + rows, filled[0].stop)))
        source = _with(block, piece.axis, _moved(block[piece.axis], piece.source - piece.target))
        place = tuple(_moved(part, -whole.start) for part, whole in zip(block, index, strict=True))
        out[place] = read(piece, source)


def _with(index: Index, axis: int, part: slice) -> Index:
    return (*index[:axis], part, *index[axis + 1 :])


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def _bounded(index: Index | None, shape: tuple[int, ...]) -> Index:
    """The same index with start and stop given; None is all."""
    parts = index if index is not None else (slice(None),) * len(shape)
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(parts, shape, strict=True))


# --- Reading --------------------------------------------------------------------------------------


def _read_rows(reader: CheckpointReader, source: Source, index: Index) -> np.ndarray:
    """A tensor's slice, which may lie in a stack of all experts' tensors."""
    if source.expert is None:
        return reader.read(source.name, index)
    rows = _moved(index[0], source.first_row)
    return reader.read(source.name, (slice(source.expert, source.expert + 1), rows, *index[1:]))[0]


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
