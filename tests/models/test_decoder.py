"""Layers of several kinds, scanned and unrolled."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from benchmarks._models import SIZES, kept_by_a_layer
from liger_jax import models
from liger_jax.models.core import feed_forward
from liger_jax.models.core.attention import in_one_product
from liger_jax.models.core.blocks import Blocks
from liger_jax.models.core.feed_forward import DenseFeedForward
from liger_jax.models.core.layer_stack import LayerKind, LayerStack, modes_of, pattern_length
from liger_jax.models.core.parameters import describe, projections
from tests.ops._oracle import first

# One layer left over; leftover layers with numbers that sort differently as text; one pattern alone; two patterns.
PATTERNS = ["aabaaba", "aaaaaaaabaa", "aab", "abab"]


class Affine(nnx.Module):
    """x·w + the kind's input: no two orders of layers and kinds give the same."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(1 + 0.3 * jax.random.normal(rngs.params(), (3, 3)))

    def __call__(self, x, shift):
        return jnp.tanh(x @ self.kernel[...] + shift), {}


class Experts(nnx.Module):
    """x + Σ over 4 experts, which keeps each one's share of the tokens, summed."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(0.3 * jax.random.normal(rngs.params(), (3, 4)))

    def __call__(self, x, shift):
        shares = jax.nn.softmax(x @ self.kernel[...] + shift)
        sums = {"shares": jnp.sum(shares, (0, 1)), "tokens": jnp.asarray(x.shape[0] * x.shape[1], jnp.int32)}
        return x + shares @ self.kernel[...].T, sums


def described(kind, platform):
    """Traces for a device that need not be there."""
    device = AbstractDevice(kind, None, platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=device))


class Stacked(nnx.Module):
    """Affine layers that are held as a decoder holds its own."""

    def __init__(self, kinds, *, scan, remat="none"):
        # A capital is a layer of experts, whose attention is of the letter's kind.
        kinds = tuple(LayerKind(kind.lower(), "experts" if kind.isupper() else "dense") for kind in kinds)
        self.stack = LayerStack(kinds, scan, remat)
        make_layer = lambda kind, rngs: dict(dense=Affine, experts=Experts)[kind.feed_forward](rngs)
        self.layers, self.last_layers = self.stack.make(make_layer, nnx.Rngs(0))

    def __call__(self, x, inputs):
        return self.stack(self.layers, self.last_layers, x, inputs).hidden


def run(kinds, *, scan, remat="none"):
    graph, params = nnx.split(Stacked(kinds, scan=scan, remat=remat))
    inputs = {"a": (0.1,), "b": (-0.7,)}
    loss = lambda params, x: jnp.sum(nnx.merge(graph, params)(x, inputs) ** 2)
    loss, (gradients, dx) = jax.jit(jax.value_and_grad(loss, (0, 1)))(params, jnp.ones((1, 2, 3)))
    by_layer = {}
    infos = describe(gradients)
    for path, gradient in nnx.to_flat_state(gradients):
        parts = gradient[...] if infos[path].stacked else [gradient[...]]
        by_layer |= dict(zip(infos[path].tensor_names, parts, strict=True))
    return loss, dx, by_layer


@pytest.mark.parametrize("remat", ["none", "full"])
def test_unrolled_layers_of_a_kind_are_traced_once(remat, monkeypatch):
    """Seven layers of two kinds: a step of many layers waits for two of them."""
    traced = []
    call = Affine.__call__
    monkeypatch.setattr(Affine, "__call__", lambda layer, x, shift: traced.append(shift) or call(layer, x, shift))
    run("aabaaba", scan=False, remat=remat)
    assert sorted(traced) == [-0.7, 0.1]


@pytest.mark.parametrize("kinds", first(2, PATTERNS))
def test_scanned_patterns_are_the_unrolled_layers(kinds):
    scanned, unrolled = run(kinds, scan=True), run(kinds, scan=False)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), scanned, unrolled)
    assert set(scanned[2]) == {f"layers.{i}.weight" for i in range(len(kinds))}


@pytest.mark.parametrize("remat", first(2, ["full", 4, "dots", 1]))
def test_rematerialised_patterns_are_the_same(remat):
    plain, again = run("aabaaba", scan=True), run("aabaaba", scan=True, remat=remat)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), plain, again)


@pytest.mark.parametrize(
    "kinds, remat, kept",
    [
        ("aaaa", 0, 0), ("aaaa", 3, 3), ("aaaa", 4, 4), ("abab", 3, 2), ("aabaabaa", 1, 1), ("aabaabaa", 4, 2),
        ("aabaabaa", 5, 5), ("aabaabaa", 7, 5), ("aabaabaa", 8, 8), ("aabaabaa", "dots", 8), ("aabaabaa", "full", 0),
    ],
)  # fmt: skip
def test_the_last_layers_that_keep_products_are_whole_repetitions_of_the_pattern(kinds, remat, kept):
    modes = modes_of(kinds, remat)
    assert modes == ["full"] * (len(kinds) - kept) + ["dots"] * kept


@pytest.mark.parametrize("remat", [5, -1, True])
def test_another_number_of_layers_is_refused(remat):
    with pytest.raises(ValueError, match="one of .* or how many of the last layers .* from 0 to 4"):
        LayerStack((LayerKind("a"),) * 4, True, remat)


def test_two_loops_read_one_stack_of_weights_and_write_one_of_gradients():
    """Neither weights nor gradients are copied, cut or put together: the program of one loop has as many copies."""

    def program(remat):
        graph, params = nnx.split(Stacked("a" * 6, scan=True, remat=remat))
        loss = lambda params, x: jnp.sum(nnx.merge(graph, params)(x, {"a": (0.1,)}) ** 2)
        text = jax.jit(jax.grad(loss)).lower(params, jnp.ones((1, 2, 3))).compile().as_text() or ""
        moved = r"f32\[[2-6],3,3\]\S* (?:copy|concatenate|slice|pad|gather|add|transpose)\("
        return re.findall(moved, text), text.count(" while(")

    (one, loops), (two, loops_of_two) = program("full"), program(2)
    assert len(two) <= len(one) and loops_of_two == 2 * loops, (one, two)


def run_with_sums(kinds, *, scan, remat="none"):
    """Hidden states, the layers' sums, and gradients by layer of a loss that reads both."""
    inputs = {"a": (0.1,), "b": (-0.7,)}
    model = Stacked(kinds, scan=scan, remat=remat)
    graph, params = nnx.split(model)

    def loss(params, x):
        model = nnx.merge(graph, params)
        found = model.stack(model.layers, model.last_layers, x, inputs)
        return jnp.sum(found.hidden**2) + jnp.sum(found.aux["experts"]["shares"][:, 0] ** 2), found

    x = jnp.linspace(-1, 1, 6).reshape(1, 2, 3)
    gradients, found = jax.jit(jax.grad(loss, has_aux=True))(params, x)
    kernels = lambda layers: layers["kernel"][...]
    if not scan:
        return found.hidden, found.aux, [kernels(layer) for _, layer in sorted(gradients["layers"].items())]
    by_number = {int(i): kernels(layer) for i, layer in gradients.get("last_layers", {}).items()}
    for name, numbers in model.stack.stacked.items():
        stack = kernels(gradients["layers"][name] if name else gradients["layers"])
        by_number |= dict(zip(numbers, stack, strict=True))
    return found.hidden, found.aux, [by_number[i] for i in range(len(kinds))]


