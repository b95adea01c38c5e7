"""Models whose adapters a kernel adds: values and gradients of separate products, where it may, and where not."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from liger_jax.models import KernelOptions, Layout, LlamaConfig, LlamaForCausalLM
from liger_jax.models.lora import add_lora, trainable, with_dropout
from liger_jax.models.quantized import quantize
from liger_jax.ops import adapted_linear as op
from liger_jax.ops.kernels import Kernels
from liger_jax.pallas_kernels.gated_mlp import xla as gated_xla
from tests.ops._oracle import first, rms_error

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip


class _Plain:
    """The kernels' functions in jnp, so that the ops' own rules run everywhere."""

    @staticmethod
    def unsupported(*arrays, **case):
        return None

    @staticmethod
    def sum_of_products(x, kernel, t, b, *, transposed, interpret):
        times = lambda x, w: x @ (w.T if transposed else w)
        return times(x, kernel) + times(t, b)

    @staticmethod
    def up_and_product(x, up_kernel, gate, t, b, *, activation, precision, interpret):
        up = x @ up_kernel + t @ b
        return up, gated_xla.glu.product(gate, up, activation=activation)

    @staticmethod
    def gradients_and_product(dy, down_kernel, gate, up, u, a, *, activation, precision, in_place, interpret):
        dh = dy @ down_kernel.T + u @ a.T
        return gated_xla.glu.gradients_and_product(dh, gate, up, activation=activation)


@pytest.fixture(autouse=True)
def on_a_cpu():
    """The stand-ins are no GPU's default, and its float32 products are rounded."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def added(monkeypatch):
    """Counts the products with adapters that the ops make, by their kernel's name."""
    counts = {}

    def counted(name, function):
        def run(*args, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return function(*args, **kwargs)

        return run

    for name in ("sum_of_products", "up_and_product", "gradients_and_product"):
        monkeypatch.setattr(_Plain, name, staticmethod(counted(name, getattr(_Plain, name))))
    kernels = lambda name: Kernels(name, {"xla": None, "triton": _Plain}, defaults={"cpu": ("triton:interpret",)})
    monkeypatch.setattr(op, "KERNELS", kernels("adapted_linear"))
    monkeypatch.setattr(op, "_GATED", kernels("adapted_gated_mlp"))
    monkeypatch.setattr(op.config, "LEAST_TILES", 1)
    monkeypatch.setattr(op.config, "LEAST_WIDTH", 1)
    monkeypatch.setattr(op.gated_config, "LEAST_TILES", 1)
    return counts


def make(kind=None, *, targets=None, dropout=0.0, dora=False, kernels=KernelOptions(), config=CONFIG, **options):
    options = dict(dtype=jnp.float32, rngs=nnx.Rngs(0)) | options
    model = LlamaForCausalLM(config, kernels=kernels, **options)
    model = model if kind is None else quantize(model, kind)
    model = add_lora(model, 3, alpha=6, targets=targets, dropout=dropout, dora=dora, rngs=nnx.Rngs(1))
    graph, adapters, base = trainable(model)
    shifted = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), adapters)
    return nnx.merge(graph, shifted, base)


def program(model, **inputs):
    """The jitted loss with its gradients, and the adapters that it takes."""
    graph, adapters, base = trainable(model)
    tokens = jax.random.randint(jax.random.key(2), (2, 16), 0, 64)
    loss = lambda adapters: nnx.merge(graph, adapters, base)(tokens, labels=tokens, **inputs).loss
    return jax.jit(jax.value_and_grad(loss)), adapters


def loss_and_gradients(model, **inputs):
    run, adapters = program(model, **inputs)
    return run(adapters)


def trace(model):
    run, adapters = program(model)
    run.trace(adapters)


def separate(monkeypatch):
    monkeypatch.setattr(op, "can_add", lambda *arrays: False)


@pytest.mark.parametrize(
    "options",
    first(
        3,
        [
            dict(remat="full", segment_ids=jnp.arange(16)[None].repeat(2, 0) // 5 + 1),
            dict(kind="nf4", targets=["q_proj", "v_proj", "down_proj"]),
            dict(dora=True, config=dataclasses.replace(CONFIG, attention_bias=True)),
            dict(remat="none", scan_layers=False),
            dict(remat="full"),
            dict(remat="dots"),
            dict(kind="nf4"),
            dict(dora=True),
        ],
    ),
    ids=str,
)
def test_adapters_in_one_accumulation_are_those_of_separate_products(options, added, monkeypatch):
    inputs = {name: options.pop(name) for name in ("segment_ids",) if name in options}
    model = make(**options)
    loss, gradients = loss_and_gradients(model, **inputs)
    assert added["sum_of_products"] > 0
    separate(monkeypatch)
    expected = loss_and_gradients(model, **inputs)
    assert jnp.abs(loss - expected[0]) < 1e-5
    for found, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected[1]), strict=True):
        assert found.dtype == jnp.float32
        assert rms_error(found, other) < 2e-5


def test_a_layer_takes_one_product_for_each_input(added):
    config = dataclasses.replace(CONFIG, num_hidden_layers=1)
    trace(make(remat="none", scan_layers=False, config=config))
    # Forward q, k and v; o; gate; down: traced twice, as values and with what the backward needs. Backward o; gate with
    # up. The embedding below q, k and v is frozen.
    assert added == {"sum_of_products": 2 * 4 + 2, "up_and_product": 2, "gradients_and_product": 1}


@pytest.mark.parametrize(
    "options",
    [
        dict(dropout=0.5),
        dict(kernels=KernelOptions(implementation="xla")),
        dict(kernels=KernelOptions(glu=False)),
    ],
    ids=str,
)
def test_dropped_inputs_and_chosen_kernels_have_separate_products(options, added):
    model = make(**options)
    if "dropout" in options:
        model = with_dropout(model, jax.random.key(3))
    trace(model)
    assert added == {}


def test_on_a_mesh_adapters_are_products_that_xla_partitions():
    may = lambda layout: KernelOptions(layout=layout).may_add_adapters
    assert may(None)
    assert not may(Layout(batch=("data",), fsdp="data"))
    assert not make(kernels=KernelOptions(batch_axes=("data",))).model.layers.mlp.up_proj.has_kernels
    assert make().model.layers.mlp.up_proj.has_kernels


@pytest.mark.parametrize("width, rows, wide", [(4096, 8192, True), (2048, 8192, False), (4096, 512, False)])
def test_kernels_are_for_wide_products_of_many_rows(width, rows, wide):
    assert op.config.is_large(rows, width, 14336) == op.config.is_large(rows, 14336, width) == wide
