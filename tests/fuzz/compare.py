"""Runs a case and its formula on the same numbers, and says what is wrong.

The truth is the formula in float64 on the host's CPU. How far a result may be from it follows from the case's own
numbers: every input is changed by one rounding of the least exact dtype among them, up or down at random, and plain JAX
computes the formula in float32, where every sum, product and exponential is changed by one rounding of float32. (So
what cancels shows its rounding, as p − 1 does where one token is allowed.) That is as near to the truth as rounded
inputs and float32 let one come. A result may be `MARGIN` times as far from it, and as many roundings of its largest
value farther: an op rounds a few times where the inputs are rounded once.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from tests.fuzz.case import Arrays, Case, Draw, described

MARGIN = 8.0
PROBES = 4  # runs in float32 on rounded inputs: one of them may be near the truth by chance
FILLS = 3  # sets of numbers for each program
# One rounding of what a product takes of float32 at an accelerator's default precision: TF32 and bfloat16.
PRODUCT_ROUNDING = {"cpu": 2.0**-24, "gpu": 2.0**-11, "tpu": 2.0**-8}
CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat", "custom_jvp_call", "custom_vjp_call")
# What rounds: a copy, a maximum or a choice is exact, and a formula may compare with it.
ROUNDS = (
    "add", "add_any", "sub", "mul", "div", "square", "integer_pow", "pow", "sqrt", "rsqrt", "dot_general",
    "reduce_sum", "cumsum", "exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "erf", "sin", "cos",
)  # fmt: skip
LARGEST_HALF_GRADIENT = 16.0  # as a loss scale makes it: float16 has 2⁻²⁴ below and 65,504 above
# More would make an overflow of float32's rounding of 1 in p − 1, where the model is sure of the label.
LARGEST_LOSS_SCALE = 2.0**16


@dataclasses.dataclass(frozen=True)
class Where:
    """The device, and the precision of its float32 products: None for its default, or "highest"."""

    platform: str
    precision: str | None


def misses(case: Case, draw: Draw, where: Where) -> Iterator[str]:
    """A sentence for each thing that is wrong with a case."""
    ours, truth, outputs = _value_and_gradients(case.ours), _value_and_gradients(case.truth), None
    shaken = None
    for fill in range(FILLS):
        arrays, constants = case.inputs(draw)
        inputs = f"{described({**arrays, **constants})}; {case.says}; numbers {fill}"
        if case.refuses:  # its formula need not exist
            yield from (f"{sentence}\n    {inputs}" for sentence in _not_refused(case, arrays, constants))
            return
        outputs = _outputs(case, arrays, constants) if outputs is None else outputs
        shaken = _shaken(truth, _underflow(case, arrays)) if shaken is None else shaken
        expected = _Truth(case, truth, shaken, outputs, arrays, constants, draw, where)
        try:
            with jax.default_matmul_precision(where.precision):
                found = jax.tree.map(np.asarray, ours(arrays, constants, expected.cotangents))
        except Exception as error:  # noqa: BLE001  # a legal case raises nothing
            if not _names(error, case.may_refuse):
                yield f"raises {type(error).__name__}: {str(error)[:500]}\n    {inputs}"
            return
        sentences = [*expected.wrong(found), *_loud_rows(case, found, constants)]
        yield from (f"{sentence}\n    {inputs}" for sentence in sentences)


class _Truth:
    """The formula's outputs and gradients, and how far from them is near enough."""

    def __init__(
        self,
        case: Case,
        truth: Callable,
        shaken: Callable,
        outputs: Any,
        arrays: Arrays,
        constants: Arrays,
        draw: Draw,
        where: Where,
    ) -> None:
        self.rounding = _rounding(case, {**arrays, **constants}, where)
        self.depth, self.cancels = case.depth, case.cancels
        wide = _widened(arrays), _widened(constants)
        # Exact in 16 bits.
        cotangents = jax.tree.map(lambda y: np.asarray(draw.rng.integers(-64, 65, y.shape) / 32.0), outputs)
        values = _run(truth, *wide, cotangents)
        self.cotangents = jax.tree.map(lambda g: np.asarray(_loss_scale(case, values, arrays, outputs) * g), cotangents)
        inputs = *wide, self.cotangents
        self.values = _run(truth, *inputs)
        self.probes = [_run(shaken, *self._rounded(inputs, draw), x64=False) for _ in range(PROBES)]

    def _rounded(self, inputs: Any, draw: Draw) -> Any:
        """The inputs with every float one rounding up or down."""

        def rounded(x):
            moved = x * (1 + self.rounding * draw.rng.choice([-1.0, 1.0], x.shape))
            return moved.astype(np.float32) if x.dtype == np.float64 else x

        return jax.tree.map(rounded, inputs)

    def wrong(self, found: Arrays) -> Iterator[str]:
        """A sentence for each output or gradient that is not near enough."""
        gradients = [self.values[name] for name in self.values if not name.startswith("output")]
        largest_gradient = max((np.max(np.abs(g), where=np.isfinite(g), initial=0.0) for g in gradients), default=0.0)
        cancelled = 2.0**-22 * largest_gradient if self.cancels else 0.0  # a sum's roundings in float32
        for name, expected in self.values.items():
            x = found[name]
            if x.shape != expected.shape:
                yield f"{name} has shape {x.shape}, and its formula {expected.shape}"
                continue
            largest = float(jnp.finfo(x.dtype).max)
            # Accelerators take float32's subnormal numbers for 0, and not those of float16.
            smallest = max(float(jnp.finfo(x.dtype).smallest_subnormal), float(jnp.finfo(jnp.float32).tiny))
            value, finite = x.astype(np.float64), np.abs(expected) < largest
            if np.any(np.isnan(value) != np.isnan(expected)):
                yield f"{name} is NaN where the truth is not, or not where the truth is: {_first(value, expected)}"
                continue
            distance = lambda y, of=expected, at=finite: np.max(np.abs(y - of), where=at, initial=0.0)
            size = np.max(np.abs(expected), where=finite, initial=0.0)
            moved = max(distance(np.where(np.isfinite(probe[name]), probe[name], expected)) for probe in self.probes)
            allowed = MARGIN * (self.depth * (moved + self.rounding * size + cancelled) + smallest)
            is_near = finite & (np.abs(expected) + allowed < largest)
            if np.any(np.isfinite(value) & np.isinf(expected) | ~np.isfinite(value) & is_near):
                yield f"{name} is infinite where the truth is not, or not where it is: {_first(value, expected)}"
                continue
            distance = lambda y, of=expected, at=is_near: np.max(np.abs(y - of), where=at, initial=0.0)
            if distance(value) > allowed:
                off = np.abs(np.where(is_near, value - expected, 0.0))
                at = np.unravel_index(np.argmax(off), off.shape)
                place = f"[{', '.join(map(str, at))}]" if at else ""
                yield (
                    f"{name} is off by {distance(value):.3g} where {allowed:.3g} is allowed; at {name}{place}: "
                    f"{value[at]:.7g} for {expected[at]:.7g}"
                )


