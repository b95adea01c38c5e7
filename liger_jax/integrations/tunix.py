"""Tunix's trainers with this library's losses, and this library's models in tunix's trainers.

    PeftTrainer(model, optimizer, config).with_loss_fn(sft_loss)
    DPOTrainer(model, None, optimizer, config).with_loss_fn(with_fused_log_probs(dpo_loss_fn), has_aux=True)
    register_policy_loss_fn("fused")(with_fused_log_probs(grpo_loss_fn))  # GRPOConfig(policy_loss_fn="fused")

Tunix's models make logits in every call. These functions ask for the hidden states beside them, and never read the
logits, so that the compiler leaves them out of the program.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Num

from liger_jax.integrations import maxtext
from liger_jax.losses import causal_lm_loss
from liger_jax.models.causal_lm import CausalLM
from liger_jax.ops import TokenLogProbs, fused_linear_log_probs

_WITHOUT_CODE = types.SimpleNamespace(co_names=())  # in the place of a function's code


class TunixModel(nnx.Module):
    """Wraps one of this library's models for tunix's trainers.

    Its parameters are those of the model: train this module, then save `self.model`.

    Args:
        model: any `…ForCausalLM`, with adapters or without.

    Example:
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...                      num_attention_heads=2)
        >>> model = TunixModel(LlamaForCausalLM(config, rngs=nnx.Rngs(0)))
        >>> tokens, positions = jnp.ones((1, 4), int), jnp.arange(4)[None]
        >>> logits, cache = model(tokens, positions, None, jnp.tri(4, dtype=bool)[None])
        >>> logits.shape, cache
        ((1, 4, 32), None)
    """

    def __init__(self, model: CausalLM):
        self.model = model

    def __call__(
        self,
        input_tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        cache: None = None,
        attention_mask: Num[Array, "B T T"] | Bool[Array, "B T T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T V"], None]:
        """Logits, as tunix's models return them.

        Args:
            input_tokens: token ids.
            positions: rotary positions; None for 0, 1, 2, …
            cache: None.
            attention_mask: causal and without padding's columns, as tunix's `make_causal_attn_mask` makes it. Logits
                are NaN for any other mask.
            segment_ids: attention stays within equal ids. 0 is padding, also before a row's tokens.

        Returns:
            (B, T, V) float32 logits, and None for the cache.

        Raises:
            ValueError: there is a cache.
        """
        if cache is not None:
            raise ValueError("TunixModel: cache must be None. Generate with this library's model.generate.")
        inputs, is_causal = self.inputs(attention_mask, segment_ids)
        out = self.model(input_tokens, positions=positions, **inputs)
        return jnp.where(is_causal, out.logits, jnp.nan), None

    @staticmethod
    def inputs(
        attention_mask: jax.Array | None, segment_ids: jax.Array | None = None
    ) -> tuple[dict[str, jax.Array], jax.Array | bool]:
        """The arguments of this library's call from those of tunix's, and whether the mask is causal: () bool."""
        inputs, is_causal = {}, jnp.asarray(True)
        if attention_mask is not None:
            seen = attention_mask != 0
            inputs["attention_mask"] = seen[:, -1]
            causal = jnp.tri(seen.shape[-1], dtype=bool)[None] & seen[:, -1:]
            is_causal = jnp.all(seen == causal)
        if segment_ids is not None:  # padding before a row's tokens is the mask's here
            is_token = segment_ids != 0
            is_before = jnp.cumsum(is_token, axis=1) == 0
            inputs["segment_ids"] = jnp.where(is_before, 1, segment_ids)
            inputs["attention_mask"] = inputs.get("attention_mask", True) & is_token
        return inputs, is_causal


def hidden_and_head(
    model: Any, input_tokens: Int[Array, "B T"], **inputs: Any
) -> tuple[Float[Array, "B T D"], dict[str, Any]]:
    """The hidden states before the head of one of tunix's models, and the head, for your own losses.

    Call it under `jit`, as tunix does: outside of it, the logits are computed although they are not used.

    Args:
        model: tunix's `Qwen2`, `Qwen3`, `Gemma` (1 and 2) or `Gemma3`, perhaps with qwix's LoRA outside of its head; or
            MaxText's `TunixMaxTextAdapter`.
        input_tokens: token ids.
        **inputs: the other arguments of the model's call.

    Returns:
        The hidden states after the last norm, and the head as arguments of the linear losses: `weight`,
        `weight_layout`, and the scale and softcap of its logits.

    Raises:
        TypeError: the model does not return hidden states.
        ValueError: the head has LoRA, or is quantised.
    """
    if type(model).__name__ == "TunixMaxTextAdapter":  # it takes output_hidden_states, and returns none
        return maxtext.hidden_and_head(model, input_tokens, **inputs)
    if not _takes(model, "output_hidden_states"):
        raise TypeError(
            f"model is a {type(model).__name__}, whose call has no output_hidden_states; it must be one of tunix's "
            "Qwen2, Qwen3, Gemma and Gemma3, MaxText's adapter, or a model of this library as TunixModel(model)."
        )
    model(input_tokens, cache=None, output_hidden_states=True, **inputs)
    hidden = model.all_hidden_states.get_value()[-1]
    del model.all_hidden_states
    is_tied = not hasattr(model, "lm_head")
    owner, name = (model.embedder, "input_embedding") if is_tied else (model.lm_head, "w")
    weight = getattr(owner, name).get_value()
    if hasattr(owner, f"{name}_lora_a") or not isinstance(weight, jax.Array):
        raise ValueError(
            f"the head of {type(model).__name__} has LoRA or is quantised; it must be a plain array. Leave the head "
            "out of the module_path of qwix's rules."
        )
    softcap = getattr(model, "final_logits_softcap", None)
    return hidden, dict(weight=weight, weight_layout="vd" if is_tied else "dv", logit_softcap=softcap)


def sft_loss(
    model: Any,
    input_tokens: Int[Array, "B T"],
    input_mask: Num[Array, "B T"] | Bool[Array, "B T"],
    positions: Int[Array, "B T"],
    attention_mask: Num[Array, "B T T"] | Bool[Array, "B T T"],
    images: Float[Array, "..."] | None = None,
) -> Float[Array, ""]:
    """The loss of tunix's `PeftTrainer` without logits, for `with_loss_fn`.

    loss = Σ m·ce / Σ m, where m is the mask of the predicted token.

    Args:
        model: one of tunix's models, or a `TunixModel`.
        input_tokens: token ids.
        input_mask: 1 for scored tokens, 0 for others, or weights in between.
        positions: rotary positions.
        attention_mask: which tokens attend to which.
        images: pixels, for models that take them.

    Returns:
        The float32 loss, 0 if no token is scored.

    Raises:
        TypeError, ValueError: as from `hidden_and_head`.
    """
    weights = jnp.pad(input_mask[:, 1:].astype(jnp.float32), ((0, 0), (0, 1)))
    if isinstance(model, TunixModel):
        inputs, is_causal = model.inputs(attention_mask)
        out = model.model(input_tokens, labels=input_tokens, loss_weights=weights, positions=positions, **inputs)
        return jnp.where(is_causal, out.loss, jnp.nan)
    inputs = dict(positions=positions, attention_mask=attention_mask) | _given(images=images)
    hidden, head = hidden_and_head(model, input_tokens, **inputs)
    loss: Any = causal_lm_loss(hidden, head.pop("weight"), input_tokens, token_weights=weights, **head)
    return loss


def with_fused_log_probs(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes one of tunix's loss functions compute log-probabilities and entropies without logits.

    The rest of the function is tunix's: its ratios, clipping, penalty, options and metrics.

    Args:
        loss_fn: `dpo_loss_fn` (DPO and ORPO), `grpo_loss_fn` (GRPO, Dr. GRPO, RLOO, GSPO) or `ppo_policy_loss_fn`.

    Returns:
        A copy of the function; tunix's function is not changed.

    Raises:
        ValueError: the function does not compute log-probabilities in the way that these functions do.
    """
    names, used = getattr(loss_fn, "__globals__", {}), getattr(loss_fn, "__code__", _WITHOUT_CODE).co_names
    if "compute_logps" in used:
        changed = {"compute_logps": _pair_log_probs}
    elif "compute_per_token_logps" in used and "common" in names:
        common = names["common"]
        fused = {"compute_per_token_logps": functools.partial(_completion_log_probs, common.process_ids)}
        # The entropies come in the logits' place.
        entropies = {"compute_entropy_from_logits": lambda entropy: entropy}
        changed = {"common": types.SimpleNamespace(**{**vars(common), **fused}), **entropies}
    else:
        raise ValueError(
            f"loss_fn is {getattr(loss_fn, '__name__', loss_fn)}; it must be one of tunix's dpo_loss_fn, grpo_loss_fn "
            "and ppo_policy_loss_fn. In your own loss take hidden_and_head and fused_linear_log_probs."
        )
    copy = types.FunctionType(loss_fn.__code__, {**names, **changed}, argdefs=loss_fn.__defaults__)
    copy.__kwdefaults__ = loss_fn.__kwdefaults__
    return functools.wraps(loss_fn)(copy)


