"""Stochastic rounding: an optimizer that trains bfloat16 parameters, and one whose moments are held in bfloat16."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from liger_jax.ops.layout import is_explicit

_MOMENTS = 2**32 - 1  # folded into the seed, a step that no run has: moments and parameters get different bits


@contextlib.contextmanager
def promotions() -> Iterator[None]:
    """A context in which an optimizer may promote dtypes and ranks, as optax's do, even if the program forbids it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class StochasticRoundingState(NamedTuple):
    """The state of `stochastic_rounding`.

    Attributes:
        step: the number of updates so far, which with the seed determines the next update's random bits.
        inner_state: the state of the optimizer, as for float32 parameters.
    """

    step: jax.Array
    inner_state: Any


def stochastic_rounding(
    optimizer: optax.GradientTransformation, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """An optimizer for bfloat16 parameters: it computes in float32, and rounds parameter + update stochastically.

    A bfloat16 number has 8 bits, so rounding to nearest loses every update below 1/512 of its parameter, as most of
    AdamW's are at usual learning rates. Here the sum is rounded to one of its two neighbours, the nearer one more
    often, so that the result is exact on average. The optimizer is given float32 gradients, and has moments as for
    float32 parameters: parameters and AdamW's moments take 2 + 8 bytes per parameter. Updates are such that plain
    `optax.apply_updates` results in the rounded sum.

    Random bits are determined by the seed, the number of updates in the state, and the parameter's position in the
    tree. So a run that resumes from a saved state has the same bits, and they do not depend on the sharding. Parameters
    in float32 are updated without rounding. The optimizer is initialised with a float32 copy of the parameters; under
    `jax.jit`, no copy is made if `init` only uses shapes.

    Args:
        optimizer: any optax transformation. It may contain `optax.inject_hyperparams`, whose numbers are then float32.
        seed: seed of the random bits.

    Returns:
        The transformation. Its updates are float32, and it needs `params`.

    Raises:
        ValueError: from `update`, if `params` are missing.
        TypeError: from `init` and `update`, if a parameter has another dtype of 16 bits or less.

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
        _check_dtypes(params)
        with promotions():
            return StochasticRoundingState(jnp.zeros((), jnp.int32), inner.init(_widened(params)))

    def update(grads, state, params=None, **extra):
        if params is None:
            raise ValueError("stochastic_rounding: params=None. Pass them: optimizer.update(grads, state, params).")
        _check_dtypes(params)
        with promotions():
            updates, inner_state = inner.update(_widened(grads), state.inner_state, _widened(params), **extra)
            count = optax.safe_increment(state.step)
        keys = _keys(jax.random.key(seed, impl="threefry2x32"), state.step, params)
        updates = jax.tree.map(_to_a_neighbour, params, updates, keys)
        return updates, StochasticRoundingState(count, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


class HeldState(NamedTuple):
    """The state of `held_in`.

    Attributes:
        step: the number of updates so far, which with the seed determines the next update's random bits.
        inner_state: the state of the optimizer, whose arrays of parameters' shapes have the dtype.
    """

    step: jax.Array
    inner_state: Any


def held_in(
    optimizer: optax.GradientTransformation, dtype: Any, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that computes in float32, and whose moments are stored in bfloat16 between steps.

    With b2 = 0.999, a step changes a second moment by a thousandth at most, and a bfloat16 number has 8 bits: rounded
    to nearest, a moment would never decrease. So each moment is rounded stochastically to one of its two neighbours, as
    in `stochastic_rounding`, and is exact on average. Random bits are determined by the seed, the number of updates,
    and the moment's position in the state.

    Args:
        optimizer: any optax transformation, also one with `stochastic_rounding`.
        dtype: bfloat16; or float32, which changes nothing. It applies to floating-point arrays of a parameter's shape.
            Scalars, such as those of `optax.inject_hyperparams`, and arrays of other shapes keep their dtype.
        seed: seed of the random bits.

    Returns:
        The transformation.

    Raises:
        ValueError: `dtype` is another one. In float16 the second moments of small gradients would be 0.

    Example:
        >>> optimizer = held_in(optax.adam(1e-3), jnp.bfloat16)
        >>> optimizer.init(jnp.ones(3)).inner_state[0].mu.dtype
        dtype(bfloat16)

    References:
        Zamirai et al., "Revisiting BFloat16 Training", 2020 (arXiv:2010.06192).
    """
    if (dtype := jnp.dtype(dtype)) not in (jnp.bfloat16, jnp.float32):
        raise ValueError(
            f"held_in: dtype={dtype.name} must be bfloat16 or float32. In other dtypes, the moments of small gradients "
            "would be lost."
        )
    inner = optax.with_extra_args_support(optimizer)

    def held(state, step, params):
        shapes = {x.shape for x in jax.tree.leaves(params) if x.ndim}
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), _MOMENTS)

        def of(x, key):
            if x.shape not in shapes or not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == dtype:
                return x
            return (_at_random(x.astype(jnp.float32), key) if dtype == jnp.bfloat16 else x).astype(dtype)

        return jax.tree.map(of, state, _keys(key, step, state))

    def init(params):
        step = jnp.zeros((), jnp.int32)
        return HeldState(step, held(inner.init(_widened(params)), step, params))

    def update(grads, state, params=None, **extra):
        updates, inner_state = inner.update(_widened(grads), _widened(state.inner_state), params, **extra)
        count = optax.safe_increment(state.step)
        return updates, HeldState(count, held(inner_state, count, grads))

    return optax.GradientTransformationExtraArgs(init, update)


