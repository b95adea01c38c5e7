"""How adapters are added: what `add_lora` and `load_adapters` share."""

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Key

from liger_jax.models.core.config_fields import MOST
from liger_jax.models.core.parameters import FUSED
from liger_jax.models.hugging_face import adapter_targets
from liger_jax.models.hugging_face.adapter_targets import Targets
from liger_jax.models.lora.linear import LoRALinear, LoRAScale, become, names, scale_of
from liger_jax.models.lora.outside import adapt, check_dense, tables, untie
from liger_jax.models.lora.vocabulary import EmbeddingAdapter, HeadAdapter, key_of, new_adapter
from liger_jax.models.lora.whole import whole_like
from liger_jax.ops.layout import full_spec, named_sharding

Found = tuple[tuple[Any, ...], Any]  # a projection with its path
_MOST_ALPHA = float(np.finfo(np.float32).max)


def check_options(caller: str, rank: int, alpha: float | int, dropout: float | int) -> None:
    """Raises a ValueError unless adapters can have these numbers."""
    if rank < 1:
        raise ValueError(f"{caller}: rank={rank} must be at least 1.")
    if not 0 < alpha <= _MOST_ALPHA:
        raise ValueError(
            f"{caller}: alpha={alpha} must be more than 0, and finite in float32; adapters are scaled by alpha/rank."
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"{caller}: dropout={dropout} must be in [0, 1); 0 drops nothing.")


def problems_of_patterns(ranks: Any, alphas: Any) -> list[str]:
    """Clauses for wrong entries of `rank_pattern` and `alpha_pattern`."""
    is_rank = lambda value: type(value) is int and 1 <= value <= MOST
    is_alpha = lambda value: type(value) in (int, float) and 0 < value <= _MOST_ALPHA
    return adapter_targets.problems_of_pattern("rank_pattern", ranks, is_rank, "an int of at least 1") + (
        adapter_targets.problems_of_pattern("alpha_pattern", alphas, is_alpha, "a finite float32 above 0")
    )


def of_all_layers(caller: str, projections: Sequence[Found]) -> set[tuple[Any, ...]]:
    """The paths of the projections that stacked or numbered layers hold, or else of those with usual names."""
    known = (*adapter_targets.LAYER, *FUSED)
    is_outside = lambda path: path[-1] in adapter_targets.OUTSIDE
    inside = {path for path, each in projections if _is_in_layer(path, each) and not is_outside(path)}
    inside = inside or {path for path, _ in projections if path[-1] in known}
    if projections and not inside:
        raise ValueError(
            f"{caller}: targets=None means the projections of all layers, and the model has neither stacked nor "
            f"numbered layers. Name the projections, of {sorted({str(path[-1]) for path, _ in projections})}."
        )
    return inside


def _is_in_layer(path: tuple[Any, ...], projection: Any) -> bool:
    return projection.kernel.ndim > 2 or any(isinstance(name, int) or str(name).isdigit() for name in path)


def check_targets(caller: str, projections: Sequence[Found], targets: Targets, outside: Sequence[str]) -> None:
    """Raises a ValueError unless each of the targets names a projection of the model, or one of the tables outside."""
    all_names = [*outside, *(name for path, projection in projections for name in names(path, projection))]
    listed = [] if isinstance(targets.names, str) else targets.names
    if unknown := [end for end in listed if not any(Targets([end]).adapts(name) for name in all_names)]:
        raise ValueError(
            f"{caller}: targets={list(listed)}: no projection is called {unknown}. The model has "
            f"{sorted({name.rpartition('.')[2] for name in all_names})}."
        )
    if not any(map(targets.adapts, all_names)):
        shown = repr(targets.names) if isinstance(targets.names, str) else list(listed)
        others = "".join(
            f", {field}={value!r}"
            for field, value in (("exclude", targets.excluded), ("layers", targets.layers))
            if value
        )
        raise ValueError(f"{caller}: targets={shown}{others} must name at least one projection.")


def add_to(
    projections: Sequence[Found],
    own: Callable[[str], tuple[int, float | int] | None],
    *,
    dropout: float | int,
    rslora: bool,
    dora: bool,
    key: Key[Array, ""],
    kernels: Any = None,
) -> list[Found]:
    """Adds adapters to those of these projections to which `own` gives rank and alpha, by a layer's name.

    `kernels`: the model's `KernelOptions`; `None` for a model of another library.
    """
    chosen = []
    for path, projection in projections:
        each = tuple(
            (rank, float(alpha)) for rank, alpha in map(lambda name: own(name) or (0, 0), names(path, projection))
        )
        if any(rank for rank, _ in each):
            chosen.append((path, projection))
            _add(path, projection, each, rslora, key, with_scales=dora and any(not rank for rank, _ in each))
            projection.dropout = float(dropout)
            projection.has_kernels = kernels is not None and kernels.may_add_adapters
            become(projection, LoRALinear)
            if dora:  # the norm as `factor` takes it where B is zero: new adapters change nothing
                norm = jnp.linalg.norm(projection.rounded(projection.kernel[...]), axis=-2)
                projection.magnitude = nnx.LoRAParam(_placed(norm, projection, None))
    return chosen


