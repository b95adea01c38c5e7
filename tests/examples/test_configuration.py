"""One flag goes from the command line to the ops of the model."""

import argparse

import jax.numpy as jnp
import pytest
from flax import nnx

from examples import train_llama
from examples._lib.configuration import Training, add_flags, from_flags
from liger_jax.models import KernelOptions
from liger_jax.user_errors import UserError

DEFAULT = Training(batch=8, length=512, steps=10, learning_rate=1e-3)


def parsed(*flags):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return from_flags(parser.parse_args(flags), DEFAULT)


@pytest.mark.parametrize(
    "flags, kernels",
    [
        ([], KernelOptions()),
        (["--kernels=on"], KernelOptions()),
        (["--kernels=off"], KernelOptions.off()),
        (["--no-rms-norm"], KernelOptions(rms_norm=False)),
        (["--kernels=off", "--rope"], KernelOptions(rms_norm=False, glu=False, fused_linear_cross_entropy=False)),
        (["--loss=logits"], KernelOptions(fused_linear_cross_entropy=False)),
        (["--loss=kernel_on_logits"], KernelOptions(fused_linear_cross_entropy=False, cross_entropy=True)),
        (
            ["--no-glu", "--mode=lean", "--implementation=xla"],
            KernelOptions(glu=False, mode="lean", implementation="xla"),
        ),
    ],
)
def test_flags_choose_the_kernels_of_every_layer(flags, kernels):
    training = parsed(*flags)
    assert training.kernels == kernels
    size = train_llama.SIZES["tiny"]
    model = nnx.eval_shape(lambda: train_llama.make_model(size.model, 64, training))
    layer = model.model.layers
    parts = model, getattr(model.model, model.config.last_norm_name), layer.input_layernorm, layer.self_attn, layer.mlp
    assert all(part.kernels == kernels for part in parts)


def test_flags_that_are_not_passed_change_nothing():
    assert parsed() == DEFAULT


def test_other_flags_reach_their_fields():
    flags = "--pack --batch=4 --length=64 --steps=2 --learning-rate=0.1 --micro-batches=2 --remat=dots".split()
    training = parsed(*flags, "--dtype=bfloat16", "--param-dtype=float32", "--optimizer=adamw8bit")
    precision = dict(dtype="bfloat16", param_dtype="float32", optimizer="adamw8bit")
    assert training == Training(4, 64, 2, 0.1, micro_batches=2, remat="dots", pack=True, **precision)
    options = training.model_options()
    assert (options["dtype"], options["param_dtype"], options["remat"]) == (jnp.bfloat16, jnp.float32, "dots")


@pytest.mark.parametrize(
    ["flags", "message"],
    [
        (["--length=1"], "--length=1 must be at least 2: a token is predicted from those before it"),
        (["--steps=-1"], "--steps=-1 must be at least 1"),
        (["--batch=6", "--micro-batches=4"], "--micro-batches=4 must divide --batch=6"),
        (["--micro-batches=0"], "--micro-batches=0 must be at least 1"),
        (["--learning-rate=nan"], "--learning-rate=nan must be a finite number above 0"),
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused_by_their_flags(flags, message):
    with pytest.raises(UserError, match=message):
        parsed(*flags)