def check_numbers(function: str, **numbers: Any) -> None:
    """Refuses numbers that are arrays of 16 bits or less, in which 0.999 is 1."""
    for name, x in numbers.items():
        dtype = getattr(x, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
            raise TypeError(
                f"{function}: {name} is an array of {dtype}, which cannot represent 0.999, and must be float32. With "
                "optax.inject_hyperparams, pass hyperparam_dtype=jnp.float32, or wrap it in stochastic_rounding."
            )


def check_rate(function: str, name: str, rate: Any) -> None:
    """Refuses a value that is not a learning rate. A schedule and a tracer are not checked."""
    if not callable(rate) and not isinstance(rate, Tracer) and not 0 <= rate < math.inf:
        raise ValueError(f"{function}: {name}={rate} must be a finite number, at least 0.")


def _widened(tree):
    """The tree with float32 in place of shorter floats."""
    is_short = lambda x: jnp.issubdtype(x.dtype, jnp.floating) and jnp.dtype(x.dtype).itemsize < 4
    return jax.tree.map(lambda x: x.astype(jnp.float32) if is_short(x) else x, tree)


def _keys(key, step, tree):
    """A key for each leaf of a tree, in this step."""
    key, structure = jax.random.fold_in(key, step), jax.tree.structure(tree)
    return jax.tree.unflatten(structure, [jax.random.fold_in(key, i) for i in range(structure.num_leaves)])


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
    # The difference is rounded to float32, which is too small an error to change param + difference in bfloat16.
    return jnp.where(jnp.isfinite(total), _at_random(total, key) - start, update)


def _at_random(x, key):
    """One of the two neighbours in bfloat16 of each float32 number, in float32. What is not finite stays so."""
    # bfloat16 is the upper half of float32. Adding random lower bits carries into it with the right probability.
    # On Explicit axes each device makes the bits of its own shard, if the sharding is passed.
    place = jax.typeof(x).sharding if is_explicit(x) else None
    noise = jax.random.bits(key, x.shape, jnp.uint16, out_sharding=place)
    bits = (jax.lax.bitcast_convert_type(x, jnp.uint32) + noise.astype(jnp.uint32)) & jnp.uint32(0xFFFF0000)
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(bits, jnp.float32), x)
