"""The products of mixtures of experts, of groups of any size and tokens with any experts."""

import jax.numpy as jnp
import numpy as np

from liger_jax import ops
from tests.fuzz.case import Case, Draw, options_text
from tests.ops.references import grouped_matmul as reference


def grouped_matmul(draw: Draw) -> Case:
    groups, k, n, dtype = draw.size(5, 40), draw.size(40, 500), draw.size(40, 500), draw.dtype()
    sizes = draw.rng.multinomial(draw.size(60, 1500), draw.rng.dirichlet(np.full(groups, 0.5)))
    rows = int(sizes.sum()) + draw.pick(0, draw.size(20))  # those behind the groups give zero
    options = draw.optional(transpose_w=(True,))
    kernel = (groups, n, k) if options else (groups, k, n)

    def inputs(draw):
        arrays = {"x": draw.normal((rows, k), dtype, draw.magnitude()), "w": draw.normal(kernel, dtype, k**-0.5)}
        return arrays, {"group_sizes": jnp.asarray(sizes, jnp.int32)}

    ours = lambda **arrays: ops.grouped_matmul(**arrays, **options)
    truth = lambda **arrays: reference.grouped_matmul(**arrays, **options)
    return Case("grouped_matmul", ours, truth, inputs, options_text(options), has_products=True)


def moe_mlp(draw: Draw) -> Case:
    tokens, width, inner, dtype = draw.size(20, 300), draw.size(30, 300), draw.size(30, 300), draw.dtype()
    count = draw.size(6, 40)
    per_token = draw.size(count)
    activation = draw.pick("silu", "gelu_tanh", "gelu", "clamped_swiglu")
    shapes = {"gate_up": (count, width, 2 * inner), "down": (count, inner, width)}
    biases = {"gate_up_bias": (count, 2 * inner), "down_bias": (count, width)} if draw.chance(0.5) else {}
    chosen = np.stack([draw.rng.permutation(count)[:per_token] for _ in range(tokens)])

    def inputs(draw):
        arrays = {"x": draw.normal((tokens, width), dtype), "weights": draw.uniform((tokens, per_token), dtype)}
        arrays |= {name: draw.normal(shape, dtype, shape[1] ** -0.5) for name, shape in shapes.items()}
        arrays |= {name: draw.normal(shape, dtype, 0.1) for name, shape in biases.items()}
        return arrays, {"experts": jnp.asarray(chosen, jnp.int32)}

    ours = lambda **arrays: ops.moe_mlp(**arrays, activation=activation)
    truth = lambda **arrays: reference.moe_mlp(**arrays, activation=activation)
    return Case("moe_mlp", ours, truth, inputs, f"{activation} {count=}", has_products=True, depth=2)
