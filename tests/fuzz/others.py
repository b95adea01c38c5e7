"""Cases of public functions without derivatives: tables, quantised weights, and the plan of a loss."""

import jax.numpy as jnp
import numpy as np

from liger_jax import ops
from liger_jax.ops.block_quantized import NF4
from tests.fuzz.case import Case, Draw, options_text


def rope_table(draw: Draw) -> Case:
    width, shape = 2 * draw.size(64), draw.pick((1, 0), (1, draw.size(50)), (3, 2, draw.size(50)))
    options = draw.optional(theta=(10000.0, 500.0, 1e6))
    factor = draw.pick(None, None, 1.0, 4.0)
    scaling = {} if factor is None else {"scaling": ops.LinearRope(factor=factor)}

    def truth(positions):
        theta = options.get("theta", 10000.0)
        frequencies = theta ** (-2 * jnp.arange(width // 2) / width) / (factor or 1.0)
        angles = positions[..., None] * jnp.concatenate([frequencies, frequencies])
        return jnp.cos(angles), jnp.sin(angles)

    def inputs(draw):
        return {}, {"positions": draw.integers(draw.pick(40, 2**17), shape)}

    ours = lambda positions: ops.rope_table(positions, width, **options, **scaling)
    return Case("rope_table", ours, truth, inputs, options_text({"width": width, **options, **scaling}))


def block_quantized(draw: Draw) -> Case:
    kind, axis, block = draw.pick("nf4", "int8"), draw.pick(-1, -2), 2 * draw.size(32)
    shape, dtype = [draw.size(20), draw.size(20)], draw.dtype()
    shape[axis] = block * draw.size(4)
    # Half the widest gap between codes, and the rounding of a block's scale to bfloat16.
    widest = max(np.diff(NF4)) if kind == "nf4" else 1 / 127
    within = float(widest / 2 + 2**-8)

    def ours(weight):
        """The largest error as a share of a block's largest value, or what it may be if that is more."""
        found = ops.block_quantized(weight, kind, block_size=block, axis=axis).astype(jnp.float32)
        rows = lambda x: jnp.moveaxis(x.astype(jnp.float32), axis, -1).reshape(-1, block)
        scale = jnp.maximum(jnp.max(jnp.abs(rows(weight)), axis=1, keepdims=True), 1e-30)
        return jnp.max(jnp.abs(rows(found) - rows(weight)) / scale, initial=within)

    return Case(
        "block_quantized",
        ours,
        lambda weight: jnp.full((), within),
        lambda draw: ({}, {"weight": draw.normal(tuple(shape), dtype, draw.magnitude())}),
        options_text({"kind": kind, "block_size": block, "axis": axis}),
    )


def plan_fused_linear_cross_entropy(draw: Draw) -> Case:
    sizes = [draw.size(30_000), draw.size(8000), draw.size(300_000)]
    options = draw.optional(
        dtype=(jnp.float32, jnp.float16), weight_dtype=(jnp.float32,), reduction=("sum", "none"), logit_softcap=(30.0,),
        differentiated=(("hidden",), ("weight",), ()), mode=("fast", "lean"), chunk_size=(1, 37),
        memory_budget_bytes=(10**6, 10**9),
    )  # fmt: skip

    def ours(most):
        """The bytes that a plan takes, if they are more than what it may take."""
        plan = ops.plan_fused_linear_cross_entropy(*sizes, **options)
        return jnp.maximum(jnp.float32(plan.extra_bytes), most)

    most = options.get("memory_budget_bytes", 2**62)
    return Case(
        "plan_fused_linear_cross_entropy",
        ours,
        lambda most: most,
        lambda draw: ({}, {"most": jnp.float32(most)}),
        f"{sizes} {options_text(options)}",
        may_refuse=("memory_budget_bytes", "mode"),
    )