def with_reference(example: Any, model: Any) -> Any:
    """Adds a reference's log-probabilities to a batch of tunix's `DPOTrainer`, without logits.

    Give the trainer `ref_model=None`, and call this in its `_prepare_inputs`.

    Args:
        example: the `TrainExample` that `DPOTrainer._prepare_inputs` returns.
        model: the reference, one of tunix's models or a `TunixModel`.

    Returns:
        The example with `ref_chosen_logps` and `ref_rejected_logps`.

    Raises:
        TypeError, ValueError: as from `hidden_and_head`.
    """
    chosen, rejected = _reference(model, example)
    return dataclasses.replace(example, ref_chosen_logps=chosen, ref_rejected_logps=rejected)


def _takes(model: Any, name: str) -> bool:
    return name in inspect.signature(type(model).__call__).parameters


def _given(**arguments: Any) -> dict[str, Any]:
    return {name: x for name, x in arguments.items() if x is not None}


def _last_log_probs(model, tokens, num_kept: int, temperature: float, entropy: bool, **inputs) -> TokenLogProbs:
    """Log-probabilities of the last tokens, each predicted by the position before it."""
    if isinstance(model, TunixModel):
        options, is_causal = model.inputs(inputs.pop("attention_mask"), inputs.pop("segment_ids", None))
        kept = tokens.shape[1] - 1 - num_kept + jnp.arange(num_kept)
        options |= dict(labels=tokens, logits_to_keep=kept, temperature=temperature, entropy=entropy)
        output = model.model.log_probs(tokens, **inputs, **options)
        return jax.tree.map(lambda x: jnp.where(is_causal, x, jnp.nan) if x.dtype == jnp.float32 else x, output)
    hidden, head = hidden_and_head(model, tokens, **inputs)
    hidden, labels = hidden[:, -num_kept - 1 : -1], tokens[:, -num_kept:]
    options = dict(ignore_index=None, temperature=temperature, entropy=entropy, metrics=False)
    return fused_linear_log_probs(hidden, head.pop("weight"), labels, **options, **head)


