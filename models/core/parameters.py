"""Descriptions of a model's parameters: their kind, their axes, and their tensors in a checkpoint.

Checkpoints, layouts on meshes, quantisation, adapters and the planner ask here, and read no path by themselves. Modules
have Hugging Face's names, so a parameter's names in a checkpoint follow from its path. A linear layer's kernel is the
transposed weight. A parameter that is stacked for a scan has one tensor for each layer.
"""

import contextlib
import dataclasses
import re
from typing import Any, Literal

import jax
from flax import nnx

Kind = Literal[
    "embedding", "head", "kernel", "bias", "norm", "scalar", "sinks", "router", "experts", "experts_bias",
    "convolution", "decay",
    "kernel_codes", "kernel_scales", "head_codes", "head_scales", "experts_codes", "experts_scales",
    "experts_lora_a", "experts_lora_b",
    "lora_a", "lora_b", "magnitude", "lora_scale", "dropout_key", "dropout_pieces", "token_rows",
]  # fmt: skip
Path = tuple[Any, ...]  # names and numbers, as in `nnx.to_flat_state`

_STACKS = ("layers", "last_layers")  # attributes of `Decoder` that hold layers; a checkpoint calls all of them layers
_OF_PLACE = re.compile(r"(\d+)_of_(\d+)")  # the name of a stack of every nth layer
_TABLES = ("embed_tokens", "embed_tokens_per_layer")  # attributes of `Decoder` with a row for each token
_QUANTIZED_PARTS = ("codes", "scales")  # of a `BlockQuantized`
# A tensor's last name, by the parameter's: PEFT's names, and Hugging Face's where it is not "weight".
ADAPTER_TENSORS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
EMBEDDING_TENSORS = ADAPTER_TENSORS | {"lora_a": "lora_embedding_A", "lora_b": "lora_embedding_B"}
_TENSORS = {name: name for name in ("bias", "layer_scalar", "sinks", "A_log", "dt_bias")} | ADAPTER_TENSORS
_TENSORS |= {"rows": "token_adapter.trainable_tokens_delta"}
# Weights of experts of which a checkpoint has one tensor for each expert, or two, side by side in ours: the tensors'
# modules by the weight's name, in Mixtral and in other families.
_OF_EACH_EXPERT = {"gate_up": (("w1", "w3"), ("gate_proj", "up_proj")), "down": (("w2",), ("down_proj",))}
# Weights of experts that are one tensor in a checkpoint, in which columns of gate and up may take turns.
_OF_ALL_EXPERTS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
_INTERLEAVED = ("gate_up_proj", "gate_up_proj_bias")
EXPERT_WEIGHTS = ("gate_up", "down", "gate_up_proj", "down_proj")  # by their names here
_DOWN_ADAPTERS = ("down_lora_a", "down_proj_lora_a")
# By a parameter's last name: its kind, and what the axes of a single layer's array are.
_KINDS: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "embed_tokens": ("embedding", ("in", "out")),
    "embed_tokens_per_layer": ("embedding", ("in", "out")),
    "layer_scalar": ("scalar", ("out",)),
    "lm_head": ("head", ("out", "in")),
    "kernel": ("kernel", ("in", "out")),
    "bias": ("bias", ("out",)),
    "scale": ("norm", ("out",)),
    "sinks": ("sinks", ("out",)),
    "taps": ("convolution", ("out", "one", "tap")),
    "A_log": ("decay", ("out",)),
    "dt_bias": ("decay", ("out",)),
    "router_kernel": ("router", ("in", "out")),
    "gate_up": ("experts", ("expert", "in", "out")),
    "down": ("experts", ("expert", "in", "out")),
    "gate_up_proj": ("experts", ("expert", "in", "out")),
    "down_proj": ("experts", ("expert", "in", "out")),
    "gate_up_proj_bias": ("experts_bias", ("expert", "out")),
    "down_proj_bias": ("experts_bias", ("expert", "out")),
    **{f"{name}_lora_a": ("experts_lora_a", ("expert", "in", "rank")) for name in EXPERT_WEIGHTS},
    **{f"{name}_lora_b": ("experts_lora_b", ("expert", "rank", "out")) for name in EXPERT_WEIGHTS},
    "lora_a": ("lora_a", ("in", "rank")),
    "lora_b": ("lora_b", ("rank", "out")),
    "magnitude": ("magnitude", ("out",)),
    "lora_scale": ("lora_scale", ()),
    "dropout_key": ("dropout_key", ()),
    "dropout_pieces": ("dropout_pieces", ("batch", "length")),
    "rows": ("token_rows", ("tokens", "out")),
}
_MATRICES = (
    "embedding", "head", "kernel", "convolution", "router", "experts", "experts_lora_a", "experts_lora_b", "lora_a",
    "lora_b", "token_rows",
)  # fmt: skip
_VECTORS = ("scale", "bias")  # names in Flax's layers, whichever number of axes they have
KEPT = "_kept"  # ends the name of a trained weight's original, or of a trained weight that is switched off
# Projections by what tensor parallelism splits: their outputs, which are heads or the feed-forward's width, or their
# inputs, which are the same.
SPLIT_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
SPLIT_INPUTS = ("o_proj", "down_proj")
# Projections to several things at once. In storage, their kernels are split by input: columns that are side by side
# are not those that one device computes.
FUSED = ("qkv_proj", "gate_up_proj")
_OF_VOCABULARY = {"embed_tokens": "in", "lm_head": "out"}


