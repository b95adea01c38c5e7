"""The weights of a Hugging Face checkpoint: how a parameter's tensors are read, and how they are written."""

import contextlib
import functools
import pathlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open

from liger_jax.models.core.parameters import ParameterInfo, Piece, describe, kernel_of, parameter, path_of, projections
from liger_jax.models.hugging_face import mxfp4, nf4, other_forms, transfers
from liger_jax.models.hugging_face.checkpoint import weight_file, weight_files, why_no_weights
from liger_jax.models.hugging_face.tensor_files import Stored
from liger_jax.models.quantized import QuantizedParam
from liger_jax.ops.block_quantized import BlockQuantized

EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PREDICTORS = "mtp."  # layers that predict several tokens, which transformers does not read, either
_LANGUAGE_PART = "language_model."  # of a multimodal checkpoint
_DECODER, _OF_DECODER = "model.", ("embed_tokens.", "layers.", "norm.", "embedding_norm.")
FLOATS = ("BF16", "F16", "F32", "F64")  # by safetensors' names
_COMPARED = 4096  # rows that are compared at a time


def shapes(folder: pathlib.Path) -> dict[str, tuple[int, ...]]:
    """The tensors' shapes in the files, by their names in a language model."""
    with contextlib.ExitStack() as stack:
        return {name: tuple(tensor.get_shape()) for name, tensor in tensors_of(folder, stack).items()}


def language_part(names: Iterable[str]) -> dict[str, str]:
    """The names of tensors, by their names in a language model.

    In a multimodal checkpoint the language model's names have "language_model.model." or "model.language_model." for
    "model.". All other names except the head's belong to other modules, and are left out, as are those of layers that
    predict several tokens. A checkpoint that was saved
    without a head, as by transformers' `LlamaModel`, has no "model." before its names.
    """
    names = {name: name for name in names if not name.startswith(_PREDICTORS)}
    if any(_LANGUAGE_PART in name for name in names):
        of_head = _HEAD.removesuffix("weight")
        own = (name for name in names if _LANGUAGE_PART in name or of_head in name)
        names = {name.replace(_LANGUAGE_PART, "", 1): name for name in own}
    if any(name.startswith(_DECODER) for name in names):
        return names
    return {_DECODER + own if own.startswith(_OF_DECODER) else own: name for own, name in names.items()}


def has_a_head_of_its_own(folder: pathlib.Path) -> bool:
    """Whether the files hold both a head and an embedding, and the two differ, as after a merge of a trained head."""
    with contextlib.ExitStack() as stack:
        tensors = tensors_of(folder, stack)
        if not {EMBEDDING, _HEAD} <= tensors.keys():
            return False
        embedding, head = tensors[EMBEDDING], tensors[_HEAD]
        if embedding.get_shape() != head.get_shape():
            return True
        rows = embedding.get_shape()[0]
        strips = (slice(row, min(row + _COMPARED, rows)) for row in range(0, rows, _COMPARED))
        return any(not np.array_equal(embedding[strip], head[strip]) for strip in strips)


def read(
    folder: pathlib.Path,
    graphdef: Any,
    state: Any,
    *,
    shardings: Any = None,
    ignored: tuple[str, ...] = (),
    kept_as: Callable[[ParameterInfo, jax.Array], Any] | None = None,
    by_layers: Callable[[ParameterInfo], bool] = lambda info: False,
) -> Any:
    """Reads a model's parameters, to a CPU one after another, and to other devices a few at a time.

    `kept_as`: a function that gets what a parameter is, and the parameter that was read. What it returns takes the
    parameter's place before another one is read. Parameters whose codes are kept do not come to it. `by_layers`:
    whether a stacked parameter comes to `kept_as` layer after layer, each with an axis of one layer.
    """
    leaves, tree = jax.tree.flatten(state)
    wanted = list(zip(describe(state).values(), leaves, strict=True))
    with contextlib.ExitStack() as stack:
        tensors = tensors_of(folder, stack)
        if _HEAD in ignored and EMBEDDING not in tensors and _HEAD in tensors:  # tied, and kept under the other name
            tensors[EMBEDDING] = tensors[_HEAD]
        _check(folder, tensors, wanted, ignored)
        _say_what_becomes_dense(folder, tensors, wanted)

        def one(info, leaf, sharding):
            like = nf4.quantized_shapes(info, tensors)
            if like is not None:
                return nf4.read(info, like, tensors, sharding)
            if kept_as is None:
                return _read(info, leaf, sharding, tensors)
            layers = range(leaf.shape[0]) if info.stacked and by_layers(info) else (None,)
            read = [kept_as(info, _read(info, leaf, sharding, tensors, layer)) for layer in layers]
            return read[0] if len(read) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *read)

        each = [(*pair, sharding) for pair, sharding in zip(wanted, shardings or [None] * len(wanted), strict=True)]
        # Programs over several devices begin in one order on all of them, and 64 bits are a setting of this thread.
        is_wide = any(leaf.dtype.itemsize > 4 for leaf in leaves)
        if transfers.is_for_host(shardings[0] if shardings else None) or is_wide or (shardings and kept_as):
            parameters = transfers.in_turn(one, each)
        else:
            # What is made of a tensor on its way to codes takes memory beside it.
            parameters = transfers.at_once(one, each, count=2 if kept_as else 4)
    return nnx.merge(graphdef, jax.tree.unflatten(tree, parameters))


