"""Training with kernels follows training without: the same losses in float32, no larger error in bfloat16.

32 steps, but four in JAX's TPU interpreter, where a step takes a second.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from liger_jax import ops
from liger_jax.models import KernelOptions
from tests.models._convergence import FAMILIES, largest_deviation, training_losses, typical_deviation
from tests.ops._oracle import first

KERNELS = ("triton", "mosaic_tpu")
FULL_KERNELS = ("mosaic_tpu:interpret",)
F32_TOLERANCE = 1e-5  # relative, at every step
FEWER_STEPS = {"gemma4": 3}  # each amplifies what has been rounded by ten: after 16, a last bit of gradients by 1e-4
BF16_FACTOR = 1.5  # of plain bfloat16's own deviation from float32
SEEDS = tuple(range(27))
PLAIN = KernelOptions.off()
# A scale, one beside 1 with capped logits, norms over all heads, and a scale of logits.
OF_EACH_NORM_AND_LOSS = ("llama", "gemma2", "olmo2", "granite")
# RoPE and the gated unit, which have kernels for GPUs alone, have both forms in these: a part of a head and gelu, too.
OF_EACH_OP = (*OF_EACH_NORM_AND_LOSS, "qwen3", "phi3")


def steps_of(implementation):
    return 4 if implementation == "mosaic_tpu:interpret" else 32


@functools.cache
def plain_losses(dtype, steps, seeds=(0,), family="llama"):
    return training_losses(PLAIN, dtype, steps, seeds=seeds, family=family)


def kernels_of(implementation):
    """Runs all ops by one kernel. RoPE and the gated unit have none for TPUs, and stay plain there."""
    has_all = not implementation.startswith("mosaic_tpu")
    return KernelOptions(rope=has_all, glu=has_all, implementation=implementation)


@pytest.mark.parametrize("family", first(1, list(FAMILIES)))
def test_float32_losses_with_kernels_follow_plain_ones_at_every_step(implementation, family):
    steps = min(steps_of(implementation), FEWER_STEPS.get(family, 32))
    losses = training_losses(kernels_of(implementation), jnp.float32, steps, family=family)
    assert losses[0, -1] < 0.9 * losses[0, 0]  # something was learnt
    assert largest_deviation(losses, plain_losses(jnp.float32, steps, family=family)) <= F32_TOLERANCE


@pytest.mark.parametrize("family", first(1, list(OF_EACH_OP)))
def test_bfloat16_losses_with_kernels_deviate_no_more_than_plain_ones(implementation, family):
    """Other families have the same kernels, and a case takes up to half a minute."""
    if implementation == "mosaic_tpu:interpret" and family not in OF_EACH_NORM_AND_LOSS:
        pytest.skip("its kernels for TPUs, norms and the loss, are those of another family")
    steps = steps_of(implementation)
    exact = plain_losses(jnp.float32, steps, SEEDS, family)
    losses = training_losses(kernels_of(implementation), jnp.bfloat16, steps, seeds=SEEDS, family=family)
    plain = plain_losses(jnp.bfloat16, steps, SEEDS, family)
    assert typical_deviation(losses, exact) <= BF16_FACTOR * typical_deviation(plain, exact)


@pytest.mark.full
def test_cross_entropy_kernel_on_logits_follows_plain_losses(implementation):
    steps = steps_of(implementation)
    kernels = KernelOptions(
        rope=False,
        rms_norm=False,
        glu=False,
        cross_entropy=True,
        fused_linear_cross_entropy=False,
        implementation=implementation,
    )
    losses = training_losses(kernels, jnp.float32, steps)
    assert largest_deviation(losses, plain_losses(jnp.float32, steps)) <= F32_TOLERANCE


def test_a_gradient_scaled_by_1_01_is_noticed():
    losses = training_losses(
        PLAIN, jnp.float32, 4, change_gradients=lambda grads: jax.tree.map(lambda grad: 1.01 * grad, grads)
    )
    assert largest_deviation(losses, plain_losses(jnp.float32, 4)) > F32_TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("op", ["rms_norm", "swiglu", "apply_rope", "fused_linear_cross_entropy"])
def test_one_op_whose_gradient_is_scaled_by_1_01_is_noticed(op, monkeypatch):
    right = getattr(ops, op)
    monkeypatch.setattr(ops, op, lambda x, *rest, **options: right(_wrongly_differentiated(x), *rest, **options))
    losses = training_losses(KernelOptions(implementation="xla"), jnp.float32, 4)
    assert largest_deviation(losses, plain_losses(jnp.float32, 4)) > F32_TOLERANCE


@jax.custom_vjp
def _wrongly_differentiated(x):
    return x


_wrongly_differentiated.defvjp(lambda x: (x, None), lambda _, gradient: (1.01 * gradient,))
