"""JAX's switches of a user's program change nothing: x64, strict promotion of ranks and dtypes, and keys as numbers.

A program is traced with the switches and without, but not run. Promotions fail while it is traced. With
`jax_enable_x64` its results have the same dtypes, and nothing in it is float64: what a Python number has widened is
slow on a GPU, and a TPU emulates it.
"""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from liger_jax import layers, losses, models, ops
from liger_jax.losses import _dpo_formulas, _policy_formulas
from liger_jax.losses.preference import READERS
from liger_jax.models import quantized
from liger_jax.models.lora import (
    add_lora,
    load_adapters,
    merge_lora,
    save_adapters,
    trainable,
    with_adapters,
    with_dropout,
)
from liger_jax.planner import plan
from liger_jax.training import make_step, pack, stochastic_rounding
from tests.fuzz import run
from tests.fuzz.case import Draw
from tests.fuzz.models import FAMILIES

SWITCHES = {
    "x64": lambda: jax.enable_x64(True),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
}
IDS = np.arange(16, dtype=np.int32).reshape(2, 8) % 13
MASK = np.arange(8) > np.array([[1], [4]])
ROWS = pack([[1, 2, 3], [4, 5], [6, 7, 8, 9], [3, 2, 1]], 8)
KEYS = jax.random.key(0), jax.random.PRNGKey(0)
SIZES = dict(
    vocab_size=31, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, max_position_embeddings=32, sliding_window=4, max_window_layers=1,
    use_sliding_window=True, sliding_window_pattern=2,
)  # fmt: skip


@contextlib.contextmanager
def switched(names=tuple(SWITCHES)):
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(SWITCHES[name]())
        yield


def check(program, *arrays, switches=tuple(SWITCHES)):
    """Traces a program with the switches and without."""
    expected = jax.eval_shape(program, *arrays)
    with switched(switches):
        jaxpr, found = jax.make_jaxpr(program, return_shape=True)(*arrays)
    types = lambda tree: [(jax.tree_util.keystr(path), x.dtype) for path, x in jax.tree.leaves_with_path(tree)]
    assert types(found) == types(expected)
    wide = {e.primitive.name for e in equations(jaxpr.jaxpr) if any(is_wide(v.aval) for v in e.outvars)}
    assert not wide, f"float64 comes out of {sorted(wide)}"


def is_wide(aval):
    """Whether it is a float64 array, and no Python number that takes the dtype of what it meets.

    A single number costs nothing. Optax makes some, such as 1 − decay**count, which its results do not keep.
    """
    return getattr(aval, "dtype", None) == jnp.float64 and not aval.weak_type and aval.ndim > 0


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


# --- programs ---------------------------------------------------------------------------------------------------------


def made(family=models.LlamaForCausalLM, key=0, **options):
    known = {field.name: field.default for field in dataclasses.fields(family.config_type)}
    if known["intermediate_size"] is None:  # no layer is dense
        del known["intermediate_size"]
    config = family.config_type(**{name: x for name, x in SIZES.items() if name in known})
    return family(config, rngs=nnx.Rngs(key), **options)


def called(family, **options):
    """All that a model is called for in training and evaluation."""

    def program(ids, rows):
        graph, params = nnx.split(made(family, **options))
        weights = (rows["labels"] > 2).astype(jnp.float32)

        def loss(params):
            model = nnx.merge(graph, params)
            packed = model(**rows, loss_weights=weights, return_metrics=True)
            padded = model(
                ids, labels=ids, attention_mask=MASK, return_logits=True, return_metrics=True, logits_to_keep=3
            )
            tokens = model.log_probs(ids, labels=ids, entropy=True, temperature=0.7)
            own = model.token_loss(lambda p, w: -w * p, ids, labels=ids, per_token=(2.0,), denominator=3)[0]
            total = packed.loss + padded.loss + own + jnp.sum(tokens.log_probs + tokens.entropy)
            predicted = model(ids, return_metrics=True)
            return total, (packed, padded, tokens, predicted, model.hidden_states(ids))

        return jax.value_and_grad(loss, has_aux=True)(params)

    return program, IDS, ROWS


