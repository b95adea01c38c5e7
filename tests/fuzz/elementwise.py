"""Cases of ops on rows: norms, gated units, activations, softmax, the gated feed-forward."""

import functools

import jax.numpy as jnp

from liger_jax import ops
from tests.fuzz.case import Case, Draw, options_text
from tests.ops.references import glu as glu_formulas
from tests.ops.references import norms, plain

WIDTH = dict(most=150, most_if_large=9000)


def _rows(draw: Draw):
    """The shape and dtype of an array of rows."""
    width = draw.size(**WIDTH)
    return (*draw.leading(40, max(1, min(700, 2_000_000 // width))), width), draw.dtype()


def _norm_options(draw: Draw, **others):
    """Options of a norm, and its epsilon if that is illegal."""
    options = draw.optional(eps=(1e-6, 1e-5, 0.0, 1.0), **others)
    if draw.chance(0.03):
        return options | {"eps": draw.pick(-1.0, float("nan"))}, "eps"
    return options, None


def _scaled(draw: Draw, shape, dtype):
    """Numbers of one magnitude. Rows at 0 are as ordinary as a padded token."""
    x = draw.normal(shape, dtype, draw.magnitude())
    return x.at[..., :1, :].set(0) if len(shape) > 1 and draw.chance(0.2) else x


def rms_norm(draw: Draw) -> Case:
    shape, dtype = _rows(draw)
    options, refused = _norm_options(draw, offset=(1.0,), casting_mode=("llama", "gemma", "none"))
    scale_dtype, with_scale = draw.like(dtype), draw.chance(0.8)

    def inputs(draw):
        arrays = {"x": _scaled(draw, shape, dtype)}
        return arrays | ({"scale": draw.normal(shape[-1:], scale_dtype)} if with_scale else {}), {}

    formula = {"eps": options.get("eps", 1e-6), "offset": options.get("offset", 0.0)}
    return Case(
        "rms_norm",
        lambda x, scale=None: ops.rms_norm(x, scale, **options),
        lambda x, scale=None: norms.rms_norm(x, scale, **formula),
        inputs,
        options_text(options),
        refuses=refused,
    )


def fused_add_rms_norm(draw: Draw) -> Case:
    shape, dtype = _rows(draw)
    options, refused = _norm_options(draw, offset=(1.0,), casting_mode=("llama", "gemma", "none"))
    residual_dtype, scale_dtype, with_residual = draw.like(dtype), draw.like(dtype), draw.chance(0.8)

    def inputs(draw):
        arrays = {"x": _scaled(draw, shape, dtype), "scale": draw.normal(shape[-1:], scale_dtype)}
        return arrays | ({"residual": _scaled(draw, shape, residual_dtype)} if with_residual else {}), {}

    def truth(x, scale, residual=0.0):
        formula = {"eps": options.get("eps", 1e-6), "offset": options.get("offset", 0.0)}
        return norms.fused_add_rms_norm(x, residual, scale, **formula)

    return Case(
        "fused_add_rms_norm",
        lambda x, scale, residual=None: ops.fused_add_rms_norm(x, residual, scale, **options),
        truth,
        inputs,
        options_text(options),
        refuses=refused,
    )


def layer_norm(draw: Draw) -> Case:
    shape, dtype = _rows(draw)
    options, refused = _norm_options(draw)
    parameters = {name: draw.like(dtype) for name in ("scale", "bias") if draw.chance(0.7)}
    shift = draw.pick(0.0, 0.0, 3.0)

    def inputs(draw):
        arrays = {"x": draw.normal(shape, dtype, draw.magnitude()) + jnp.asarray(shift, dtype)}
        return arrays | {name: draw.normal(shape[-1:], own) for name, own in parameters.items()}, {}

    return Case(
        "layer_norm",
        lambda x, scale=None, bias=None: ops.layer_norm(x, scale, bias, **options),
        lambda x, scale=None, bias=None: norms.layer_norm(x, scale, bias, eps=options.get("eps", 1e-6)),
        inputs,
        options_text(options),
        refuses=refused,
    )


def group_norm(draw: Draw) -> Case:
    groups, of_each = draw.size(5), draw.size(6)
    options, refused = _norm_options(draw)
    shape, dtype = (
        (draw.pick(0, 1, 2, 3), groups * of_each, *(draw.size(7, 60) for _ in range(draw.pick(0, 1, 2)))),
        draw.dtype(),
    )
    axis = draw.pick(1, 1, -1)
    shape = shape if axis == 1 else (shape[0], *shape[2:], shape[1])
    options = {**options, "num_groups": groups, "channel_axis": axis}
    parameters = {name: draw.like(dtype) for name in ("scale", "bias") if draw.chance(0.7)}

    def inputs(draw):
        arrays = {"x": draw.normal(shape, dtype, draw.magnitude())}
        return arrays | {name: draw.normal((groups * of_each,), own) for name, own in parameters.items()}, {}

    return Case(
        "group_norm",
        lambda x, scale=None, bias=None: ops.group_norm(x, scale, bias, **options),
        lambda x, scale=None, bias=None: plain.group_norm(x, scale, bias, **{"eps": 1e-6, **options}) if len(x) else x,
        inputs,
        options_text(options),
        refuses=refused,
    )


def dyt(draw: Draw) -> Case:
    shape, dtype = _rows(draw)
    parameters = {name: draw.like(dtype) for name in ("scale", "bias") if draw.chance(0.7)}

    def inputs(draw):
        arrays = {"x": draw.normal(shape, dtype, draw.magnitude()), "alpha": draw.uniform((), jnp.float32)}
        return arrays | {name: draw.normal(shape[-1:], own) for name, own in parameters.items()}, {}

    truth = lambda x, alpha, scale=None, bias=None: plain.dyt(x, alpha, scale, bias)
    return Case("dyt", lambda **arrays: ops.dyt(**arrays), truth, inputs)


def poly_norm(draw: Draw) -> Case:
    shape, dtype = _rows(draw)
    options, refused = _norm_options(draw)
    with_bias = draw.chance(0.5)

    def inputs(draw):
        arrays = {"x": draw.normal(shape, dtype, draw.magnitude()), "weight": draw.uniform((3,), dtype)}
        return arrays | ({"bias": draw.normal((), dtype)} if with_bias else {}), {}

    return Case(
        "poly_norm",
        lambda **arrays: ops.poly_norm(**arrays, **options),
        lambda x, weight, bias=None: plain.poly_norm(x, weight, bias, eps=options.get("eps", 1e-6)),
        inputs,
        options_text(options),
        refuses=refused,
    )


def gated_rms_norm(draw: Draw) -> Case:
    shape, dtype = _rows(draw)
    options, refused = _norm_options(draw)
    gate_dtype, scale_dtype, with_scale = draw.like(dtype), draw.like(dtype), draw.chance(0.8)

    def inputs(draw):
        arrays = {"x": _scaled(draw, shape, dtype), "gate": draw.normal(shape, gate_dtype, 1.0)}
        return arrays | ({"scale": draw.normal(shape[-1:], scale_dtype)} if with_scale else {}), {}

    return Case(
        "gated_rms_norm",
        lambda **arrays: ops.gated_rms_norm(**arrays, **options),
        lambda **arrays: norms.gated_rms_norm(**arrays, eps=options.get("eps", 1e-6)),
        inputs,
        options_text(options),
        refuses=refused,
    )


def relu_squared(draw: Draw) -> Case:
    shape, dtype = _rows(draw)
    inputs = lambda draw: ({"x": draw.normal(shape, dtype, draw.magnitude())}, {})
    return Case("relu_squared", lambda x: ops.relu_squared(x), plain.relu_squared, inputs)


def _along_an_axis(name: str, draw: Draw) -> Case:
    shape, dtype = _rows(draw)
    options = draw.optional(axis=tuple(range(-len(shape), len(shape))))
    if any(n == 0 for n in shape):  # an axis of no elements has no largest one
        options = {}

    def inputs(draw):
        return {"x": draw.normal(shape, dtype, draw.magnitude())}, {}

    return Case(
        name,
        lambda x: getattr(ops, name)(x, **options),
        lambda x: getattr(plain, name)(x, **options),
        inputs,
        options_text(options),
    )


softmax = functools.partial(_along_an_axis, "softmax")
sparsemax = functools.partial(_along_an_axis, "sparsemax")


def _gated(name: str, draw: Draw, activation: str, **options) -> Case:
    shape, dtype = _rows(draw)
    together, up_dtype = draw.chance(0.3), draw.like(dtype)

    def inputs(draw):
        if together:
            return {"gate": draw.normal((*shape[:-1], 2 * shape[-1]), dtype, draw.magnitude())}, {}
        return {"gate": draw.normal(shape, dtype, draw.magnitude()), "up": draw.normal(shape, up_dtype)}, {}

    return Case(
        name,
        lambda gate, up=None: getattr(ops, name)(gate, up, **options),
        lambda gate, up=None: glu_formulas.gated(gate, up, activation=activation),
        inputs,
        options_text(options),
    )


def swiglu(draw: Draw) -> Case:
    return _gated("swiglu", draw, "silu")


def geglu(draw: Draw) -> Case:
    options = draw.optional(approximate=(True, False))
    return _gated("geglu", draw, "gelu_tanh" if options.get("approximate", True) else "gelu", **options)


def gated_mlp(draw: Draw) -> Case:
    width, inner, dtype = draw.size(40, 600), draw.size(60, 1500), draw.dtype()
    shape = (*draw.leading(30, 500), width)
    options = draw.optional(activation=("silu", "gelu_tanh", "gelu"), recomputed=(True,))

    def inputs(draw):
        kernels = {"gate_kernel": (width, inner), "up_kernel": (width, inner), "down_kernel": (inner, width)}
        arrays = {name: draw.normal(own, dtype, own[0] ** -0.5) for name, own in kernels.items()}
        return {"x": draw.normal(shape, dtype, draw.magnitude()), **arrays}, {}

    def truth(x, gate_kernel, up_kernel, down_kernel):
        activation = options.get("activation", "silu")
        return glu_formulas.gated(x @ gate_kernel, x @ up_kernel, activation=activation) @ down_kernel

    ours = lambda **arrays: ops.gated_mlp(**arrays, **options)
    return Case("gated_mlp", ours, truth, inputs, options_text(options), has_products=True, depth=2)