def quantized_as_in(folder: pathlib.Path, model: Any) -> Any:
    """The model with zeros for its weights, held as `read` holds them: in codes where the files have nf4."""
    with contextlib.ExitStack() as stack:
        tensors = tensors_of(folder, stack)
        for path, layer in projections(model):
            like = nf4.quantized_shapes(kernel_of(path, layer), tensors)
            if like is not None:
                layer.kernel = QuantizedParam(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like))
    return model


def shardings_of(mesh: Mesh | None, partition_specs: Any, state: Any) -> list[NamedSharding] | None:
    """The shardings of a state's parameters, from the mesh and specs that `from_pretrained` takes."""
    if mesh is None:
        if partition_specs is not None:
            raise ValueError("from_pretrained: partition_specs need a mesh: pass mesh=jax.make_mesh(…).")
        return None
    leaves = jax.tree.leaves(state)
    if partition_specs is None:
        specs = [PartitionSpec()] * len(leaves)
    elif callable(partition_specs):
        infos = describe(state).values()
        specs = [partition_specs(info.name, leaf.shape) for info, leaf in zip(infos, leaves, strict=True)]
    else:
        specs = jax.tree.leaves(partition_specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
    if len(specs) != len(leaves) or not all(isinstance(spec, PartitionSpec) for spec in specs):
        raise ValueError(
            f"from_pretrained: partition_specs must give a PartitionSpec for each of the model's {len(leaves)} "
            f"parameters, and gave {specs}."
        )
    return [NamedSharding(mesh, spec) for spec in specs]


def open_weights(path: pathlib.Path) -> Any:
    """Opens a safetensors file, as a context manager."""
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged, or not a safetensors file: {error}.") from error


def tensors_of(folder: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Slices of a folder's tensors, by their names in a language model; of a quantised weight, a view that is dense."""
    files = open_files(folder, stack)
    mapped: dict[str, Any] = {}
    for path in (weight_file(folder, name) for name in weight_files(folder)):
        assert path is not None
        mapped.update(transfers.mapped_tensors(path))
    tensors = {own: mapped.get(name) or files[name].get_slice(name) for own, name in language_part(files).items()}
    return other_forms.as_in_models(nf4.with_dense_views(mxfp4.with_dense_views(tensors)))


def open_files(folder: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """The open file of each tensor, by the tensor's name."""
    if why := why_no_weights(folder):
        raise FileNotFoundError(f"from_pretrained: {folder} {why}")
    files = {}
    for path in (weight_file(folder, name) for name in weight_files(folder)):
        assert path is not None
        file = stack.enter_context(open_weights(path))
        files.update(dict.fromkeys(file.keys(), file))
    if not files:
        raise ValueError(f"from_pretrained: {folder}: its {weight_files(folder)} hold no tensor.")
    return files


def _check(folder, tensors, wanted, ignored) -> None:
    """Raises a ValueError that lists all names, shapes and dtypes that do not fit."""
    names = {name for info, _ in wanted for name in info.tensor_names}
    missing, left = sorted(names - set(tensors)), sorted(set(tensors) - names)
    left = [name for name in left if not name.endswith(ignored)] if ignored else left
    wrong, no_floats = [], []
    for info, leaf in wanted:
        expected = info.tensor_shape(leaf.shape)
        for name in info.tensor_names:
            if name not in tensors:
                continue
            there = tensors[name]
            shape, dtype = tuple(there.get_shape()), there.get_dtype()
            wrong += [f"{name} {shape}, expected {expected}"] if shape != expected else []
            no_floats += [f"{name} {dtype}, expected one of {FLOATS}"] if dtype not in FLOATS else []
    if missing or left or wrong or no_floats:
        raise ValueError(
            f"from_pretrained: {folder} does not fit the model. Missing: {missing or 'none'}; left over: "
            f"{left or 'none'}; shapes: {'; '.join(wrong) or 'all fit'}; dtypes: {'; '.join(no_floats) or 'all fit'}. "
            "Does config.json belong to these weights?"
        )


def _say_what_becomes_dense(folder, tensors, wanted) -> None:
    """Warns of quantised weights whose codes are not kept."""
    dense = [
        info.name
        for info, _ in wanted
        if any(isinstance(tensors[name], nf4.Nf4Tensor) for name in info.tensor_names)
        and nf4.quantized_shapes(info, tensors) is None
    ]
    if dense:
        warnings.warn(
            f"from_pretrained: {dense} of {folder} become dense, since not all layers of them are quantised alike, or "
            "their blocks are not within rows. The numbers are the same.",
            stacklevel=4,
        )


def _read(
    info: ParameterInfo, leaf: Any, sharding: Any, tensors: Mapping[str, Any], layer: int | None = None
) -> jax.Array:
    """Reads one parameter, or one layer of it, to its devices."""

    def slices(index):
        index = index if layer is None else (slice(layer, layer + 1), *index[1:])
        ranges = [range(*axis.indices(size)) for axis, size in zip(index, leaf.shape, strict=True)]
        for piece in info.pieces(leaf.shape):
            if (places := _places(piece, leaf.shape, ranges)) is not None:
                target, stored = places
                yield target, _of_tensor(tensors[piece.name], piece, stored), piece.transposed

    shape = leaf.shape if layer is None else (1, *leaf.shape[1:])
    return transfers.placed(shape, leaf.dtype, slices, sharding)


def _places(piece: Piece, shape: tuple[int, ...], ranges: list[range]) -> tuple[tuple[Any, ...], list[slice]] | None:
    """Where a piece overlaps a shard of a parameter, as slices of both; `None` if they do not overlap.

    The shard has these ranges of the parameter's axes. The piece's slices are in the parameter's order of axes.
    """
    target: list[Any] = []
    stored = []
    index = (*piece.index, *[slice(None)] * (len(shape) - len(piece.index)))
    for one, size, wanted in zip(index, shape, ranges, strict=True):
        if isinstance(one, int):
            if one not in wanted:
                return None
            target.append(one - wanted.start)
            continue
        own = range(*one.indices(size))
        begin, end = max(own.start, wanted.start), min(own.stop, wanted.stop)
        if begin >= end:
            return None
        target.append(slice(begin - wanted.start, end - wanted.start))
        stored.append(slice(begin - own.start, end - own.start))
    return tuple(target), stored


def _of_tensor(tensor: Any, piece: Piece, stored: list[slice]) -> np.ndarray:
    """A slice of a tensor; if its columns are interleaved, with those of gate before those of up."""
    if not piece.interleaved:
        return tensor[tuple(stored[::-1] if piece.transposed else stored)]
    *others, columns = stored
    whole = tensor[(*others, slice(None))]
    return whole[..., interleaved(whole.shape[-1])[columns]]


def interleaved(width: int) -> np.ndarray:
    """Where the columns of gate, and then those of up, stand in a tensor in which they take turns."""
    return np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2)])


