"""Tunix's losses beside ours on its models, and our models in its trainers. `make integrations` installs tunix."""

import dataclasses
import functools
import importlib
import math
import re
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from examples import integrations_tunix
from liger_jax.integrations.tunix import TunixModel, hidden_and_head, sft_loss, with_fused_log_probs, with_reference
from liger_jax.models import LlamaConfig, LlamaForCausalLM
from liger_jax.models.lora import add_lora

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.skipif(find_spec("tunix") is None, reason="tunix is not installed"),
    pytest.mark.filterwarnings("ignore"),  # tunix's, of JAX's and Flax's older names
]
VOCAB = 517


def of(module):
    return importlib.import_module(f"tunix.{module}")


@functools.cache
def model_of(family, vocab=VOCAB):
    """A small model of tunix's, all of whose parameters are random."""
    common = dict(num_layers=2, embed_dim=32, hidden_dim=48, num_heads=4, head_dim=8, num_kv_heads=2)
    if family.startswith("qwen"):
        name, _, tied = family.partition("-")
        module = of(f"models.{name}.model")
        options = dict(vocab_size=vocab, rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=tied == "tied")
        model = getattr(module, name.capitalize())(module.ModelConfig(**common, **options), rngs=nnx.Rngs(0))
    elif family == "gemma2":
        module = of("models.gemma.model")
        options = dict(
            num_embed=vocab,
            final_logit_softcap=2.0,
            attn_logits_soft_cap=5.0,
            use_post_attn_norm=True,
            use_post_ffw_norm=True,
            attention_types=(module.AttentionType.LOCAL_SLIDING, module.AttentionType.GLOBAL),
            sliding_window_size=4,
        )
        model = module.Gemma(module.ModelConfig(**common, **options), rngs=nnx.Rngs(0))
    else:
        module = of("models.gemma3.model")
        options = dict(num_embed=vocab, sliding_window_size=4, param_dtype=jnp.float32)
        model = module.Gemma3(module.ModelConfig(**common, **options), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.2, x.shape), x.dtype), state))


def other(model, rng):
    """A model of the same kind with parameters a little different."""
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, 0.05, x.shape), x.dtype), state))


FAMILIES = ["qwen2-tied", "qwen2-untied", "qwen3-untied", "gemma2", "gemma3"]


def batch(rng, size=3, length=11):
    """The arguments of a loss of `PeftTrainer`, with padding on the right and a prompt that is not learned."""
    tokens = jnp.asarray(rng.integers(0, VOCAB, (size, length)))
    is_token = np.arange(length) < rng.integers(length - 4, length + 1, (size, 1))
    utils = of("sft.utils")
    return dict(
        input_tokens=tokens,
        input_mask=jnp.asarray(is_token & (np.arange(length) > 2)),
        positions=utils.build_positions_from_mask(jnp.asarray(is_token)),
        attention_mask=utils.make_causal_attn_mask(jnp.asarray(is_token)),
    )


def gradients(loss_fn, model, has_aux=False, wrt=nnx.Param, **inputs):
    """The loss, its metrics and all gradients, compiled as tunix compiles its step."""
    step = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, wrt), has_aux=has_aux)
    found, grads = nnx.jit(lambda model, inputs: step(model, **inputs))(model, inputs)
    return found, dict(nnx.to_flat_state(grads))


def assert_same(ours, theirs):
    """Within 1e-5 of the largest number of each array."""
    assert len(jax.tree.leaves(theirs)) == len(jax.tree.leaves(ours)) > 0
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * max(1e-3, float(np.max(np.abs(y)))))


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_of_the_trainer(family, rng):
    model, inputs = model_of(family), batch(rng)
    theirs, their_gradients = gradients(of("sft.peft_trainer")._default_loss_fn, model, **inputs)
    ours, our_gradients = gradients(sft_loss, model, **inputs)
    assert_same(ours, theirs)
    assert_same(our_gradients, their_gradients)
    assert not hasattr(model, "all_hidden_states")