# Experts in all layers; in every other one, of two kinds of attention; two in a group and some left over.
@pytest.mark.parametrize("case", first(2, ["aBBaaBBaaBBa 5", "aBAaBAaB full", "AAA 2", "AAA full", "aAaA 2", "AbA 3"]))
def test_layers_of_experts_alternate_with_dense_ones_and_return_their_sums_in_order(case):
    kinds, remat = case.split()
    remat = int(remat) if remat.isdecimal() else remat
    scanned, unrolled = run_with_sums(kinds, scan=True, remat=remat), run_with_sums(kinds, scan=False)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), scanned, unrolled)
    model, x, shares = Stacked(kinds, scan=False), jnp.linspace(-1, 1, 6).reshape(1, 2, 3), []
    for kind, layer in zip(kinds, model.layers, strict=True):
        x, sums = layer(x, {"a": 0.1, "b": -0.7}[kind.lower()])
        shares += [sums["shares"]] if sums else []
    np.testing.assert_allclose(unrolled[1]["experts"]["shares"], shares, rtol=1e-5)
    assert unrolled[1]["experts"]["tokens"].tolist() == [2] * sum(map(str.isupper, kinds))


def test_dense_layers_return_no_sums():
    for scan in (True, False):
        stack = Stacked("aab", scan=scan)
        run = lambda x, stack=stack: stack.stack(stack.layers, stack.last_layers, x, {"a": (0.1,), "b": (-0.7,)})
        assert jax.eval_shape(run, jnp.ones((1, 2, 3))).aux == {}