def add_outside(
    caller: str,
    model: Any,
    own: Callable[[str], tuple[int, float | int] | None],
    *,
    dropout: float | int,
    rslora: bool,
    dora: bool,
    key: Key[Array, ""],
) -> None:
    """Adds adapters to embedding and head, if `own` gives them rank and alpha, which unties the two."""
    chosen = [table for table in tables(model) if own(table.name) is not None]
    for table in chosen:
        check_dense(caller, table)
        if dora and table.kind is EmbeddingAdapter:
            raise ValueError(
                f"{caller}: DoRA on {table.name} is not supported. Leave it out of the targets, or dora=False."
            )
    if chosen:
        untie(model)
        adapt(model)
    for table in chosen:
        rank, alpha = own(table.name) or (0, 0)
        weight = getattr(table.holder, table.weight)[...]
        options = dict(alpha=float(alpha), rslora=rslora, dropout=float(dropout) if table.kind is HeadAdapter else 0.0)
        adapter = new_adapter(table.kind, weight, rank, key_of(key, table.name), **options)
        if dora:
            assert isinstance(adapter, HeadAdapter)
            adapter.magnitude = nnx.LoRAParam(adapter.lengths(weight, model.model.dtype))
        for variable in (adapter.lora_a, adapter.lora_b, adapter.magnitude):
            if variable is not None:
                variable[...] = whole_like(variable[...], weight)
        setattr(table.holder, f"{table.weight}_adapter", adapter)


def _add(path, projection, each, rslora, key, *, with_scales):
    """A and B of a projection whose layers have these ranks and alphas; with scales for each if they differ."""
    *layers, in_width, out_width = projection.kernel.shape
    ranks, present = tuple(rank for rank, _ in each), [options for options in each if options[0]]
    rank = max(ranks)
    a, b = _drawn(key, _numbers_of(path, projection), tuple(layers), (in_width, out_width), ranks)
    projection.lora_a = nnx.LoRAParam(_placed(a, projection, -2))
    projection.lora_b = nnx.LoRAParam(_placed(b, projection, -1))
    projection.alpha, projection.rslora = present[0][1], rslora
    if len(set(each)) > 1:
        projection.each = each
        scales = [scale_of(rank, alpha, rslora) if rank else 0.0 for rank, alpha in each]
        if with_scales or len({scale_of(rank, alpha, rslora) for rank, alpha in present}) > 1 or present[0][0] != rank:
            projection.lora_scale = LoRAScale(_placed(jnp.asarray(scales, jnp.float32), projection, None))


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _drawn(key, numbers, layers, widths, ranks):
    """A and B of a projection, whose layers have these numbers and ranks: one program for each of its shapes."""
    (in_width, out_width), rank = widths, max(ranks)
    keys, bound = _folded(key, numbers, layers), 1 / math.sqrt(in_width)
    a, b = (jnp.zeros((*layers, *shape), jnp.float32) for shape in ((in_width, rank), (rank, out_width)))
    for width in sorted(set(ranks) - {0}):  # each layer's numbers depend on its own rank alone
        uniform = functools.partial(
            jax.random.uniform, shape=(in_width, width), dtype=jnp.float32, minval=-bound, maxval=bound
        )
        drawn = jnp.vectorize(uniform, signature="()->(i,r)")(keys)
        if width == rank == min(ranks):
            a = drawn
        else:
            is_own = np.array([own == width for own in ranks]).reshape(*layers, 1, 1)
            a = jnp.where(is_own, jnp.pad(drawn, [(0, 0)] * (drawn.ndim - 1) + [(0, rank - width)]), a)
    return a, b


def keys_of(key: Key[Array, ""], path: tuple[Any, ...], projection: nnx.Linear) -> Key[Array, "*layers"]:
    """A key for each layer of the projection, stacked like the layers."""
    return _folded(key, _numbers_of(path, projection), projection.kernel.shape[:-2])


def _numbers_of(path, projection):
    """A number for each layer of the projection, from its name."""
    return np.array([zlib.crc32(name.encode()) for name in names(path, projection)], np.uint32)


def _folded(key, numbers, layers):
    return jax.vmap(jax.random.fold_in, (None, 0))(key, numbers).reshape(layers)


def _placed(array: jax.Array, projection: nnx.Linear, shared_axis: int | None) -> jax.Array:
    """The array on its kernel's mesh, split like the kernel along the axis that they share."""
    kernel = jax.tree.leaves(projection.kernel[...])[0]  # the codes of a quantised kernel are split like the kernel
    if (sharding := named_sharding(kernel)) is None:
        return array
    spec = [None] * array.ndim
    if shared_axis is not None:
        spec[shared_axis] = full_spec(sharding.spec, kernel.ndim)[shared_axis]
    return jax.device_put(array, NamedSharding(sharding.mesh, P(*spec)))