def fetched(x: Any) -> np.ndarray:
    """The whole array on the host, in every process."""
    return np.asarray(_gathered(x))


def _gathered(x: Any) -> Any:
    """An array that each process holds whole; what several processes hold shards of is gathered on their devices."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        assert isinstance(x.sharding, NamedSharding)
        return jax.jit(lambda x: x, out_shardings=NamedSharding(x.sharding.mesh, PartitionSpec()))(x)
    return x


def shards(state: Any, max_shard_bytes: int) -> Iterator[dict[str, Stored]]:
    """Yields a state's tensors in groups of at most `max_shard_bytes`, unless one tensor has more.

    A CPU's parameters are transposed by the host, and those of other devices tensor by tensor on the device. What
    several processes hold is fetched by all of them: all iterate and fetch, and each gets all tensors.
    """
    shard, size = {}, 0
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda x: isinstance(x, BlockQuantized))
    for keys, leaf in leaves:
        info = parameter(path_of(keys), leaf.shape)
        for piece in info.pieces(leaf.shape):
            fetch = functools.partial(_stored, leaf, piece)
            tensor = Stored(info.tensor_shape(leaf.shape), leaf.dtype, fetch)
            if shard and size + tensor.nbytes > max_shard_bytes:
                yield shard
                shard, size = {}, 0
            shard[piece.name], size = tensor, size + tensor.nbytes
    yield shard


def _stored(leaf: Any, piece: Piece) -> Any:
    """A piece of a parameter as a checkpoint has it: a view of the host's memory, or made on the device."""
    of_host = not isinstance(leaf, BlockQuantized) and _is_of_host(leaf)
    array: Any = np.asarray(leaf) if of_host else leaf
    array = array[piece.index] if piece.index else array
    array = array.astype(array.dtype) if isinstance(array, BlockQuantized) else array
    if piece.interleaved:
        array = array[..., np.argsort(interleaved(array.shape[-1]))]
    array = array.T if piece.transposed else array
    return array if of_host else _gathered(array)


def _is_of_host(x: Any) -> bool:
    """Whether an array is in the memory of this process's host."""
    return not isinstance(x, jax.Array) or (x.is_fully_addressable and transfers.is_cpu(x.devices()))