def generated(family):
    def program(ids):
        model = made(family)
        drawn = dict(max_new_tokens=3, temperature=0.7, eos_token_id=(2, 5))
        tokens = [model.generate(ids, top_p=p, key=key, **drawn) for p, key in zip((0.9, 1.0), KEYS, strict=True)]
        tokens.append(model.generate(ids, attention_mask=MASK, max_new_tokens=3, eos_token_id=3))
        out = model(ids, cache=model.init_cache(2, 12))
        return tokens, out, model(ids[:, :2], cache=out.cache, attention_mask=MASK[:, 6:])

    return program, IDS


def adapted(kind=None, **options):
    def program(ids):
        model = made(models.Qwen2ForCausalLM, key=jax.random.PRNGKey(0))  # whose projections have biases
        if kind is not None:
            quantized.quantize(model, kind, block_size=16, head=True)
        model = add_lora(model, 2, alpha=4, dropout=0.1, rngs=nnx.Rngs(jax.random.PRNGKey(1)), **options)
        graph, adapters, base = trainable(model)
        loss = lambda adapters, key: with_dropout(nnx.merge(graph, adapters, base), key)(ids, labels=ids).loss
        found = [jax.value_and_grad(loss)(adapters, key) for key in KEYS]
        found.append(with_adapters(model, False)(ids, labels=ids, return_metrics=True))
        merged = merge_lora(model)
        return found, nnx.state(quantized.dequantize(merged) if kind is not None else merged, nnx.Param)

    return program, IDS


def trained(optimizer, dtype=jnp.float32, **options):
    def program(batch):
        graph, params = nnx.split(made(param_dtype=dtype))
        state, step = (params, optimizer.init(params)), make_step(graph, optimizer, **options)
        return step(step(state, batch)[0], batch)

    return program, {name: np.concatenate([x, x])[:4] for name, x in ROWS.items()}


def all_losses(log_probs, mask):
    """All losses of log-probabilities and of rewards, in all their types, and the one of hidden states."""
    p = jnp.sum(log_probs, axis=1)
    pairs, means = (p, p * 1.2, p * 1.1, p * 0.9), jax.nn.log_sigmoid(p)
    advantages = [losses.group_advantages(p.reshape(2, 2), method, where=mask[:2, :2]) for method in ("grpo", "rloo")]
    found = [losses.policy_weights(mask, "dr_grpo", 9), advantages, losses.wpo_weights(log_probs, log_probs, mask)]
    for name in _policy_formulas.LOSS_TYPES:
        options: dict[str, Any] = dict(max_length=9) if name == "dr_grpo" else {}
        options |= dict(loss_type=name, mask=mask, reference_log_probs=log_probs * 0.9, beta=0.1)
        options |= dict(entropy=-log_probs, entropy_coef=0.1, importance_ratio=-log_probs)
        found.append(losses.policy_loss(log_probs, log_probs * 1.1, advantages[0].reshape(-1), **options))
    for name in _dpo_formulas.LOSS_TYPES:
        smoothing = 0.1 if name in READERS["label_smoothing"] else 0.0
        names = [counts for counts, readers in READERS.items() if counts.endswith("_tokens") and name in readers]
        counts = {each: jnp.asarray([3, 2, 4, 5]) for each in names}
        found.append(losses.dpo_loss(*pairs, loss_type=name, label_smoothing=smoothing, **counts))
    found.append(losses.dpo_loss(*pairs[:2], loss_type="aot"))
    found += [losses.dpo_loss(*pairs, f_divergence=name) for name in _dpo_formulas.DIVERGENCES]
    found += [losses.cpo_loss(p, p, -p, loss_type=name) for name in ("sigmoid", "hinge", "ipo")]
    found += [losses.orpo_loss(means, 2 * means, -means), losses.simpo_loss(means, 2 * means)]
    found.append(losses.alphapo_loss(means, 2 * means, reward_alpha=0.25))
    found += [losses.kto_loss(p, p * 1.1, mask[:, 2], kl=0.0), losses.kto_loss(p, p, mask[:, 2], kl=p)]
    found += [losses.sequence_log_probs(log_probs, mask, average) for average in (True, False)]
    found += [losses.sequence_log_probs(log_probs, mask, ld_alpha=0.5, shared_tokens=jnp.asarray([1, 2, 1, 1]))]
    head, labels = jnp.ones((7, 5), jnp.float32), jnp.asarray([[1, 2, 3, 4]])
    return [*found, losses.causal_lm_loss(log_probs[None], head, labels)]