@dataclasses.dataclass(frozen=True)
class Piece:
    """A tensor of a checkpoint, and the slice of a parameter that it holds."""

    name: str  # the tensor's
    # An index or a slice for each of the parameter's first axes. The other axes are whole.
    index: tuple[int | slice, ...]
    transposed: bool  # whether the tensor is (out, in), and the parameter's slice (in, out)
    interleaved: bool  # whether columns of gate and up alternate in the tensor; the parameter has those of gate first


@dataclasses.dataclass(frozen=True)
class ParameterInfo:
    """The description of a parameter."""

    name: str  # its path in the model, such as "model.layers.mlp.up_proj.kernel"
    # "embedding" (V, D), "head" (V, D), "kernel" (in, out), "bias" (out), "norm" for a norm's scale (D), "scalar" (1);
    # "convolution" (out, 1, taps) of linear attention and "decay" (out) of its heads;
    # "kernel_codes", "kernel_scales" and so on of quantised kernels, heads and experts, with the weight's axes; "sinks"
    # (out) of attention's heads; "router" (in, out), "experts" (expert, in, out) and "experts_bias" (expert, out);
    # their adapters' "experts_lora_a" (expert, in, rank) and "experts_lora_b" (expert, rank, out); "lora_a" (in, rank),
    # "lora_b" (rank, out), DoRA's "magnitude" (out), "lora_scale", "dropout_key", "dropout_pieces" (B, T) or (B, 1),
    # and "token_rows" (tokens, D) of single tokens. A trained weight and its original are of the weight's kind.
    kind: Kind
    layer_axis: int | None  # the axis that counts stacked layers; `None` if there is none
    expert_axis: int | None  # the axis that counts experts; `None` if there is none
    in_axis: int | None  # the axis of the layer's input, an embedding's vocabulary included; `None` if there is none
    out_axis: int | None  # the axis of the layer's output, a head's vocabulary included; `None` if there is none
    # The axis that tensor parallelism splits: heads, the feed-forward's width, or the vocabulary; `None` where every
    # device has the parameter whole, as a norm's scale or an adapter's other matrix.
    tensor_axis: int | None
    # The tensors' names in a checkpoint: one, or one for each stacked layer, and in each of these perhaps several for
    # each expert. Adapters have PEFT's names, without the prefix that all of them share. A scale, a dropout's key and
    # pieces, and the adapters of experts have none: in PEFT the names of the last depend on one another
    # (`lora.expert_files`).
    tensor_names: tuple[str, ...]
    tensors_of_expert: int = 0  # how many tensors each expert has; 0 where one tensor is of all experts, or of none
    interleaved: bool = False  # whether columns of gate and up take turns in the tensors

    @property
    def stacked(self) -> bool:
        """Whether the parameter holds one array for each layer."""
        return self.layer_axis is not None

    @property
    def transposed(self) -> bool:
        """Whether the tensors are (out, in), and the parameter (in, out)."""
        return self.kind in ("kernel", "router", "lora_a", "lora_b") or self.tensors_of_expert > 0

    def is_in(self, *modules: str) -> bool:
        """Whether one of these modules holds the parameter, by their names such as "q_proj"."""
        return not {*modules}.isdisjoint(self.name.split("."))

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of each tensor, of a parameter of this shape."""
        if (count := self.tensors_of_expert) > 0:
            return shape[-1] // count, shape[-2]
        shape = shape[1:] if self.stacked else shape
        return shape[::-1] if self.transposed else shape

    def pieces(self, shape: tuple[int, ...]) -> list[Piece]:
        """The tensors of a parameter of this shape, each with the slice of the parameter that it holds."""
        layers = [(i,) for i in range(shape[0])] if self.stacked else [()]
        entries: list[tuple[int | slice, ...]] = [()]
        if (count := self.tensors_of_expert) > 0:
            width = shape[-1] // count
            columns = [slice(i * width, (i + 1) * width) for i in range(count)]
            entries = [(e, slice(None), own) for e in range(shape[self.expert_axis or 0]) for own in columns]
        indices = [(*layer, *entry) for layer in layers for entry in entries] if self.tensor_names else []
        return [
            Piece(name, index, self.transposed, self.interleaved)
            for name, index in zip(self.tensor_names, indices, strict=True)
        ]


def describe(model: Any) -> dict[Path, ParameterInfo]:
    """What each parameter of a model is.

    `model`: a model, its state, or any tree with the state's paths, such as gradients. Leaves need a shape alone.
    Returns the parameters by their paths, as `nnx.to_flat_state` has them, in the order of the tree's leaves. A
    quantised weight has two entries, whose paths end in "codes" and "scales".
    """
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model) if isinstance(model, nnx.Module) else model)
    return {path_of(keys): parameter(path_of(keys), x.shape) for keys, x in leaves}


def parameter(path: Path, shape: tuple[int, ...]) -> ParameterInfo:
    """What the parameter at this path is. A quantised weight may be asked for as a whole."""
    name = ".".join(map(str, path))
    *modules, last = map(str, path)
    field = last if last in _QUANTIZED_PARTS and modules else None
    last = modules.pop() if field else last.removesuffix(KEPT)
    if last not in _KINDS or (field and last not in ("kernel", "lm_head", *EXPERT_WEIGHTS)):
        raise ValueError(
            f"describe: {name} {tuple(shape)} is not a parameter of a model: its last name must be one of "
            f"{list(_KINDS)}. For an optimizer's state, call layout.shardings((params, state), mesh, optimizer)."
        )
    kind, axes = _KINDS[last]
    layer, is_stacked = _layer_of(modules)
    if len(shape) != len(axes) + is_stacked:
        counted = f"{axes} after an axis of layers" if is_stacked else f"{axes}"
        raise ValueError(f"describe: {name} has shape {tuple(shape)}, and the axes of a {kind} are {counted}.")
    place = {axis: is_stacked + i for i, axis in enumerate(axes)}
    return ParameterInfo(
        name=name,
        kind=kind if field is None else f"{kind}_{field}",
        layer_axis=0 if is_stacked else None,
        expert_axis=place.get("expert"),
        in_axis=place.get("in"),
        out_axis=place.get("out"),
        tensor_axis=place.get(_split_by_tensor(modules, last)),
        tensor_names=_tensor_names(modules, layer, last, shape[0] if is_stacked else None, shape),
        tensors_of_expert=len(_of_each_expert(modules, last)),
        interleaved=last in _INTERLEAVED,
    )


def matrices(tree: Any) -> Any:
    """Which parameters multiply something, in place of being added or scaling it: those that most recipes decay.

    Embeddings, kernels, experts and adapters do. Norms, biases, sinks and DoRA's lengths do not, however many layers or
    experts are stacked in one array. Of what is no parameter of a model of ours, arrays with two axes or more do,
    unless a part of the path is "scale" or "bias" or ends in "_bias".
    """
    return jax.tree_util.tree_map_with_path(is_matrix, tree)


def is_matrix(keys: tuple[Any, ...], x: Any) -> bool:
    """Whether the array at these keys of a tree is one of `matrices`."""
    path, shape = path_of(keys), tuple(getattr(x, "shape", ()))  # a state may hold Python numbers
    names = [str(name) for name in path]
    if names and names[-1].removesuffix(KEPT) in _KINDS:
        with contextlib.suppress(ValueError):  # of another number of axes, and so of another model
            return parameter(path, shape).kind in _MATRICES
    return len(shape) > 1 and not any(name in _VECTORS or name.endswith("_bias") for name in names)


def path_of(keys: tuple[Any, ...]) -> Path:
    """The names and numbers of a leaf's keys in a tree, without the one that stands for a variable's value."""
    names = (getattr(key, "key", getattr(key, "idx", getattr(key, "name", None))) for key in keys)
    return tuple(name for name in names if name not in (None, "value"))


def projections(model: nnx.Module) -> list[tuple[Path, Any]]:
    """Each projection and its path, whether or not it has an adapter."""
    return [(path, node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Linear)]


def kernel_of(path: Path, projection: Any) -> ParameterInfo:
    """What the kernel of the projection at this path is, dense or quantised."""
    return parameter((*path, "kernel"), projection.kernel.shape)


def _split_by_tensor(modules: list[str], last: str) -> str | None:
    """Which of a parameter's axes tensor parallelism splits, if the parameter has it."""
    module = modules[-1] if modules else ""
    if module == "experts":
        return "in" if last in (*EXPERT_WEIGHTS, *_DOWN_ADAPTERS) else None
    if module in FUSED:
        return "in" if last == "kernel" else None
    if module in SPLIT_OUTPUTS:
        return "out"
    return "in" if module in SPLIT_INPUTS else _OF_VOCABULARY.get(last)