def _pair_log_probs(
    model, input_ids, positions, attention_mask, logits_to_keep: int, completion_mask, images=None
) -> tuple[jax.Array, jax.Array]:
    """Tunix's `compute_logps`: sums of chosen and of rejected completions, (B,) each."""
    inputs = dict(positions=positions, attention_mask=attention_mask) | _given(images=images)
    output = _last_log_probs(model, input_ids, logits_to_keep, 1.0, False, **inputs)
    chosen, rejected = jnp.split(jnp.sum(output.log_probs * completion_mask, axis=-1), 2)
    return chosen, rejected


@nnx.jit
def _reference(model, example):
    return _pair_log_probs(
        model,
        example.input_ids,
        example.positions,
        example.attention_mask,
        example.logits_to_keep,
        example.completion_mask,
        getattr(example, "images", None),  # tunix 0.1.5, which MaxText 0.2.5 installs with, has no images
    )


def _completion_log_probs(
    process_ids, graphdef, state, prompt_tokens, completion_tokens, pad_id, eos_id, images=None, stop_gradient=True,
    return_logits=False, segment_ids=None, segment_positions=None, temperature=1.0,
):  # fmt: skip
    """Tunix's `compute_per_token_logps`, with entropies in the place of logits."""
    model = nnx.merge(graphdef, state)
    tokens, positions, attention_mask, token_ids = process_ids(
        prompt_tokens, completion_tokens, pad_id, eos_id, segment_ids, segment_positions
    )
    is_packed = segment_ids is not None
    inputs = dict(positions=positions, attention_mask=attention_mask) | _given(images=images)
    if _takes(model, "segment_ids"):
        inputs["segment_ids"] = segment_ids if is_packed else token_ids
    num_kept = tokens.shape[1] - 1 if is_packed else completion_tokens.shape[1]
    # Tunix takes a temperature of 0, which is greedy sampling, as 1.
    output = _last_log_probs(model, tokens, num_kept, temperature or 1.0, return_logits, **inputs)
    result = (output.log_probs, output.entropy) if return_logits else (output.log_probs,)
    if is_packed:  # the first token of a row has no probability
        result = tuple(jnp.pad(x, ((0, 0), (1, 0))) for x in result)
    result = jax.lax.stop_gradient(result) if stop_gradient else result
    return result if return_logits else result[0]