def _underflow(case: Case, arrays: Arrays) -> float:
    """What a float16 number may lose where it is next to nothing: half its smallest step; 0 where there is none."""
    is_half = jnp.float16 in (case.computes_in, *(x.dtype for x in arrays.values()))
    return float(jnp.finfo(jnp.float16).smallest_subnormal) / 2 if is_half else 0.0


def _shaken(function: Callable, underflow: float) -> Callable:
    """A function with every sum, product and exponential one rounding up or down."""

    count = itertools.count(1)

    def shake(x):
        if x.dtype != jnp.float32:
            return x
        # A hash of the number and of its place in the formula, so that two places do not undo each other.
        place = jnp.uint32(next(count) * 0x9E3779B9 % 2**32)
        hashed = (jax.lax.bitcast_convert_type(x, jnp.uint32) ^ place) * jnp.uint32(0x85EBCA6B)
        sign = 1.0 - 2.0 * (hashed >> 31).astype(jnp.float32)
        return jnp.where(x == 0, x, x * (1.0 + sign * 2.0**-23) + sign * underflow)

    def run(jaxpr, constants, *arguments):
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))
        read = lambda v: v.val if isinstance(v, Literal) else values[v]
        for equation in jaxpr.eqns:
            inputs = [read(v) for v in equation.invars]
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            if equation.primitive.name in CALLS:
                found = run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), *inputs)
            else:
                found = equation.primitive.bind(*inputs, **equation.params)
                found = found if equation.primitive.multiple_results else [found]
                if equation.primitive.name in ROUNDS:
                    found = [shake(x) for x in found]
            values.update(zip(equation.outvars, found, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def shaken(*arguments):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        found = run(closed.jaxpr, closed.consts, *jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    return jax.jit(shaken)


def _value_and_gradients(function: Callable) -> Callable:
    """A compiled function of arrays, constants and cotangents: outputs by number, and gradients by name."""

    def run(arrays, constants, cotangents):
        value, pullback = jax.vjp(lambda arrays: function(**arrays, **constants), arrays)
        (gradients,) = pullback(jax.tree.map(lambda y, g: jnp.asarray(g).astype(y.dtype), value, cotangents))
        outputs = {f"output {i}": y for i, y in enumerate(jax.tree.leaves(value))}
        return outputs | {f"d{name}": g for name, g in gradients.items()}

    return jax.jit(run)


def _outputs(case: Case, arrays: Arrays, constants: Arrays) -> Any:
    """The types of the formula's outputs."""
    with _plain_jax(x64=True):
        return jax.eval_shape(lambda a, c: case.truth(**a, **c), _widened(arrays), _widened(constants))


def _rounding(case: Case, arrays: Arrays, where: Where) -> float:
    """One rounding, as a share of a number, of the least exact dtype that the case computes in."""
    dtypes = [x.dtype for x in arrays.values() if jnp.issubdtype(x.dtype, jnp.floating)]
    dtypes += [case.computes_in or jnp.float32]
    rounding = max(float(jnp.finfo(dtype).eps) / 2 for dtype in dtypes)
    rounds_products = case.has_products and where.precision is None
    return max(rounding, PRODUCT_ROUNDING[where.platform]) if rounds_products else rounding


def _loss_scale(case: Case, values: Arrays, arrays: Arrays, outputs: Any) -> float:
    """The power of 2 that brings the largest gradient in float16 near to where float16 is exact; 1 without any."""
    half = [values[f"d{name}"] for name, x in arrays.items() if jnp.float16 in (x.dtype, case.computes_in)]
    largest = max((np.max(np.abs(g), where=np.isfinite(g), initial=0.0) for g in half), default=0.0)
    # A cotangent is at most twice the scale, and has its output's dtype: float16 where it is shaped like such an array.
    shapes = [x.shape for x in arrays.values() if x.dtype == jnp.float16]
    most = 2.0**14 if any(y.shape in shapes for y in jax.tree.leaves(outputs)) else LARGEST_LOSS_SCALE
    return min(2.0 ** round(math.log2(LARGEST_HALF_GRADIENT / largest)), most) if largest else 1.0


def _run(truth: Callable, *inputs: Any, x64: bool = True) -> Arrays:
    with _plain_jax(x64):
        return jax.tree.map(lambda x: np.asarray(x, np.float64), truth(*inputs))


@contextlib.contextmanager
def _plain_jax(x64: bool) -> Iterator[None]:
    """The host's CPU, with products as exact as their operands."""
    with (
        jax.enable_x64(x64),
        jax.default_device(jax.devices("cpu")[0]),
        jax.default_matmul_precision("highest"),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        yield


def _widened(arrays: Arrays) -> Arrays:
    widen = lambda x: np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x)
    return jax.tree.map(widen, arrays)


def _first(value: np.ndarray, expected: np.ndarray) -> str:
    differs = (np.isnan(value) != np.isnan(expected)) | (np.isinf(value) != np.isinf(expected))
    at = tuple(int(i) for i in np.argwhere(differs)[0])
    return f"{value[at]} for {expected[at]} at {at}, one of {differs.sum()} of {differs.size}"


def _loud_rows(case: Case, found: Arrays, constants: Arrays) -> Iterator[str]:
    """A sentence for each gradient that is not exactly 0 where rows do not count."""
    for name, mask in case.silent.items():
        rows = np.asarray(constants[mask])
        if np.any(found[f"d{name}"][rows] != 0):
            yield f"d{name} is not exactly 0 in rows that do not count"


def _not_refused(case: Case, arrays: Arrays, constants: Arrays) -> Iterator[str]:
    """A sentence unless an illegal case is refused by an error that names its argument."""
    try:
        jax.eval_shape(lambda arrays, constants: case.ours(**arrays, **constants), arrays, constants)
    except Exception as error:  # noqa: BLE001  # its kind is what is judged
        if not _names(error, (case.refuses,)):
            yield f"is refused by {type(error).__name__}, which does not name {case.refuses}: {str(error)[:500]}"
    else:
        yield f"takes {case.refuses} without a word"


def _names(error: Exception, arguments: tuple[str | None, ...]) -> bool:
    """Whether it is an error of ours that names one of the arguments."""
    return isinstance(error, (ValueError, TypeError)) and any(str(name) in str(error) for name in arguments)
