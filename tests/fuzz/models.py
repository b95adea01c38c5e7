"""Cases of whole models: a tiny one of a random family, as it is called in training."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from liger_jax import models
from liger_jax.models import lora
from liger_jax.ops import YarnRope
from tests.fuzz.attention import segments, tokens
from tests.fuzz.case import Case, Draw, options_text

GEMMA = dict(query_pre_attn_scalar=(3, 9), sliding_window=(1, 3, 500))
GEMMA_4 = dict(
    num_kv_shared_layers=(1,), hidden_size_per_layer_input=(8,), attention_k_eq_v=(True,), use_double_wide_mlp=(True,),
    rope_scaling=(None,),
)  # fmt: skip
MIXTURE = dict(output_router_logits=(True,), router_aux_loss_coef=(0.5,), router_z_loss_coef=(0.01,))
DELTA = dict(full_attention_interval=(1, 2), linear_conv_kernel_dim=(1, 3))
YARN = YarnRope(4.0, 8)
GRANITE = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logit_scale")
FAMILIES = {
    "llama": (models.LlamaForCausalLM, dict(tie_word_embeddings=(True,), logit_scale=(0.5,))),
    "mistral": (models.MistralForCausalLM, dict(sliding_window=(1, 4, None))),
    "qwen2": (models.Qwen2ForCausalLM, dict(tie_word_embeddings=(True,), use_sliding_window=(True,))),
    "qwen3": (models.Qwen3ForCausalLM, dict(tie_word_embeddings=(True,))),
    "olmo2": (models.Olmo2ForCausalLM, dict(tie_word_embeddings=(True,))),
    "olmo3": (models.Olmo3ForCausalLM, dict(sliding_window=(1, 3, 500))),
    "exaone4": (models.Exaone4ForCausalLM, dict(sliding_window=(1, 3, None))),
    "hunyuandensev1": (models.HunYuanDenseV1ForCausalLM, dict(attention_bias=(True,))),
    "glm4": (models.Glm4ForCausalLM, dict(partial_rotary_factor=(1.0,), attention_bias=(False,))),
    "ministral3": (models.Ministral3ForCausalLM, dict(sliding_window=(1, 4, None), rope_scaling=(YARN,))),
    "granite": (models.GraniteForCausalLM, dict.fromkeys(GRANITE, (0.3, 3.0))),
    "smollm3": (models.SmolLM3ForCausalLM, dict(no_rope_layer_interval=(1, 2), use_sliding_window=(True,))),
    "phi3": (models.Phi3ForCausalLM, dict(partial_rotary_factor=(0.5,), sliding_window=(1, 4))),
    "gemma": (models.GemmaForCausalLM, dict(tie_word_embeddings=(True, False))),
    "gemma2": (models.Gemma2ForCausalLM, GEMMA | dict(attn_logit_softcapping=(5.0, None))),
    "gemma3": (models.Gemma3ForCausalLM, GEMMA | dict(final_logit_softcapping=(3.0,))),
    "gemma4": (models.Gemma4ForCausalLM, GEMMA_4),
    "mixtral": (models.MixtralForCausalLM, MIXTURE),
    "qwen3moe": (models.Qwen3MoeForCausalLM, MIXTURE | dict(norm_topk_prob=(True,), mlp_only_layers=((0,),))),
    "qwen3next": (models.Qwen3NextForCausalLM, MIXTURE | DELTA | dict(mlp_only_layers=((0,),))),
    "qwen3_5": (models.Qwen3_5ForCausalLM, DELTA),
    "qwen3_5moe": (models.Qwen3_5MoeForCausalLM, MIXTURE | DELTA),
    "olmohybrid": (models.OlmoHybridForCausalLM, DELTA | dict(linear_allow_neg_eigval=(False,), rope_theta=(None,))),
    "lfm2": (models.Lfm2ForCausalLM, dict(conv_bias=(True,), conv_L_cache=(1, 4), full_attn_idxs=((0,), (1,)))),
    "olmoe": (models.OlmoeForCausalLM, MIXTURE | dict(norm_topk_prob=(True,))),
    "gptoss": (models.GptOssForCausalLM, MIXTURE | dict(sliding_window=(1, 3, 500))),
}


def _config(draw: Draw, family: str):
    model, choices = FAMILIES[family]
    kv_heads, shared, experts = draw.size(2), draw.size(3), draw.size(5, 16)
    head_dim = 2 * draw.pick(*((4, 16, 20, 32, 64) if draw.large else (1, 3, 4, 7)))
    fields = dict(
        vocab_size=draw.size(70, 1500, least=2),
        hidden_size=draw.size(40, 400, least=2),
        intermediate_size=draw.size(50, 700),
        num_hidden_layers=draw.pick(1, 2),
        num_attention_heads=kv_heads * shared,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=1024,
        initializer_range=draw.pick(0.05, 0.2),
        sliding_window=4,
        max_window_layers=1,
        # A token goes to all experts: where it has a choice, a rounding sends it to others. `moe_mlp` draws choices.
        num_experts=experts,
        num_local_experts=experts,
        num_experts_per_tok=experts,
        moe_intermediate_size=draw.size(50, 300),
        shared_expert_intermediate_size=draw.size(50, 300),
        linear_num_key_heads=kv_heads,
        linear_num_value_heads=kv_heads * draw.pick(1, 2),
        linear_key_head_dim=draw.pick(1, 4, 9),
        linear_value_head_dim=draw.pick(1, 4, 9),
    )
    fields |= draw.optional(**choices)
    if fields["num_hidden_layers"] == 1:  # which then has experts
        fields.pop("mlp_only_layers", None)
    if hasattr(model.config_type, "full_attention_interval"):  # a quarter of the columns is rotated, in halves
        fields["head_dim"] *= 4
    if "partial_rotary_factor" in fields or family == "glm4":  # half of the columns are rotated, in halves
        fields["head_dim"] *= 2
    if family == "gemma4":
        layers: int = fields["num_hidden_layers"]
        own: dict[str, Any] = dict(global_head_dim=2 * head_dim, vocab_size_per_layer_input=fields["vocab_size"])
        own |= dict(hidden_size_per_layer_input=0, layer_types=("full_attention",) * layers)
        fields = own | fields | dict(num_kv_shared_layers=min(fields.get("num_kv_shared_layers", 0), layers - 1))
    known = {field.name for field in dataclasses.fields(model.config_type)} - {*model.config_type.never}
    return model.config_type(**{name: x for name, x in fields.items() if name in known})


def _batch(draw: Draw, vocab_size: int, shape: tuple[int, int], packed: bool, padded: bool, weighted: bool):
    """The arrays of a call: tokens, labels, and perhaps segments with their positions, or padding; and weights."""
    input_ids = draw.integers(vocab_size, shape)
    ignored = draw.rng.uniform(size=shape) < draw.pick(0.0, 0.3, 1.0)
    batch = {"input_ids": input_ids, "labels": jnp.where(ignored, -100, input_ids)}
    if packed:
        ids = segments(draw, *shape)
        starts = np.concatenate([np.ones((shape[0], 1), bool), np.diff(np.asarray(ids)) != 0], axis=1)
        places = np.arange(shape[1])
        batch["segment_ids"] = ids
        batch["positions"] = jnp.asarray(places - np.maximum.accumulate(np.where(starts, places, 0), axis=1), jnp.int32)
    elif padded:
        batch["token_mask"] = jnp.asarray(tokens(draw, *shape))
        batch["labels"] = jnp.where(batch["token_mask"] == 1, batch["labels"], -100)
    if weighted:
        batch["loss_weights"] = draw.uniform(shape, jnp.float32)
    return batch


def _laid_otherwise(batch: dict):
    """The arrays of rows with padding, with a row of padding and two places in each row more, told by another mask."""
    told = batch.pop("token_mask", batch.get("segment_ids"))
    if told is None:
        return batch
    more = lambda name, x: jnp.pad(x, ((0, 1), (0, 2)), constant_values=-100 if name == "labels" else 0)
    return {name: more(name, x) for name, x in {**batch, "attention_mask": told != 0}.items()}


def _model(family: str, draw: Draw) -> Case:
    config, dtype = _config(draw, family), draw.dtype()
    param_dtype = draw.pick(jnp.float32, dtype)
    shape, packed, weighted = (draw.size(3), draw.size(24, 300)), draw.chance(0.4), draw.chance(0.3)
    padded = draw.chance(0.4)
    kernels = models.KernelOptions(**draw.optional(mode=("auto", "fast", "lean")))
    is_mixed = len({config.feed_forward_of(i) for i in range(config.num_hidden_layers)}) > 1
    options = dict(scan_layers=draw.chance(0.6) and not is_mixed, param_dtype=param_dtype)
    own = dict(dtype=dtype, remat=draw.pick("none", "none", "dots", "full", 1), kernels=kernels)
    plain = models.KernelOptions(
        rope=False, rms_norm=False, glu=False, fused_linear_cross_entropy=False, attention="xla", implementation="xla"
    )
    rank, dropout = draw.pick(0, 0, 1), draw.pick(0.0, 0.5)
    call = dict(loss_normalizer=draw.pick(None, None, 37.0), token_scaling=draw.chance(0.2))

    def build(**others):
        model = FAMILIES[family][0](config, **options, **others, rngs=nnx.Rngs(0))
        return lora.add_lora(model, 1, alpha=2, dropout=dropout, rngs=nnx.Rngs(1)) if rank else model

    parameters = {".".join(map(str, path)): x for path, x in nnx.to_flat_state(nnx.state(nnx.eval_shape(build)))}

    def inputs(draw):
        arrays = {name: draw.normal(x.shape, x.dtype, config.initializer_range) for name, x in parameters.items()}
        return arrays, _batch(draw, config.vocab_size, shape, packed, padded, weighted)

    def loss_of(build, cast, laid=lambda batch: batch):
        graph, state = nnx.split(nnx.eval_shape(build))

        def loss(**arrays):
            values = [cast(arrays.pop(name)) for name in parameters]
            model = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), values))
            model = lora.with_dropout(model, jax.random.key(1)) if rank and dropout else model
            return model(**laid(arrays), **call).loss

        return loss

    ours = loss_of(functools.partial(build, **own), lambda x: x)
    # Norms and losses are float32 in the formula, too.
    formula = functools.partial(build, dtype=jnp.float32, kernels=plain)
    truth = loss_of(formula, lambda x: x.astype(jnp.float32), _laid_otherwise)
    return Case(
        family,
        ours,
        truth,
        inputs,
        f"{config} {options_text({**options, **own, 'rank': rank, 'dropout': dropout, **call})}",
        has_products=True,
        # "fast" makes gradients before a loss scale reaches them, which float16 may round to 0.
        may_refuse=("mode",) if kernels.mode == "fast" and dtype == jnp.float16 else (),
        computes_in=dtype,
        depth=2 * config.num_hidden_layers,
        cancels=True,
    )


MODELS = {family: functools.partial(_model, family) for family in FAMILIES}
