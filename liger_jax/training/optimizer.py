"""Optimizers for `make_step`, and the learning rates that they follow.

`adamw` and `sgd` are optax's, with options to clip gradients, to hold their state in another dtype, and to train
parameters in bfloat16. A schedule is a function of the step, from 0, as in optax.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from liger_jax.models.core.parameters import matrices
from liger_jax.training.eight_bit import adamw_8bit
from liger_jax.training.rounding import check_numbers, check_rate, held_in, stochastic_rounding

Schedule = Callable[[Any], Any]
_Factor = Callable[[Any, Any], Any]  # of NumPy or jax.numpy, and a step
OPTIMIZERS = ("adamw", "adamw8bit", "sgd")


def cosine_schedule_with_warmup(peak: float, steps: int, *, warm_up: float = 0.03, end: float = 0.1) -> Schedule:
    """A linear warm-up to the peak, and a cosine decay over the remaining steps.

    Args:
        peak: the highest rate, a finite number, at least 0.
        steps: how many steps the whole run has, at least 1.
        warm_up: the fraction of the steps in which the rate rises. The first step has a rate above 0, and the last one
            of them the peak.
        end: the rate after the last step, as a fraction of the peak.

    Returns:
        A function of the step, from 0: an int, for which the host computes a float32, or an array.

    Example:
        >>> [round(float(cosine_schedule_with_warmup(1.0, 100)(step)), 2) for step in (0, 2, 50, 99)]
        [0.33, 1.0, 0.56, 0.1]
    """
    _check("cosine_schedule_with_warmup", peak, steps, warm_up=warm_up, end=end)
    rising, done = _phases(steps, warm_up)
    left = lambda lib, step: 0.5 + 0.5 * lib.cos(np.pi * done(lib, step))
    return _schedule(peak, lambda lib, step: lib.minimum(rising(lib, step), end + (1 - end) * left(lib, step)))


def linear_schedule_with_warmup(peak: float, steps: int, *, warm_up: float = 0.03, end: float = 0.0) -> Schedule:
    """A linear warm-up to the peak, and a linear decay over the remaining steps.

    Arguments and result are those of `cosine_schedule_with_warmup`.

    Example:
        >>> [round(float(linear_schedule_with_warmup(1.0, 100)(step)), 2) for step in (0, 50, 99)]
        [0.33, 0.5, 0.01]
    """
    _check("linear_schedule_with_warmup", peak, steps, warm_up=warm_up, end=end)
    rising, done = _phases(steps, warm_up)
    left = lambda lib, step: 1 - done(lib, step)
    return _schedule(peak, lambda lib, step: lib.minimum(rising(lib, step), end + (1 - end) * left(lib, step)))


def constant_schedule_with_warmup(peak: float, steps: int, *, warm_up: float = 0.03) -> Schedule:
    """A linear warm-up to the peak, which is then kept.

    Arguments and result are those of `cosine_schedule_with_warmup`.

    Example:
        >>> [round(float(constant_schedule_with_warmup(1.0, 100)(step)), 2) for step in (0, 2, 99)]
        [0.33, 1.0, 1.0]
    """
    _check("constant_schedule_with_warmup", peak, steps, warm_up=warm_up)
    rising, _ = _phases(steps, warm_up)
    return _schedule(peak, rising)


def adamw(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any = None,
    weight_decay: float = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
    decays_all: bool = True,
    max_norm: float | None = None,
    state_dtype: Any = None,
    seed: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`optax.adamw` with options that are common in training language models.

    Without the last four options it is `optax.adamw`, with the same parameters, defaults and updates. With `seed`, it
    computes in float32 and rounds parameters in bfloat16 as `stochastic_rounding` does.

    Args:
        learning_rate: a finite number, at least 0, or a schedule.
        b1: the decay of the first moment.
        b2: the decay of the second moment.
        eps: added to the root of the second moment.
        eps_root: added to the second moment under the root.
        mu_dtype: dtype of the first moment only; `None` for the parameter's.
        weight_decay: the fraction by which a step with learning rate 1 reduces each weight.
        mask: which parameters decay, as in `optax.adamw`: a tree of bools or a function of the parameters.
        nesterov: whether the first moment has Nesterov's momentum.
        decays_all: whether norms, biases and other vectors decay too. Most recipes leave them out.
        max_norm: if the norm of the gradient over all parameters is larger, the gradient is scaled down to it; `None`
            for no clipping.
        state_dtype: dtype of both moments, stored as by `held_in`, with `seed` or 0 as its seed; `None` for the
            parameter's, or float32 with `seed`.
        seed: seed of the stochastic rounding of parameters in bfloat16; `None` for rounding to nearest.

    Returns:
        The transformation. It needs `params`. With `seed` its updates are float32.

    Raises:
        ValueError: `mask` and `decays_all=False`, or `mu_dtype` and `state_dtype`, are given together; `state_dtype`
            is neither float32 nor bfloat16; or a number is out of its range.
        TypeError: `b1` or `b2` is an array of 16 bits.

    Example:
        >>> import jax
        >>> params = {"kernel": jnp.ones((2, 2)), "scale": jnp.ones(2)}
        >>> rate = cosine_schedule_with_warmup(1e-3, steps=100)
        >>> optimizer = adamw(rate, weight_decay=0.1, decays_all=False, max_norm=1.0)
        >>> updates, state = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
        >>> {name: bool(jnp.any(update != 0)) for name, update in updates.items()}
        {'kernel': True, 'scale': False}

    References:
        Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019 (arXiv:1711.05101).
    """
    check_rate("adamw", "learning_rate", learning_rate)
    check_numbers("adamw", b1=b1, b2=b2)
    if not decays_all:
        if mask is not None:
            raise ValueError("adamw: mask and decays_all=False both say which parameters decay. Pass one of them.")
        mask = matrices
    if mu_dtype is not None and state_dtype is not None:
        raise ValueError(
            f"adamw: mu_dtype={mu_dtype!r} and state_dtype={state_dtype!r} both set the dtype of the first moment. "
            "Pass one of them."
        )
    optimizer = optax.adamw(learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov=nesterov)
    return _finished(optimizer, max_norm, state_dtype, seed)


