"""Ops on meshes with Explicit axes: the inputs' types say how they are sharded there, and each device computes on its
own shard. The linear losses do the same with concrete arrays on Auto axes.

After its checks, a public op calls itself inside a `jax.shard_map` that these functions make. Devices exchange
parameters and their gradients, and for a loss a few numbers.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax.ops.layout import Names, full_spec, is_explicit, mesh_of, names, spec_of
from liger_jax.ops.loss_terms import LossMetrics
from liger_jax.ops.meshes import on_devices


def spec_of_explicit(x: jax.Array) -> P | None:
    """`spec_of` where `x` is sharded over an Explicit mesh, else None."""
    return spec_of(x) if is_explicit(x) else None


def row_spec(x: jax.Array) -> P | None:
    """How rows are sharded over an Explicit mesh; None on another mesh, or where the rows themselves are split."""
    if x.ndim == 0 or not is_explicit(x):
        return None
    spec = spec_of(x)
    return spec if spec[-1] is None else None


def norm_spec(op: str, x: jax.Array) -> P | None:
    """`row_spec` for a norm, whose parameters have an entry for each number of a row."""
    spec = row_spec(x)
    if spec is None and x.ndim and is_explicit(x):
        raise ValueError(
            f"{op}: x is sharded over the mesh as {spec_of(x)}, which splits its last axis over "
            f"{names(spec_of(x)[-1])}, but each device must have whole rows. Move it by jax.sharding.reshard, or call "
            "this inside jax.shard_map."
        )
    return spec


def on_rows(
    op: str, function: Callable[..., Any], spec: P, rows: tuple[Any, ...], whole: tuple[Any, ...] = (), results: int = 1
) -> Any:
    """`on_shards` for rows. The results are sharded as the rows are, and each device has the parameters whole."""
    specs = *[spec] * len(rows), *[P()] * len(whole)
    return on_shards(op, function, (*rows, *whole), specs, spec if results == 1 else (spec,) * results)


def on_shards(op: str, function: Callable[..., Any], arrays: tuple[Any, ...], specs: tuple[P, ...], out: Any) -> Any:
    """`function(*arrays)` on every device's shards of them.

    `arrays`: the first of them is seen to be sharded over a mesh (`layout.mesh_of`); `None` entries are passed on.
    `specs`: how each array has to be sharded over the mesh. An array that every device has whole is cut into shards. A
    vector that is split is gathered.
    """
    mesh: Any = mesh_of(arrays[0])
    placed = [x if x is None else _placed(op, x, spec, mesh) for x, spec in zip(arrays, specs, strict=True)]
    in_context, axes = not jax.sharding.get_abstract_mesh().empty, mesh.explicit_axes
    mapped = on_devices(function, mesh=None if in_context else mesh, in_specs=specs, out_specs=out, axis_names=axes)
    try:
        return mapped(*placed)
    except ValueError as error:
        if not str(error).startswith("jax.shard_map requires axis_names="):
            raise
        # jax.vmap takes the axes that it maps over out of the mesh.
        raise ValueError(
            f"{op}: jax.vmap maps over an array axis that the mesh's Explicit axes split. Call {op} without jax.vmap "
            "where it takes leading axes, or put the jax.vmap inside of a jax.shard_map, or move the array by "
            "jax.sharding.reshard so that the mapped axis is whole."
        ) from None


def _placed(op: str, x: jax.Array, spec: P, mesh: Any) -> jax.Array:
    current, wanted = spec_of(x), full_spec(spec, x.ndim)
    if current == wanted and mesh_of(x) is not None:
        return x
    is_cut = all(there in (None, here) for there, here in zip(current, wanted, strict=True))
    if x.ndim > 1 and not is_cut:
        raise ValueError(
            f"{op}: an array of shape {x.shape} is sharded over the mesh as {current}, but must be sharded as "
            f"{wanted}, like the other arguments. Move it by jax.sharding.reshard."
        )
    move = jax.sharding.reshard if mesh.explicit_axes else jax.device_put
    return move(x, NamedSharding(mesh, wanted))


def token_spec(op: str, rows: jax.Array) -> tuple[P, Names]:
    """How the tokens of a loss are sharded over the mesh, and the axes that split them."""
    spec = spec_of(rows) if rows.ndim else P(None)
    if spec[-1] is not None:
        raise ValueError(
            f"{op}: the first argument is sharded over the mesh as {spec_of(rows)}, but each device must have its last "
            "axis whole. Move it by jax.sharding.reshard."
        )
    return P(*spec[:-1]), names(spec[:-1])


def loss_on_shards(
    op: str,
    loss: Callable[..., Any],
    arrays: tuple[Any, ...],
    specs: tuple[P, ...],
    tokens: P,
    reduction: str,
    return_metrics: bool,
) -> Any:
    """`on_shards` for the loss, and the metrics if asked for, of tokens that are sharded as `tokens` says.

    Each device has the sums over all tokens.
    """
    value = tokens if reduction == "none" else P()
    if not return_metrics:
        return on_shards(op, loss, arrays, specs, value)
    per_token = dict(predicted_tokens=tokens, max_logit=tokens, log_normalizer=tokens)

    def fields(*arrays):
        value, metrics = loss(*arrays)
        return value, vars(metrics)

    out = value, dict(accuracy=P(), num_tokens=P(), z_loss=value, **per_token)
    value, metrics = on_shards(op, fields, arrays, specs, out)
    return value, LossMetrics(**metrics)