def test_nothing_learned_is_zero(rng):
    inputs = batch(rng)
    loss, grads = gradients(
        sft_loss, model_of("qwen3-untied"), **inputs | dict(input_mask=inputs["input_mask"] & False)
    )
    assert loss == 0 and all(not np.any(x) for x in jax.tree.leaves(grads))


def pairs(rng, prompt=5, completion=7):
    """A batch of `DPOTrainer`, with padding on the left of prompts and on the right of answers."""
    tokens = lambda length: rng.integers(0, VOCAB, (2, length))
    right = lambda: np.arange(completion) < rng.integers(3, completion + 1, (2, 1))
    return of("sft.dpo.dpo_trainer").TrainingInput(
        prompt_ids=tokens(prompt),
        prompt_mask=(np.arange(prompt) >= rng.integers(0, 3, (2, 1))).astype(int),
        chosen_ids=tokens(completion),
        chosen_mask=right().astype(int),
        rejected_ids=tokens(completion),
        rejected_mask=right().astype(int),
    )


def dpo_trainer(model, reference, **config):
    dpo = of("sft.dpo.dpo_trainer")
    config = dpo.DPOTrainingConfig(eval_every_n_steps=100, max_steps=1, **config)
    return dpo.DPOTrainer(model, reference, optax.sgd(0.1), config)


@pytest.mark.parametrize(("algorithm", "family"), [("dpo", "qwen2-untied"), ("dpo", "gemma2"), ("orpo", "qwen2-tied")])
def test_preference_losses(algorithm, family, rng):
    model, loss_fn = model_of(family), of("sft.dpo.dpo_trainer").dpo_loss_fn
    # With equal models the share of pairs that are ranked rightly would be that of rounding's signs.
    reference = other(model, rng) if algorithm == "dpo" else None
    data = pairs(rng)
    example = dpo_trainer(model, reference)._prepare_inputs(data)
    ours = dpo_trainer(model, None)._prepare_inputs(data)
    if reference is not None:
        ours = with_reference(ours, reference)
        assert_same(
            (ours.ref_chosen_logps, ours.ref_rejected_logps), (example.ref_chosen_logps, example.ref_rejected_logps)
        )
    options = dict(algorithm=algorithm, label_smoothing=0.1)
    run = lambda f, example: gradients(
        lambda m, train_example: f(m, train_example, **options), model, True, train_example=example
    )
    assert_same(run(with_fused_log_probs(loss_fn), ours), run(loss_fn, example))


@dataclasses.dataclass
class Config:
    """What tunix's policy losses read of their configs."""

    beta: float = 0.04
    epsilon: float = 0.2
    epsilon_low: float = 0.2
    epsilon_high: float = 0.3
    loss_algo: str = "grpo"
    loss_agg_mode: str = "sequence-mean-token-mean"
    kl_loss_mode: str = "low_var_kl"
    kl_clamp_value: float | None = None
    temperature: float = 1.0
    entropy_coef: float = 0.0
    epsilon_c: float | None = 3.0


