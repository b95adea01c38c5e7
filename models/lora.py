"""LoRA: small matrices A and B beside frozen projections, which alone are trained.

    y = x·W + scale·(x·A)·B,   A (in, rank), B (rank, out),   scale = alpha/rank

A starts random and B at zero, so that a model with new adapters computes what it did before. Adapters are stacked like
the layers that they belong to.
"""

import math
import os
import pathlib
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Key

from liger_jax.models.core.remat import ADAPTED
from liger_jax.models.hugging_face import adapter_files
from liger_jax.models.hugging_face.weights import tensors_of

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Model = TypeVar("Model", bound=nnx.Module)


class DropoutKey(nnx.Variable):
    """The key of an adapter's dropout, one for each layer."""


class LoRALinear(nnx.Linear):
    """A projection with an adapter, which `add_lora` makes of an `nnx.Linear`.

    The kernel keeps its name and its place in the model's state. If the adapter is switched off, the class is
    `nnx.Linear` again, and the layer runs as if there were no adapter.

    Attributes:
        lora_a: A (in, rank), float32.
        lora_b: B (rank, out), float32.
        magnitude: DoRA's m (out,), float32, or `None`.
        alpha: numerator of the scale.
        rslora: whether the scale is alpha/√rank rather than alpha/rank.
        dropout: the share of the adapter's inputs that are dropped, where there is a key.
        dropout_key: from `with_dropout`, or `None`.
    """

    lora_a: nnx.LoRAParam
    lora_b: nnx.LoRAParam
    magnitude: nnx.LoRAParam | None = None
    alpha: float
    rslora: bool
    dropout: float
    dropout_key: DropoutKey | None = None

    @property
    def scale(self) -> float:
        """alpha/rank, or alpha/√rank."""
        rank = self.lora_a.shape[-1]
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)

    @property
    def adapted_kernel(self) -> Float[Array, "*layers in out"]:
        """W + scale·A·B in float32, before DoRA's magnitude."""
        product = jnp.matmul(self.lora_a[...], self.lora_b[...], precision="highest")
        return self.kernel[...].astype(jnp.float32) + self.scale * product

    def factor(self) -> Float[Array, "*layers out"] | None:
        """DoRA's m/‖W + scale·A·B‖, by columns, whose norm is a constant to the gradient; `None` without DoRA."""
        if self.magnitude is None:
            return None
        norm = jnp.linalg.norm(jax.lax.stop_gradient(self.adapted_kernel), axis=-2)
        return self.magnitude[...] / checkpoint_name(norm, ADAPTED)

    # Without Linear's out_sharding, which no layer passes.
    def __call__(self, inputs: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        y = super().__call__(inputs)
        x, a, b = (array.astype(y.dtype) for array in (inputs, self.lora_a[...], self.lora_b[...]))
        if self.dropout_key is not None:
            kept = jax.random.bernoulli(self.dropout_key[...], 1 - self.dropout, x.shape)
            x = jnp.where(kept, x / (1 - self.dropout), 0)
        y += jnp.matmul(self.scale * jnp.matmul(x, a, precision=self.precision), b, precision=self.precision)
        y, factor = checkpoint_name(y, ADAPTED), self.factor()
        if factor is not None:
            bias = 0 if self.bias is None else self.bias[...].astype(y.dtype)
            y = factor.astype(y.dtype) * (y - bias) + bias
        return y


def add_lora(
    model: Model,
    rank: int,
    *,
    alpha: float | int,
    targets: Sequence[str] = TARGETS,
    dropout: float | int = 0.0,
    rslora: bool = False,
    dora: bool = False,
    rngs: nnx.Rngs,
) -> Model:
    """Adds an adapter to each projection of these names, in place.

    A starts uniform in ±1/√in, as in PEFT, and B at zero. Both are float32 and are converted to the computation's
    dtype where they are used. The numbers follow from the key and the projection's name, so scanned and unrolled
    layers get the same. On a mesh an adapter is split like the axis that it shares with its kernel.

    Args:
        model: a model of `liger_jax.models`.
        rank: at least 1, and at most the smaller width of each projection.
        alpha: numerator of the scale, more than 0.
        targets: names of projections, or ends of their names, such as "q_proj" or "self_attn.q_proj".
        dropout: the share of an adapter's inputs that `with_dropout` drops, in [0, 1).
        rslora: scale by alpha/√rank rather than alpha/rank.
        dora: also train the length of each column of the weight, as DoRA does. Each call then computes W + scale·A·B.
        rngs: source of A, by its stream `params` or its default one.

    Returns:
        The same model.

    Raises:
        ValueError: a name matches no projection, an argument is out of its range, or the model has adapters already.

    Example:
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> model = add_lora(LlamaForCausalLM(config, rngs=nnx.Rngs(0)), 2, alpha=4, rngs=nnx.Rngs(1))
        >>> model.model.layers.self_attn.q_proj.lora_a.shape
        (32, 8, 2)

    References:
        Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021 (arXiv:2106.09685); Kalajdzievski, "A Rank
        Stabilization Scaling Factor", 2023 (arXiv:2312.03732); Liu et al., "DoRA", 2024 (arXiv:2402.09353).
    """
    if alpha <= 0:
        raise ValueError(f"add_lora: alpha={alpha} must be more than 0; the adapters are scaled by alpha/rank.")
    if not 0 <= dropout < 1:
        raise ValueError(f"add_lora: dropout={dropout} must be in [0, 1); 0 drops nothing.")
    matching = _matching("add_lora", model, targets)
    narrowest = min(min(projection.kernel.shape[-2:]) for _, projection in matching)
    if not 1 <= rank <= narrowest:
        raise ValueError(f"add_lora: rank={rank} must be from 1 to {narrowest}, these projections' smallest width.")
    key = rngs.params()
    for path, projection in matching:
        *layers, in_width, out_width = projection.kernel.shape
        bound = 1 / math.sqrt(in_width)
        uniform = lambda key, shape=(in_width, rank), b=bound: jax.random.uniform(key, shape, minval=-b, maxval=b)
        a = jnp.vectorize(uniform, signature="()->(i,r)")(_keys(key, path, projection))
        projection.lora_a = nnx.LoRAParam(_placed(a, projection, -2))
        projection.lora_b = nnx.LoRAParam(_placed(jnp.zeros((*layers, rank, out_width)), projection, -1))
        projection.alpha, projection.rslora, projection.dropout = float(alpha), rslora, float(dropout)
        if dora:
            norm = jnp.linalg.norm(projection.kernel[...].astype(jnp.float32), axis=-2)
            projection.magnitude = nnx.LoRAParam(_placed(norm, projection, None))
        _become(projection, LoRALinear)
    return model


def trainable(model: nnx.Module) -> tuple[Any, Any, Any]:
    """Splits a model so that gradients and the optimizer's state exist for its adapters alone.

    A gradient with respect to the adapters takes no product for the gradient of a frozen weight.

    Args:
        model: a model with adapters.

    Returns:
        Graph, adapters, and all other state: `nnx.merge(graph, adapters, base)` is the model, and
        `make_step(graph, optimizer)` makes `step((adapters, optimizer.init(adapters)), batch, base)`.

    Raises:
        ValueError: the model has no adapters.

    Example:
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config, rngs=nnx.Rngs(0))
        >>> graph, adapters, base = trainable(add_lora(model, 2, alpha=4, targets=["q_proj"], rngs=nnx.Rngs(1)))
        >>> [path[-1] for path, _ in nnx.to_flat_state(adapters)]
        ['lora_a', 'lora_b']
    """
    _adapted("trainable", model)
    graph, adapters, base = nnx.split(model, nnx.LoRAParam, ...)
    return graph, adapters, base


def with_adapters(model: Model, on: bool) -> Model:
    """The model with its adapters on or off, which shares all arrays with it.

    With the adapters off it runs as the model did before `add_lora`: the reference of DPO or GRPO, without a second
    copy of the weights.

    Args:
        model: a model with adapters, on or off. It stays as it is.
        on: whether the adapters of the result count.

    Returns:
        A model with the same arrays.

    Raises:
        ValueError: the model has no adapters.

    Example:
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> policy = add_lora(LlamaForCausalLM(config, rngs=nnx.Rngs(0)), 2, alpha=4, rngs=nnx.Rngs(1))
        >>> reference = with_adapters(policy, False)
        >>> reference.head is policy.head
        True
    """
    model = _sharing_arrays(model)
    adapted = [projection for _, projection in _projections(model) if hasattr(projection, "lora_a")]
    if not adapted:
        raise ValueError("with_adapters: the model has no adapters. Add them: add_lora(model, …).")
    for projection in adapted:
        _become(projection, LoRALinear if on else nnx.Linear)
    return model


def with_dropout(model: Model, key: Key[Array, ""]) -> Model:
    """The model with keys for its adapters' dropout, which shares all arrays with it.

    Without keys nothing is dropped, as in evaluation. Give every step a key of its own, inside the loss function.

    Args:
        model: a model with adapters. It stays as it is.
        key: of `jax.random.key`; each adapter of each layer derives its own from it.

    Returns:
        A model with the same arrays.

    Raises:
        ValueError: the model has no adapters that are on.

    Example:
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config, rngs=nnx.Rngs(0))
        >>> model = add_lora(model, 2, alpha=4, dropout=0.1, rngs=nnx.Rngs(1))
        >>> with_dropout(model, jax.random.key(0)).model.layers.mlp.up_proj.dropout_key.shape
        (32,)
    """
    model = _sharing_arrays(model)
    for path, projection in _adapted("with_dropout", model):
        if projection.dropout > 0:
            projection.dropout_key = DropoutKey(_keys(key, path, projection))
    return model


def merge_lora(model: Model) -> Model:
    """Adds the adapters' products to the weights, in place, and removes the adapters.

    W + scale·A·B is summed in float32 and rounded once, one projection after another. Quantised weights become dense,
    in the dtype that they had. The model then saves, loads and
    runs as one that never had adapters.

    Args:
        model: a model with adapters.

    Returns:
        The same model.

    Raises:
        ValueError: the model has no adapters that are on.

    Example:
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> model = add_lora(LlamaForCausalLM(config, rngs=nnx.Rngs(0)), 2, alpha=4, rngs=nnx.Rngs(1))
        >>> type(merge_lora(model).model.layers.self_attn.q_proj).__name__
        'Linear'
    """
    for _, projection in _adapted("merge_lora", model):
        kernel, factor = projection.adapted_kernel, projection.factor()
        if factor is not None:
            kernel *= factor[..., None, :]
        kernel = kernel.astype(projection.kernel.dtype)
        if isinstance(projection.kernel, nnx.Param):
            projection.kernel[...] = kernel
        else:  # quantised
            projection.kernel = nnx.Param(kernel)
        for name in ("lora_a", "lora_b", "magnitude", "dropout_key", "alpha", "rslora", "dropout"):
            if name in vars(projection):
                delattr(projection, name)
        _become(projection, nnx.Linear)
    return model


def save_adapters(model: nnx.Module, path: str | os.PathLike[str], *, base_model: str | None = None) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, which PEFT and `load_adapters` read.

    Args:
        model: a model with adapters.
        path: a folder, made if it does not exist. Earlier adapters in it are replaced.
        base_model: name or path of the model that the adapters belong to, for PEFT's `AutoPeftModel`.

    Raises:
        ValueError: the model has no adapters that are on.

    Example:
        >>> import tempfile
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> model = add_lora(LlamaForCausalLM(config, rngs=nnx.Rngs(0)), 2, alpha=4, rngs=nnx.Rngs(1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_adapters(model, folder)
        ...     sorted(os.listdir(folder))
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    adapted = _adapted("save_adapters", model)
    tensors = {}
    for path_in_model, projection in adapted:
        is_stacked = projection.kernel.ndim == 3
        arrays = {name: np.asarray(variable[...]) for name, variable in _variables(projection).items()}
        arrays = arrays if is_stacked else {name: array[None] for name, array in arrays.items()}
        tensors |= adapter_files.tensors(_names(path_in_model, projection), arrays)
    first = adapted[0][1]
    config = adapter_files.AdapterConfig(
        rank=first.lora_a.shape[-1],
        alpha=first.alpha,
        targets=tuple(sorted({str(path_in_model[-1]) for path_in_model, _ in adapted})),
        dropout=first.dropout,
        rslora=first.rslora,
        dora=first.magnitude is not None,
    )
    adapter_files.write(pathlib.Path(path), config, tensors, base_model)


def load_adapters(model: Model, path: str | os.PathLike[str]) -> Model:
    """Adds adapters that PEFT or `save_adapters` wrote, in place.

    Args:
        model: the model that the adapters belong to, without adapters.
        path: a folder with adapter_config.json and adapter_model.safetensors.

    Returns:
        The same model.

    Raises:
        FileNotFoundError: the folder lacks one of the files.
        ValueError: a file is damaged; the adapters are of a kind that is not supported; or they do not fit the model,
            and the message lists what is missing, left over or of another shape. The model is then unchanged.

    Example:
        >>> import tempfile
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> make = lambda: LlamaForCausalLM(config, rngs=nnx.Rngs(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_adapters(add_lora(make(), 2, alpha=4, rngs=nnx.Rngs(1)), folder)
        ...     model = load_adapters(make(), folder)
        >>> model.model.layers.self_attn.q_proj.alpha
        4.0
    """
    folder = pathlib.Path(path)
    config, tensors = adapter_files.read(folder)
    matching = _matching("load_adapters", model, config.targets)
    shapes = {}
    for path_in_model, projection in matching:
        shapes |= adapter_files.shapes(_names(path_in_model, projection), projection.kernel.shape[-2:], config)
    adapter_files.check(folder, tensors, shapes)
    options = dict(alpha=config.alpha, dropout=config.dropout, rslora=config.rslora, dora=config.dora)
    add_lora(model, config.rank, targets=config.targets, **options, rngs=nnx.Rngs(0))
    for path_in_model, projection in matching:
        for name, variable in _variables(projection).items():
            array = adapter_files.stacked(tensors, _names(path_in_model, projection), name)
            variable[...] = jax.device_put(array.reshape(variable.shape), variable[...].sharding)
    return model


# --- projections by their names ---------------------------------------------------------------------------------------


def _projections(model: nnx.Module) -> list[tuple[tuple[Any, ...], Any]]:
    """Each projection and its path, whether or not it has an adapter."""
    return [(path, node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Linear)]


def _matching(caller: str, model: nnx.Module, targets: Sequence[str]) -> list[tuple[tuple[Any, ...], Any]]:
    """The projections without adapters whose names end in one of the targets."""
    found = _projections(model)
    if any(hasattr(projection, "lora_a") for _, projection in found):
        raise ValueError(f"{caller}: the model has adapters already. Merge them first: merge_lora(model).")
    names = [".".join(map(str, path)) for path, _ in found]
    ends = lambda name, target: f".{name}".endswith(f".{target}")
    if unknown := [target for target in targets if not any(ends(name, target) for name in names)]:
        raise ValueError(
            f"{caller}: targets={list(targets)}: no projection is called {unknown}. The model has "
            f"{sorted({name.rpartition('.')[2] for name in names})}."
        )
    matching = [item for item, name in zip(found, names, strict=True) if any(ends(name, t) for t in targets)]
    if not matching:
        raise ValueError(f"{caller}: targets={list(targets)} must name one projection at least.")
    return matching


def _adapted(caller: str, model: nnx.Module) -> list[tuple[tuple[Any, ...], LoRALinear]]:
    """The projections whose adapters are on."""
    adapted = [(path, projection) for path, projection in _projections(model) if isinstance(projection, LoRALinear)]
    if not adapted:
        raise ValueError(
            f"{caller}: the model has no adapters, or they are off. Add them, add_lora(model, …), or turn them on, "
            "with_adapters(model, True)."
        )
    return adapted


def _become(projection: nnx.Linear, kind: type[nnx.Linear]) -> None:
    """Changes the projection's class, which says whether its adapter counts; attributes stay."""
    object.__setattr__(projection, "__class__", kind)  # nnx's own would record an attribute of that name


def _variables(projection: LoRALinear) -> dict[str, nnx.LoRAParam]:
    """What is trained, by its name."""
    variables = dict(lora_a=projection.lora_a, lora_b=projection.lora_b, magnitude=projection.magnitude)
    return {name: variable for name, variable in variables.items() if variable is not None}


def _names(path: tuple[Any, ...], projection: nnx.Linear) -> tuple[str, ...]:
    """The projection's names in a checkpoint, one for each stacked layer."""
    names = tensors_of((*path, "kernel"), projection.kernel).names
    return tuple(name.removesuffix(".weight") for name in names)


def _keys(key: Key[Array, ""], path: tuple[Any, ...], projection: nnx.Linear) -> Key[Array, "*layers"]:
    """A key for each layer of the projection, stacked like the layers."""
    numbers = np.array([zlib.crc32(name.encode()) for name in _names(path, projection)], np.uint32)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, numbers).reshape(projection.kernel.shape[:-2])


def _placed(array: jax.Array, projection: nnx.Linear, shared_axis: int | None) -> jax.Array:
    """The array on its kernel's mesh, split like the kernel along the axis that they share."""
    kernel = jax.tree.leaves(projection.kernel[...])[0]  # a quantised one's codes are split like their kernel
    sharding = None if isinstance(kernel, Tracer) else kernel.sharding
    if not isinstance(sharding, NamedSharding):
        return array
    of_kernel = (*sharding.spec, *(None for _ in range(kernel.ndim - len(sharding.spec))))
    spec = [None] * array.ndim
    if shared_axis is not None:
        spec[shared_axis] = of_kernel[shared_axis]
    return jax.device_put(array, NamedSharding(sharding.mesh, P(*spec)))


def _sharing_arrays(model: Model) -> Model:
    """A model with variables of its own that hold the same arrays."""
    return nnx.merge(*nnx.split(model), copy=True)
