"""Stochastic rounding: an optimizer that trains bfloat16 parameters."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType


@contextlib.contextmanager
def promotions() -> Iterator[None]:
    """Lets an optimizer promote dtypes and ranks, as optax's do, whatever the rest of a program has to keep to."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class StochasticRoundingState(NamedTuple):
    """The state of `stochastic_rounding`.

    Attributes:
        step: how many updates there were. It and the seed make the next update's random bits.
        inner_state: the optimizer's own state, as for float32 parameters.
    """

    step: jax.Array
    inner_state: Any


def stochastic_rounding(
    optimizer: optax.GradientTransformation, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that trains bfloat16 parameters: it computes in float32, and rounds parameter + update at random.

    A bfloat16 number has 8 bits, so rounding to nearest drops every update below 1/512 of its parameter, which AdamW's
    are at usual rates. Here the sum becomes one of its two neighbours, the nearer one more often, so that its mean is
    the exact sum. Gradients come to the optimizer in float32, and its moments are those of float32 parameters: AdamW
    then holds 2 + 8 bytes a parameter. The updates are such that plain `optax.apply_updates` ends on the rounded sum.

    Random bits follow from the seed, the number of updates in the state, and a parameter's place in the tree. So a run
    that goes on from a saved state has the same bits, and so has every sharding. Parameters in float32 are updated as
    without it.

    Args:
        optimizer: any optax transformation.
        seed: of the random bits.

    Returns:
        The transformation. Its updates are float32, and it needs `params`.

    Raises:
        ValueError: from `update`, that `params` are missing.
        TypeError: from `init` and `update`, that a parameter has another dtype of 16 bits or less.

    Example:
        >>> params = jnp.ones(10_000, jnp.bfloat16)  # its neighbour above is 1 + 1/128
        >>> optimizer = stochastic_rounding(optax.sgd(1.0))
        >>> updates, state = optimizer.update(jnp.full_like(params, -1 / 1024), optimizer.init(params), params)
        >>> moved = optax.apply_updates(params, updates)
        >>> moved.dtype, round(float(jnp.mean(moved > 1)), 1)  # an eighth of them
        (dtype(bfloat16), 0.1)

    References:
        Gupta et al., "Deep Learning with Limited Numerical Precision", 2015 (arXiv:1502.02551); Zamirai et al.,
        "Revisiting BFloat16 Training", 2020 (arXiv:2010.06192).
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params):
        as_float32 = lambda x: jax.ShapeDtypeStruct(x.shape, _at_least_float32(x.dtype))
        _check_dtypes(params)
        wanted = jax.tree.leaves(jax.eval_shape(inner.init, jax.tree.map(as_float32, params)))
        leaves, structure = jax.tree.flatten(inner.init(params))
        for i, like in enumerate(wanted):  # one by one: the moments of 16 bits are freed as those of 32 are made
            leaves[i] = leaves[i] if leaves[i].dtype == like.dtype else leaves[i].astype(like.dtype)
        return StochasticRoundingState(jnp.zeros((), jnp.int32), jax.tree.unflatten(structure, leaves))

    def update(grads, state, params=None, **extra):
        if params is None:
            raise ValueError("stochastic_rounding: params=None. Pass them: optimizer.update(grads, state, params).")
        _check_dtypes(params)
        wide = lambda tree: jax.tree.map(lambda x: x.astype(_at_least_float32(x.dtype)), tree)
        with promotions():
            updates, inner_state = inner.update(wide(grads), state.inner_state, wide(params), **extra)
            count = optax.safe_increment(state.step)
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), state.step)
        structure = jax.tree.structure(params)
        keys = jax.tree.unflatten(structure, [jax.random.fold_in(key, i) for i in range(structure.num_leaves)])
        updates = jax.tree.map(_to_a_neighbour, params, updates, keys)
        return updates, StochasticRoundingState(count, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _at_least_float32(dtype):
    is_small = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if is_small else dtype


def _check_dtypes(params):
    for path, x in jax.tree.leaves_with_path(params):
        if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize <= 2 and x.dtype != jnp.bfloat16:
            raise TypeError(
                f"stochastic_rounding: {jax.tree_util.keystr(path)} is {x.dtype}, and must be bfloat16 or wider. Train "
                "float32 parameters, and let the model compute in another dtype: LlamaForCausalLM(…, dtype=…)."
            )


def _to_a_neighbour(param, update, key):
    """The update after which a bfloat16 parameter is one of the two neighbours of param + update."""
    if param.dtype != jnp.bfloat16:
        return update
    start = param.astype(jnp.float32)
    total = start + update
    # bfloat16 is float32's upper half. Random lower bits carry into it as often as its own lower bits say.
    place = jax.typeof(total).sharding  # on Explicit axes each device makes the bits of its own part if told to
    place = place if AxisType.Explicit in place.mesh.axis_types else None
    noise = jax.random.bits(key, total.shape, jnp.uint16, out_sharding=place)
    bits = (jax.lax.bitcast_convert_type(total, jnp.uint32) + noise.astype(jnp.uint32)) & jnp.uint32(0xFFFF0000)
    # The difference is rounded to float32, which is too little to lead param + difference elsewhere in bfloat16.
    return jnp.where(jnp.isfinite(total), jax.lax.bitcast_convert_type(bits, jnp.float32) - start, update)