def completions(rng, model, packed=False, per_token=False):
    """A batch of completions, whose old and reference probabilities are near the model's own."""
    common = of("rl.common")
    prompt, completion = rng.integers(1, VOCAB, (4, 5)), rng.integers(1, VOCAB, (4, 6))
    prompt[:2, :2], completion[1:3, 4:] = 0, 0
    mask, segments = completion != 0, {}
    if packed:
        completion, prompt = np.concatenate([prompt, completion], axis=1), prompt[:, :0]
        mask = np.arange(11) % 6 > 1
        mask = jnp.broadcast_to(mask, completion.shape)
        ids = jnp.broadcast_to(1 + np.arange(11) // 6, completion.shape)
        segments = dict(segment_ids=ids, segment_positions=jnp.broadcast_to(np.arange(11) % 6, completion.shape))
    own = common.compute_per_token_logps(
        *nnx.split(model), jnp.asarray(prompt), jnp.asarray(completion), pad_id=0, eos_id=1, **segments
    )
    near = lambda: own + rng.normal(0, 0.3, own.shape).astype(np.float32)
    return common.TrainExample(
        prompt_ids=jnp.asarray(prompt),
        prompt_mask=jnp.asarray(prompt != 0),
        completion_ids=jnp.asarray(completion),
        completion_mask=jnp.asarray(mask),
        advantages=jnp.asarray(rng.normal(size=completion.shape if packed or per_token else 4), jnp.float32),
        ref_per_token_logps=near(),
        old_per_token_logps=near(),
        **segments,
    )


@pytest.mark.parametrize(
    ("name", "family", "packed", "config"),
    [
        ("grpo_loss_fn", "qwen2-untied", False, Config()),
        ("grpo_loss_fn", "gemma3", False, Config(loss_agg_mode="token-mean", temperature=0.7)),
        ("grpo_loss_fn", "qwen2-tied", False, Config(loss_algo="gspo-token", beta=0.0)),
        ("grpo_loss_fn", "qwen2-tied", True, Config()),
        ("ppo_policy_loss_fn", "qwen3-untied", False, Config(entropy_coef=0.1)),
    ],
)
def test_policy_losses(name, family, packed, config, rng):
    model = model_of(family)
    example = completions(rng, model, packed, per_token=name.startswith("ppo"))
    loss_fn = getattr(of("rl.algo_core"), name)
    run = lambda f: gradients(lambda m, e: f(m, e, config, pad_id=0, eos_id=1), model, True, e=example)
    assert_same(run(with_fused_log_probs(loss_fn)), run(loss_fn))


def test_a_function_that_makes_no_log_probabilities_is_refused():
    with pytest.raises(ValueError, match="must be one of tunix's dpo_loss_fn"):
        with_fused_log_probs(of("rl.algo_core").ppo_value_loss_fn)


def steps(name, rows, length, rng):
    """Our loss function and tunix's, whether they return metrics, and a batch for them."""
    half = jnp.ones((rows, length // 2), int)
    if name == "sft":
        return (sft_loss, of("sft.peft_trainer")._default_loss_fn), False, batch(rng, rows, length)
    if name == "dpo":
        own = of("sft.dpo.dpo_trainer").dpo_loss_fn
        data = of("sft.dpo.dpo_trainer").TrainingInput(*[half[: rows // 2]] * 6)
        inputs = dict(train_example=dpo_trainer(model_of("qwen2-tied"), None)._prepare_inputs(data))
        return (with_fused_log_probs(own), own), True, inputs
    own = of("rl.algo_core").grpo_loss_fn
    bind = lambda f: lambda model, train_example: f(model, train_example, Config(), pad_id=0, eos_id=1)
    example = of("rl.common").TrainExample(half, half, half, half, jnp.ones(rows), half * -1.0, half * -1.0)
    return (bind(with_fused_log_probs(own)), bind(own)), True, dict(train_example=example)


@pytest.mark.parametrize("name", ["sft", "dpo", "grpo"])
def test_the_compiled_step_holds_no_logits(name, rng):
    rows, length, vocab = 4, 256, 8192
    model = model_of("qwen2-tied", vocab=vocab)
    functions, has_aux, inputs = steps(name, rows, length, rng)
    sizes, largest = [], []
    for loss_fn in functions:
        step = nnx.value_and_grad(loss_fn, has_aux=has_aux)
        graph, state = nnx.split(model)
        run = lambda state, inputs, step=step: step(nnx.merge(graph, state), **inputs)  # noqa: B023
        compiled = jax.jit(run).lower(state, inputs).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
        shapes = re.findall(r"\w\[([\d,]+)\]", str(compiled.as_text()))
        largest.append(max(math.prod(map(int, shape.split(","))) for shape in shapes))
    print(f"{name}: {sizes[0]:,} bytes beside tunix's {sizes[1]:,}")
    assert largest[0] <= 256 * vocab and largest[1] >= rows * length * vocab / 2
    assert sizes[0] < sizes[1] / 3


def ours(adapters=False):
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config, rngs=nnx.Rngs(0))
    if adapters:
        add_lora(model, 4, alpha=8, rngs=nnx.Rngs(1))
    return TunixModel(model)


def test_our_model_has_the_same_loss_by_its_logits(rng):
    """So its logits, its mask and its positions are what tunix's trainer means."""
    inputs = batch(rng)
    assert_same(
        gradients(sft_loss, ours(), **inputs), gradients(of("sft.peft_trainer")._default_loss_fn, ours(), **inputs)
    )


def test_our_model_has_the_same_preference_and_policy_losses(rng):
    model = ours()
    own = of("sft.dpo.dpo_trainer").dpo_loss_fn
    example = dpo_trainer(model, other(model, rng))._prepare_inputs(pairs(rng))
    run = lambda f: gradients(f, model, True, train_example=example)
    assert_same(run(with_fused_log_probs(own)), run(own))
    own, example = of("rl.algo_core").grpo_loss_fn, completions(rng, model)
    run = lambda f: gradients(lambda m, e: f(m, e, Config(), pad_id=0, eos_id=1), model, True, e=example)
    assert_same(run(with_fused_log_probs(own)), run(own))


def test_a_mask_that_our_model_cannot_have_gives_nan(rng):
    inputs = batch(rng)
    inputs["attention_mask"] = jnp.ones_like(inputs["attention_mask"])
    assert jnp.isnan(jax.jit(lambda: sft_loss(ours(), **inputs))())


def test_the_example_trains_alike_with_both_losses():
    theirs, mixed, ours = integrations_tunix.main().values()
    np.testing.assert_allclose(mixed, theirs, rtol=1e-4)
    assert ours[-1] < ours[0] - 0.3 and theirs[-1] < theirs[0] - 0.3


def train(model, loss_fn, rng):
    """The losses of six steps of tunix's trainer on one batch."""
    peft = of("sft.peft_trainer")
    config = peft.TrainingConfig(eval_every_n_steps=100, max_steps=6, pbar_description=None)
    trainer, losses, data = peft.PeftTrainer(model, optax.adam(1e-2), config), [], batch(rng)
    trainer.with_gen_model_input_fn(lambda x: x)

    @functools.wraps(loss_fn)
    def recorded(*args, **kwargs):
        loss = loss_fn(*args, **kwargs)
        jax.debug.callback(lambda x: losses.append(float(x)), loss)
        return loss

    trainer.with_loss_fn(recorded).train([data] * 6)
    return losses


@pytest.mark.parametrize("adapters", [False, True])
def test_the_trainer_trains_our_model(adapters, rng):
    model = ours(adapters)
    before = jax.tree.map(jnp.copy, nnx.state(model))
    losses = train(model, sft_loss, rng)
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.01
    moved = jax.tree.map(lambda x, y: bool(jnp.any(x != y)), before, nnx.state(model))
    is_adapter = lambda path: "lora" in jax.tree_util.keystr(path)
    for path, has_moved in jax.tree.leaves_with_path(moved):
        assert has_moved == (is_adapter(path) or not adapters), path


def test_lora_of_qwix_trains_below_the_head_and_is_refused_on_it(rng):
    import qwix  # pyright: ignore[reportMissingImports]

    model = model_of("qwen2-untied")
    with_lora = lambda path: qwix.apply_lora_to_model(
        model, qwix.LoraProvider(module_path=path, rank=2, alpha=4.0), **model.get_model_input(), rngs=nnx.Rngs(1)
    )
    inputs, below = batch(rng), with_lora(".*q_proj|.*up_proj")
    run = lambda f: gradients(f, below, wrt=nnx.LoRAParam, **inputs)
    assert_same(run(sft_loss), run(of("sft.peft_trainer")._default_loss_fn))
    with pytest.raises(ValueError, match="the head of Qwen2 has LoRA"):
        jax.jit(lambda: sft_loss(with_lora(".*lm_head"), **inputs))()


def test_a_model_without_hidden_states_is_refused():
    model = of("models.llama3.model").Llama3
    with pytest.raises(TypeError, match="whose call has no output_hidden_states"):
        hidden_and_head(object.__new__(model), jnp.ones((1, 2), int))