@dataclasses.dataclass(frozen=True)
class EveryOtherOfExperts(models.LlamaConfig):
    def feed_forward_of(self, i):
        return "experts" if i % 2 else "dense"


class Router(DenseFeedForward):
    """A dense feed-forward that has a sum to return."""

    def __call__(self, x):
        return super().__call__(x)[0], {"load": jnp.sum(x, (0, 1))}


@pytest.mark.parametrize("scan", [True, False])
def test_a_models_result_has_the_sums_of_its_layers_by_feed_forward(scan, monkeypatch):
    monkeypatch.setitem(feed_forward.FEED_FORWARDS, "experts", Router)
    sizes = dict(vocab_size=8, hidden_size=16, intermediate_size=8, num_attention_heads=2, num_hidden_layers=5)
    ids = jax.ShapeDtypeStruct((2, 4), jnp.int32)

    make = lambda config: nnx.eval_shape(lambda: models.LlamaForCausalLM(config, scan_layers=scan, rngs=nnx.Rngs(0)))
    model = make(EveryOtherOfExperts(**sizes))
    found = {".".join(map(str, path[:-1])) for path, _ in projections(model)}
    (graph, params), (dense, dense_params) = nnx.split(model), nnx.split(make(models.LlamaConfig(**sizes)))
    run = lambda graph: lambda params, ids: nnx.merge(graph, params)(ids, labels=ids)
    aux = jax.eval_shape(run(graph), params, ids).aux
    assert jax.tree.map(lambda x: x.shape, aux) == {"experts": {"load": (2, 16)}}
    assert jax.eval_shape(run(dense), dense_params, ids).aux is None
    if scan:
        assert {"model.layers.0_of_2.mlp", "model.layers.1_of_2.mlp", "model.last_layers.4.mlp"} <= found


def test_a_pattern_is_compiled_once():
    stack = Stacked("aab" * 5 + "aa", scan=True)
    program = str(jax.make_jaxpr(lambda x: stack(x, {"a": (0.1,), "b": (-0.7,)}))(jnp.ones((1, 2, 3))))
    assert program.count("dot_general") == 3 + 1  # the pattern's layers, and what the leftover layers share