def stack_of_place(place: int, length: int) -> str:
    """The name of the stack of the layers at one place of a pattern of this length, the first of which is 0."""
    return f"{place}_of_{length}"


def _layer_of(modules: list[str]) -> tuple[int | None, bool]:
    """Where the layers stand in a path, and whether the path means a stack of them and no numbered one."""
    at = next((modules.index(name) for name in _STACKS if name in modules), None)
    return at, at is not None and not any(module.isdigit() for module in modules[at + 1 : at + 2])


def _of_each_expert(modules: list[str], last: str) -> tuple[str, ...]:
    """The modules that each expert has in a checkpoint for a weight of all experts; none for other parameters."""
    of_mixtral, of_others = _OF_EACH_EXPERT.get(last, ((), ()))
    return of_mixtral if "block_sparse_moe" in modules else of_others


def _tensor_names(
    modules: list[str], at: int | None, last: str, count: int | None, shape: tuple[int, ...]
) -> tuple[str, ...]:
    """The tensors' names of a parameter of this shape, which stands for `count` layers if there is a count."""
    if last in ("lora_scale", "dropout_key", "dropout_pieces") or last.endswith(("_lora_a", "_lora_b")):
        return ()
    modules = [*modules, last] if last in (*_TABLES, "lm_head") else modules
    ends = [last] if last in _OF_ALL_EXPERTS else [_TENSORS.get(last, "weight")]
    of_expert = _of_each_expert(modules, last)
    experts = range(shape[0 if count is None else 1] if of_expert else 0)
    if modules and modules[-1].endswith(("_adapter", "_rows")):
        ends = [EMBEDDING_TENSORS.get(last, *ends)] if modules[-1] == "embed_tokens_adapter" else ends
        modules = [*modules[:-1], modules[-1].removesuffix("_adapter").removesuffix("_rows")]
    all_ends = [[str(e), module, *ends] for e in experts for module in of_expert] or [ends]
    if at is None:
        return tuple(".".join([*modules, *ends]) for ends in all_ends)
    stack, rest = [*modules[:at], "layers"], modules[at + 1 :]
    if count is None:
        numbers = [rest.pop(0)]
    elif rest and (of_place := _OF_PLACE.fullmatch(rest[0])):
        first, step = map(int, of_place.groups())
        numbers, rest = range(first, first + step * count, step), rest[1:]
    else:
        numbers = range(count)
    return tuple(".".join([*stack, str(number), *rest, *ends]) for number in numbers for ends in all_ends)
