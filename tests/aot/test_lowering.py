"""How often kernels are lowered: the wait before a first step, counted without a clock."""

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from liger_jax import fused_linear_cross_entropy
from liger_jax.models import KernelOptions, LlamaConfig, LlamaForCausalLM
from tests.aot.programs import LLAMA_8B_HEAD

H100 = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
KERNEL_CALL = ("custom_call @mosaic_gpu", "custom_call @__gpu$xla.gpu.triton")
pytestmark = pytest.mark.aot


def lowered(function, *types):
    """The program for an H100 that JAX hands to XLA."""
    mesh = AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=H100)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*types).lower(lowering_platforms=("cuda",)).as_text()


def lowered_kernels(function, *types):
    """How many Pallas kernels stand in it."""
    text = lowered(function, *types)
    return sum(text.count(call) for call in KERNEL_CALL)


def kernels_of_a_step(layers):
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=4
    )
    kernels = KernelOptions(rope=False, glu=False, fused_linear_cross_entropy=False)  # the norms alone
    options = dict(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, scan_layers=False, kernels=kernels)
    graph, params = nnx.split(nnx.eval_shape(lambda: LlamaForCausalLM(config, **options, rngs=nnx.Rngs(0))))
    loss = lambda params, tokens: nnx.merge(graph, params)(tokens, labels=tokens).loss
    return lowered_kernels(jax.grad(loss), params, jax.ShapeDtypeStruct((2, 256), jnp.int32))


def test_unrolled_layers_share_their_kernels():
    one, two = kernels_of_a_step(1), kernels_of_a_step(2)
    assert 0 < one == two


def test_the_fast_loss_of_llama_lowers_the_two_kernels_that_it_runs_and_no_other():
    """The product that makes logits, and the pass that makes their gradient. XLA makes the other two products."""
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in LLAMA_8B_HEAD]
    loss = lambda *arrays: fused_linear_cross_entropy(*arrays, mode="fast")
    assert lowered_kernels(jax.value_and_grad(loss, (0, 1)), *types) == 2


def test_a_program_is_the_same_whatever_the_process_has_lowered_before(monkeypatch):
    """It is looked up in the cache of compiled programs by its text. JAX 0.11.1 and newer number Hopper's kernels."""
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in LLAMA_8B_HEAD]
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # a kernel has the lines of its Python in it
    programs = []
    for _ in range(2):
        jax.clear_caches()
        programs.append(lowered(fused_linear_cross_entropy, *types))
    assert programs[0] == programs[1] and KERNEL_CALL[0] in programs[0]