@pytest.mark.parametrize("remat, groups", [("none", [4]), (6, [2, 2])])
def test_a_layers_parameters_are_not_kept_for_the_backward_a_second_time(remat, groups):
    graph, params = nnx.split(Stacked("aab" * 4, scan=True, remat=remat))
    loss = lambda params, x: jnp.sum(nnx.merge(graph, params)(x, {"a": (0.1,), "b": (-0.7,)}))
    program = jax.make_jaxpr(jax.grad(loss))(params, jnp.ones((1, 2, 3)))
    loops = [equation for equation in program.eqns if equation.primitive.name == "scan"]
    for forward, count in zip(loops, groups, strict=False):
        kept = [x.aval.shape for x in forward.outvars if x.aval.shape[0] == count]
        assert (count, 1, 2, 3) in kept  # one layer's input for each group
        assert not [shape for shape in kept if shape[-2:] == (3, 3)], kept


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("family, count", [("Llama", 2), ("Qwen3", 1)])  # Qwen3's, norms made anew from the projections
def test_a_layer_keeps_queries_and_what_they_attend_to_once(family, count, platform):
    config = getattr(models, f"{family}Config")(
        vocab_size=8, hidden_size=96, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    model = getattr(models, f"{family}ForCausalLM")(config, scan_layers=False, rngs=nnx.Rngs(0)).model
    graph, params = nnx.split(model)
    ids = jnp.zeros((1, 128), jnp.int32)
    with described("TPU v5 lite", platform):
        backward = jax.eval_shape(lambda params: jax.vjp(lambda p: nnx.merge(graph, p)(ids), params)[1], params)
    kept = [x.shape for x in jax.tree.leaves(backward) if x.size == 128 * 4 * 16]
    assert len(kept) == count, kept


@pytest.mark.parametrize("last", ["linear", "lora", "own product"])
def test_projections_in_one_product_are_each_its_own(last, rng):
    rngs, options = nnx.Rngs(0), dict(dtype=jnp.float32, bias_init=nnx.initializers.normal())
    layers = [nnx.Linear(6, width, rngs=rngs, **options) for width in (8, 3)]
    if last == "lora":
        lora = nnx.LoRALinear(6, 2, lora_rank=2, rngs=rngs, **options)
        lora.lora.lora_b[...] = jnp.ones((2, 2))  # it starts at zero, where it adds nothing
        layers.append(lora)
    if last == "own product":
        twice = lambda *args, **kwargs: 2 * jax.lax.dot_general(*args, **kwargs)
        layers.append(nnx.Linear(6, 2, dot_general=twice, rngs=rngs, **options))
    x = jnp.asarray(rng.normal(size=(2, 5, 6)), jnp.float32)
    found, back = jax.vjp(lambda x: in_one_product(x, *layers), x)
    expected, expected_back = jax.vjp(lambda x: [layer(x) for layer in layers], x)
    for y, z in zip([*found, *back(expected)], [*expected, *expected_back(expected)], strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-5)


def test_a_layer_keeps_what_norms_attention_and_gate_take_and_attention_s_result():
    with described("cpu", "cpu"):  # cuDNN keeps a sum a head, too
        shapes, size = kept_by_a_layer(SIZES["tiny"], models.KernelOptions(), batch=2, seq=64)
    heads, width, inner = (2, 64, 4, 16), (2, 64, 64), (2, 64, 128)
    assert shapes == {f"bfloat16 {heads}": 4, f"bfloat16 {width}": 2, f"bfloat16 {inner}": 2}
    assert size == 2 * 2 * 64 * (4 * 64 + 2 * 64 + 2 * 128)


@pytest.mark.parametrize("family", first(1, ["Llama", "Gemma"]))
@pytest.mark.parametrize(
    "remat, in_place",
    [("full", True), ("offload", True), ("offload_attention", True), ("dots", False), ("none", False)],
)
def test_gates_that_are_made_again_are_written_over(family, remat, in_place):
    config = getattr(models, f"{family}Config")(
        vocab_size=8, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    model = getattr(models, f"{family}ForCausalLM")(config, remat=remat, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)).model
    graph, params = nnx.split(model)
    loss = lambda params: nnx.merge(graph, params)(jnp.zeros((1, 16), jnp.int32)).hidden.sum().astype(jnp.float32)
    with described("NVIDIA H200", "gpu"):
        program = str(jax.make_jaxpr(jax.grad(loss))(params))
    assert ("glu_gradients_and_product" in program) == in_place


@pytest.mark.parametrize("family", first(1, ["Llama", "Gemma"]))
@pytest.mark.parametrize("remat, scan, kept", [("none", False, 2), ("none", True, None), ("full", False, 0)])
def test_hopper_s_feed_forward_keeps_gate_and_up_or_makes_them_again(family, remat, scan, kept):
    config = getattr(models, f"{family}Config")(
        vocab_size=8, hidden_size=256, intermediate_size=4096, num_hidden_layers=1, num_attention_heads=4, head_dim=64
    )
    options = dict(remat=remat, scan_layers=scan, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    model = nnx.eval_shape(lambda: getattr(models, f"{family}ForCausalLM")(config, **options, rngs=nnx.Rngs(0))).model
    graph, params = nnx.split(model)
    run = lambda params: nnx.merge(graph, params)(jnp.zeros((8, 1024), jnp.int32)).hidden
    with described("NVIDIA H200", "gpu"):
        forward = str(jax.make_jaxpr(run)(params))
        backward, dy = jax.eval_shape(lambda params: jax.vjp(run, params)[::-1], params)
        program = str(jax.make_jaxpr(lambda backward, dy: backward(dy))(backward, dy))
    fused = remat == "full" or not scan
    assert ("gated_mlp_up" in forward) == fused and ("gated_mlp_gradients" in program) == fused
    assert "gated_mlp_up" not in program  # nothing needs the gated product a second time
    if kept is not None:
        assert sum(x.shape == (8, 1024, 4096) for x in jax.tree.leaves(backward)) == kept


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma", "Gemma2"])
def test_a_config_says_which_norms_its_layers_have(family):
    config = getattr(models, f"{family}Config")(
        hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8,
    )  # fmt: skip
    kind, options = getattr(models, f"{family}ForCausalLM").layer, models.KernelOptions()
    layer = nnx.eval_shape(lambda: kind(Blocks(config, options, jnp.float32, jnp.float32, nnx.Rngs(0))))
    assert hasattr(layer, "post_feedforward_layernorm") == config.norms_results
    assert (layer.self_attn.q_norm is not None) == config.qk_norm


@pytest.mark.parametrize("kinds, length", [("a", 1), ("aaa", 1), ("abab", 2), ("ababa", 2), ("aabaa", 3), ("aabb", 4)])
def test_the_pattern_is_the_shortest(kinds, length):
    assert pattern_length(kinds) == length


def test_norms_of_layers_are_xlas_on_a_tpu():
    """XLA fuses them into the products after them. The last norm, before the loss's kernels, is a kernel itself."""
    config = models.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=2
    )
    graph, params = nnx.split(nnx.eval_shape(lambda: models.LlamaForCausalLM(config, rngs=nnx.Rngs(0))))
    tokens = jax.ShapeDtypeStruct((1, 128), jnp.int32)
    device = AbstractDevice("TPU v6 lite", 1, "tpu")
    loss = lambda params, tokens: nnx.merge(graph, params)(tokens, labels=tokens).loss
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=device)):
        program = str(jax.make_jaxpr(jax.grad(loss))(params, tokens))
    kernels = re.findall(r"name=(\w*norm\w*_(?:forward|backward))", program)
    assert sorted(kernels) == ["rms_norm_backward"] * 2 + ["rms_norm_forward"] * 2  # each under a jit of its name