def sgd(
    learning_rate: float | Schedule,
    momentum: float | None = None,
    nesterov: bool = False,
    accumulator_dtype: Any = None,
    *,
    max_norm: float | None = None,
    seed: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`optax.sgd` with options that are common in training language models.

    Without the last two options it is `optax.sgd`, with the same parameters, defaults and updates. With `seed`, it
    computes in float32 and rounds parameters in bfloat16 as `stochastic_rounding` does. Other arguments are `adamw`'s.

    Args:
        momentum: the decay of the momentum; `None` for no momentum, and no state.
        nesterov: whether the momentum is Nesterov's.
        accumulator_dtype: dtype of the momentum; `None` for the parameter's.

    Returns:
        The transformation. With `seed` it needs `params`, and its updates are float32.

    Example:
        >>> params = {"kernel": jnp.ones((2, 2))}
        >>> optimizer = sgd(0.5)
        >>> optimizer.update(params, optimizer.init(params), params)[0]["kernel"].tolist()
        [[-0.5, -0.5], [-0.5, -0.5]]
    """
    check_rate("sgd", "learning_rate", learning_rate)
    optimizer = optax.sgd(learning_rate, momentum, nesterov, accumulator_dtype)
    return _finished(optimizer, max_norm, None, seed)


def optimizer_named(
    name: str,
    learning_rate: float | Schedule,
    *,
    b2: float = 0.999,
    weight_decay: float = 0.01,
    max_norm: float | None = 1.0,
    state_dtype: Any = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer of the commands by its name, with clipped gradients, for parameters in float32 and in bfloat16.

    The options are those of `adamw`; "sgd" has neither `b2` nor `weight_decay`.

    Args:
        name: "adamw"; "adamw8bit", which is `adamw_8bit` with the options of `adamw`; or "sgd".
        learning_rate: a finite number, at least 0, or a schedule.
        state_dtype: dtype of the moments of "adamw"; `None` for float32.

    Returns:
        The transformation. Its updates are float32, and it needs `params`.

    Raises:
        ValueError: no optimizer has this name, `state_dtype` is given for another optimizer than "adamw", or
            `learning_rate` or `max_norm` is out of its range.

    Example:
        >>> import jax
        >>> optimizer = optimizer_named("adamw8bit", 1e-3)
        >>> params = {"kernel": jnp.ones((64, 512))}
        >>> updates, state = optimizer.update(params, optimizer.init(params), params)
        >>> {str(x.dtype) for x in jax.tree.leaves(state) if x.shape == (64, 512)}
        {'uint8'}
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer={name!r} must be one of {OPTIMIZERS}.")
    if state_dtype is not None and name != "adamw":
        raise ValueError(f"state_dtype={state_dtype!r} is for optimizer='adamw', and {name!r} has its own. Pass None.")
    if name == "sgd":
        return sgd(learning_rate, max_norm=max_norm, seed=seed)
    decayed = dict(b2=b2, weight_decay=weight_decay)
    if name == "adamw8bit":
        return _finished(adamw_8bit(learning_rate, **decayed), max_norm, None, seed)
    return adamw(learning_rate, **decayed, max_norm=max_norm, state_dtype=state_dtype, seed=seed)


def _finished(optimizer, max_norm, state_dtype, seed):
    """The optimizer with the requested options, in this order: clipping, rounding, and the dtype of its state."""
    if max_norm is not None:
        if isinstance(max_norm, (int, float)) and not max_norm > 0:
            raise ValueError(f"max_norm={max_norm} must be more than 0; None does not clip gradients.")
        optimizer = optax.chain(optax.clip_by_global_norm(max_norm), optimizer)
    if seed is not None:
        optimizer = stochastic_rounding(optimizer, seed)
    return optimizer if state_dtype is None else held_in(optimizer, state_dtype, seed or 0)


def _schedule(peak: float, factor: _Factor) -> Schedule:
    """The schedule of this factor. For an int NumPy computes it, since eager JAX compiles each operation."""
    return lambda step: peak * (factor(np, np.float32(step)) if isinstance(step, int) else factor(jnp, step))


def _phases(steps: int, warm_up: float) -> tuple[_Factor, _Factor]:
    """The warm-up's factor, from above 0 to 1 at its last step, and the fraction of the decay, 0 until then."""
    num_rising = math.ceil(warm_up * steps) or 1
    num_falling = steps - num_rising + 1  # from the peak to the step after the last
    rising = lambda lib, step: lib.minimum((step + 1) / num_rising, 1.0)
    done = lambda lib, step: lib.clip((step + 1 - num_rising) / num_falling, 0.0, 1.0)
    return rising, done


def _check(name: str, peak: float, steps: int, **shares: float) -> None:
    check_rate(name, "peak", peak)
    if steps < 1:
        raise ValueError(f"{name}: steps={steps} must be at least 1.")
    for argument, share in shares.items():
        if not 0 <= share <= 1:
            raise ValueError(f"{name}: {argument}={share} is a share, and must be in [0, 1].")