def all_layers(x):
    rngs, linear = nnx.Rngs(0), lambda d, f: nnx.Linear(d, f, use_bias=True, rngs=nnx.Rngs(0))
    norms = [
        layers.RMSNorm(8, rngs=rngs),
        layers.LayerNorm(8, rngs=rngs),
        layers.DyT(8),
        layers.PolyNorm(),
        layers.GroupNorm(8, 2, rngs=rngs),
    ]
    plain = lambda d, f: nnx.Linear(d, f, use_bias=False, rngs=rngs)
    mlps = [mlp(8, 16, linear=kind) for mlp in (layers.SwiGLUMLP, layers.GeGLUMLP) for kind in (linear, plain)]
    return [layer(x) for layer in (*norms, *mlps)]


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1))
ROUNDED = stochastic_rounding(optax.adamw(1e-3))
PLAIN, LEAN = models.KernelOptions.off(), models.KernelOptions(mode="lean")
LOGITS = models.KernelOptions(cross_entropy=True, fused_linear_cross_entropy=False)
HALVES = dict(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
DEFAULT = {
    "generate": generated(models.Gemma2ForCausalLM),
    "qdora": adapted("nf4", dora=True),
    "step": trained(CLIPPED, micro_batches=2),
    "rounded step": trained(ROUNDED, jnp.bfloat16),
}
FULL = {
    "gemma3 in bfloat16": called(models.Gemma3ForCausalLM, dtype=jnp.bfloat16),
    **{name: called(family) for name, (family, _) in FAMILIES.items()},
    **{f"remat {x}": called(models.Gemma2ForCausalLM, scan_layers=False, remat=x) for x in ("full", "dots")},
    **{f"plain {x}": called(models.Gemma3ForCausalLM, kernels=PLAIN, dtype=x) for x in ("float32", "bfloat16")},
    "halves": called(models.Qwen2ForCausalLM, **HALVES),
    "tied halves": called(models.GemmaForCausalLM, **HALVES),
    "logits": called(models.Qwen3ForCausalLM, kernels=LOGITS),
    "lean": called(models.Qwen3ForCausalLM, kernels=LEAN),
    **{f"generate {name}": generated(FAMILIES[name][0]) for name in ("llama", "gemma3")},
    "lora": adapted(),
    "dora": adapted(dora=True),
    "int8": adapted("int8", rslora=True),
    **{
        f"step {name}": trained(optimizer, micro_batches=micro_batches)
        for micro_batches, name, optimizer in (
            (1, "adamw", optax.adamw(1e-3)),
            (2, "sgd", optax.sgd(0.1, momentum=0.9)),
            (1, "lion", optax.lion(1e-3)),
            (2, "adafactor", optax.adafactor(1e-3)),
        )
    },
    "rounded step in parts": trained(ROUNDED, jnp.bfloat16, micro_batches=2),
}
pytestmark = pytest.mark.usefixtures("unchecked_types")  # their tracing is not the point here, and takes time


@pytest.mark.parametrize("name", [*DEFAULT, *(pytest.param(name, marks=pytest.mark.full) for name in FULL)])
def test_a_program_is_the_same_under_all_switches(name):
    program, *arrays = (DEFAULT | FULL)[name]
    check(program, *arrays)


@pytest.mark.full
@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("name", DEFAULT)
def test_a_program_is_the_same_under_each_switch(name, switch):
    program, *arrays = DEFAULT[name]
    check(program, *arrays, switches=(switch,))


def test_losses_and_layers_are_the_same_under_all_switches():
    log_probs = -np.linspace(0.1, 1, 20, dtype=np.float32).reshape(4, 5)
    total = lambda x, mask: sum(map(jnp.sum, jax.tree.leaves(all_losses(x, mask))))
    mask = np.arange(5) < np.array([[3], [5], [2], [4]])
    check(all_losses, log_probs, mask)
    check(jax.grad(total), log_probs, mask)
    check(all_layers, np.ones((2, 3, 8), np.float32))


@pytest.mark.parametrize("draws", [1, pytest.param(8, marks=pytest.mark.full)])
def test_every_op_is_the_same_under_all_switches(draws):
    names = [name for name in run.DRAWN if name not in FAMILIES]
    cases = [
        (run.DRAWN[name](draw), draw)
        for name in names
        for draw in (Draw(np.random.default_rng([7, i])) for i in range(draws))
    ]
    for case, draw in cases:
        arrays, constants = case.inputs(draw)

        def program(arrays, constants, case=case):
            total = lambda arrays: sum(
                jnp.sum(x, dtype=jnp.float32)
                for x in jax.tree.leaves(case.ours(**arrays, **constants))
                if jnp.issubdtype(x.dtype, jnp.floating)
            )
            return case.ours(**arrays, **constants), jax.grad(total)(arrays) if arrays else None

        if case.refuses is None and not case.may_refuse:
            check(program, arrays, constants)


@pytest.mark.parametrize("kind, platform", [("NVIDIA H200", "gpu"), ("NVIDIA L4", "gpu"), ("TPU v6 lite", "tpu")])
def test_kernels_of_devices_that_are_absent_are_the_same_under_all_switches(kind, platform):
    """Their indices are of 32 bits, beside which Python numbers would be of 64."""

    def program(x, weight, labels):
        q = x.reshape(2, 128, 2, 128)
        cos, sin = ops.rope_table(jnp.arange(128)[None], 128)
        outputs = [ops.rms_norm(x, weight[0]), ops.geglu(x, x), *ops.apply_rope(q, q, cos, sin)]
        outputs += [ops.fused_linear_cross_entropy(x, weight, labels, mode=mode) for mode in ("fast", "lean")]
        outputs.append(ops.causal_attention(q, q, q, labels.reshape(2, 128) // 9))
        return sum(jnp.sum(y, dtype=jnp.float32) for y in outputs)

    device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    mesh = AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=device)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 256), (512, 256))]
    with jax.sharding.use_abstract_mesh(mesh):
        check(jax.value_and_grad(program, (0, 1)), *arrays, jax.ShapeDtypeStruct((256,), jnp.int32))


def test_programs_run_under_all_switches(tmp_path):
    """What is done outside of jit: checks of values, files, and the plan of a run."""
    with switched():
        model = made()
        ids = jnp.asarray(IDS, jnp.int64)
        for key in KEYS:
            model.generate(ids, max_new_tokens=2, temperature=0.5, key=key)
        model = add_lora(model, 2, alpha=4, dora=True, dropout=0.1, rngs=nnx.Rngs(1))
        assert {x.dtype for x in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.float32)}
        save_adapters(model, tmp_path)
        model = load_adapters(made(), tmp_path)
        for key in KEYS:
            with_dropout(model, key)
        plan("llama-3.2-1b", batch=1, seq=128, device="h100")


def test_what_is_no_key_is_refused():
    model = made()
    for wrong, error, message in (
        (jnp.zeros(2), TypeError, "generate: key has shape .2,. and dtype float32, and is not a key"),
        (3, TypeError, "generate: key has shape .. and dtype int32, and is not a key"),
        (jax.random.split(jax.random.PRNGKey(0), 3), ValueError, "generate: key holds .3,. keys, and must be one"),
    ):
        with pytest.raises(error, match=message):
            model.generate(jnp.asarray(IDS), max_new_tokens=1, temperature=1.0, key=wrong)