@pytest.mark.parametrize(
    "attention, call",
    [("triton", r"jit\[\s+name=causal_attention_forward"), ("cudnn", "dot_product_attention_fwd_wrapper")],
)
def test_attention_runs_once_where_its_result_is_kept(attention, call, monkeypatch):
    """Counted in programs for an H200, which need not be there; nor need cuDNN."""
    monkeypatch.setattr(jax_cudnn, "check_cudnn_version", lambda: 91000)
    config = models.LlamaConfig(
        vocab_size=8, hidden_size=128, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, head_dim=64
    )
    options = dict(kernels=models.KernelOptions(attention=attention), scan_layers=False, dtype=jnp.bfloat16)

    def runs(remat):
        make = lambda: models.LlamaForCausalLM(config, remat=remat, **options, rngs=nnx.Rngs(0)).model
        graph, params = nnx.split(nnx.eval_shape(make))
        loss = lambda params: nnx.merge(graph, params)(jnp.zeros((1, 128), jnp.int32)).hidden.sum().astype(jnp.float32)
        with described("NVIDIA H200", "gpu"):
            return len(re.findall(call, str(jax.make_jaxpr(jax.grad(loss))(params))))

    assert [runs(remat) for remat in ("offload", "offload_attention", "none")] == [2, 1, 1]
