"""The causal language model of every family: its call, its losses and its generation."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Integer, Num

from liger_jax.losses import shifted_labels
from liger_jax.models.core import arguments
from liger_jax.models.core.blocks import Blocks
from liger_jax.models.core.cache import KVCache, empty_cache
from liger_jax.models.core.decoder import Decoder
from liger_jax.models.core.dropout import drops, token_words
from liger_jax.models.core.experts import EXPERTS, expert_metrics, router_loss
from liger_jax.models.core.kernel_options import KernelOptions
from liger_jax.models.core.layer_stack import Decoded
from liger_jax.models.core.lm_loss import LanguageModelLoss, num_tokens
from liger_jax.models.core.parallel.explicit_axes import with_auto_axes
from liger_jax.models.core.parallel.mesh_axes import check_takes_all_axes
from liger_jax.models.core.predictions import CausalLMOutput, predicted, scored
from liger_jax.models.core.remat import Remat
from liger_jax.models.generation.generate import generate
from liger_jax.models.hugging_face import checkpoint
from liger_jax.models.hugging_face.names import refusing_foreign_names
from liger_jax.models.hugging_face.pretrained import Pretrained
from liger_jax.ops import TokenLogProbs, TokenLosses
from liger_jax.ops.labels import IGNORE_INDEX, as_labels
from liger_jax.ops.linear.fused_linear_token_loss import as_tuple, broadcast_to_tokens, hoisted
from liger_jax.ops.linear.selected_tokens import as_selected
from liger_jax.ops.meshes import varying_axes


class CausalLM(Pretrained):
    """A decoder with a language-model head and its loss: the base class of all families' `…ForCausalLM`.

    A family sets three class attributes: `layer`, which makes a layer (`LlamaLayer` shows its call), `config_type`, its
    config's class, and `config_fixed`, the fields of config.json that have one value only (`config_json.read`).

    Args:
        config: the architecture.
        kernels: which ops run as kernels.
        dtype: dtype of the computation; norms and the rotary embedding are computed in float32 and rounded to it;
            logits and loss are float32.
        param_dtype: dtype of the parameters.
        remat: what each layer keeps for the backward: `"none"` (everything that is expensive to recompute), `"dots"`
            (its products), `"full"` (only its input), `"offload"` (only its input, in the host's memory) or
            `"offload_attention"` (its input and attention's result, in the host's memory). A number n is `"dots"` for
            the last n layers, in whole repetitions of the pattern of their kinds, and `"full"` for the others.
        scan_layers: whether the layers' parameters are stacked and scanned, so that one layer is compiled.
        rngs: `nnx.Rngs` with a stream `params`, or a default one.

    Raises:
        ValueError: `remat` is unknown, or more than the number of layers.
    """

    layer: Callable[[Blocks], nnx.Module]
    decoder: type[Decoder] = Decoder
    dropout_pieces: Any = None  # `lora.with_dropout` sets it

    @refusing_foreign_names
    def __init__(
        self,
        config: Any,
        *,
        kernels: KernelOptions = KernelOptions(),
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        remat: Remat = "none",
        scan_layers: bool = True,
        rngs: nnx.Rngs,
    ):
        self.config, self.kernels = config, kernels
        self.kept = checkpoint.Kept()  # from_pretrained sets it
        self.model = self.decoder(
            config,
            self.layer,
            kernels=kernels,
            dtype=dtype,
            param_dtype=param_dtype,
            remat=remat,
            scan_layers=scan_layers,
            rngs=rngs,
        )
        if not config.tie_word_embeddings:
            normal = nnx.initializers.normal(config.initializer_range)
            self.lm_head = nnx.Param(normal(rngs.params(), (config.vocab_size, config.hidden_size), param_dtype))

    @property
    def head(self) -> Any:
        """The head's weight (V, D), an array or quantised; the embedding if they are tied."""
        tied = self.config.tie_word_embeddings
        return self._head_of(self.model.embed_tokens[...] if tied else self.lm_head[...])

    def _head_of(self, weight):
        """The head that this weight makes; `lora.outside` overrides it."""
        return weight

    def _before_head(self, hidden, words):
        """What the head multiplies; `lora.outside` overrides it."""
        return hidden

    generate = refusing_foreign_names(generate)

    def init_cache(self, batch: int, length: int, dtype: Any = None) -> KVCache:
        """Makes an empty key-value cache; `model(input_ids, cache=cache)` returns it with the tokens added.

        Args:
            batch: B, at least 1.
            length: S, the number of slots for tokens, from 1 to the config's `longest_sequence`.
            dtype: dtype of keys and values; `None` for the computation's dtype.

        Returns:
            The cache, 2·L·B·S·K·H numbers.

        Raises:
            ValueError: `batch` or `length` is out of its range.
        """
        return empty_cache(self.config, batch, length, self.model.dtype if dtype is None else dtype)

    @refusing_foreign_names
    @with_auto_axes
    def __call__(
        self,
        input_ids: Integer[Array, "B T"],
        *,
        labels: Integer[Array, "B T"] | None = None,
        shift_labels: Integer[Array, "B T"] | None = None,
        loss_weights: Float[Array, "B T"] | None = None,
        loss_normalizer: Num[Array, ""] | float | int | None = None,
        token_scaling: bool = False,
        logits_to_keep: int | Int[Array, "kept"] = 0,
        return_logits: bool | None = None,
        return_metrics: bool = False,
        positions: Int[Array, "#B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        attention_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None = None,
        token_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None = None,
        cache: KVCache | None = None,
    ) -> CausalLMOutput:
        """Runs the model. With labels it computes the loss, and returns logits only if requested.

        loss = Σ w·ce / Σ w over scored positions, or Σ w·ce / loss_normalizer. There is no difference between training
        and evaluation. In a mixture of experts, `router_loss` is added, multiplied by Σ w / loss_normalizer if that is
        given, so that the router losses of micro-batches are averaged with their tokens as weights.

        | labels | return_logits | logits | loss |
        |---|---|---|---|
        | no | None, True | kept positions | none |
        | no | False | none | none |
        | yes | None, False | none returned | fused with the head, or as `kernels` says |
        | yes | True | kept positions | from those logits |

        Args:
            input_ids: token ids in [0, V).
            labels: token ids, unshifted, as in Hugging Face: position t is scored against labels[:, t + 1]. Labels of
                -100 are not scored, nor is the last position of a sequence or of a segment.
            shift_labels: shifted labels: position t is scored against shift_labels[:, t].
            loss_weights: weight of each scored position t (not of the position of its label, t + 1).
            loss_normalizer: denominator of the mean. With that of the whole batch, the losses of micro-batches add up.
            token_scaling: whether each position's loss is multiplied by its label's probability, as a constant, as in
                dynamic fine-tuning (arXiv:2508.05629). The denominator does not change.
            logits_to_keep: score and return only the last k positions (0: all), or an array of positions. They are
                selected before the head; each kept position keeps its label.
            return_logits: see the table.
            return_metrics: also return accuracy and, for each position, argmax token, largest logit and log-normaliser.
            positions: the tokens' rotary positions; `None` for 0, 1, 2, … in each document of `segment_ids`, or in each
                row. As in transformers' call, padding on the left that `attention_mask` hides counts; `generate` does
                not count it.
            segment_ids: ids of a packed row's documents, to which attention and loss are restricted. Documents are
                numbered from 1. 0 is padding, which follows them and is not scored.
            attention_mask: 0 where a token is padding, to which no other token attends, and whose id may be any. Labels
                decide what is scored, not this mask.
            token_mask: 0 at padding after the tokens of a row. No token attends to later padding, so attention needs no
                mask. Only routers of a mixture use this: their statistics leave out padding, however it is marked.
            cache: the result of `init_cache`, or the cache that an earlier call returned. The tokens of this call
                follow those in the cache and attend to them. Padding, which may be on the left or on the right, then
                does not count in windows and default positions.

        Returns:
            A `CausalLMOutput`; logits are float32. Under jit, a row of `segment_ids` or `token_mask` in which a 0 comes
            before another number, or an id is negative, is NaN.

        Raises:
            ValueError: a shape is wrong, two arguments exclude each other, an argument would be ignored, or the loss
                needs more than `KernelOptions.memory_budget_bytes`; and, outside of jit, there is such a row.
            TypeError: ids or labels are not integers, or an argument has transformers' name instead of ours.
        """
        scaling = token_scaling or None
        arguments.check_call(input_ids, labels, shift_labels, loss_weights, loss_normalizer, scaling)
        arguments.check_shapes(input_ids.shape, labels=labels, shift_labels=shift_labels, loss_weights=loss_weights)
        kept = logits_to_keep if cache is None else 0  # the decoder says what is wrong with a cache
        targets = self._targets(labels, shift_labels, segment_ids, kept)
        decoded, head = self._decoded_and_head(input_ids, positions, segment_ids, attention_mask, token_mask, cache)
        hidden, targets, loss_weights = arguments.keep(logits_to_keep, decoded.hidden, targets, loss_weights)
        if targets is None:
            wanted = dict(return_logits=return_logits is not False, return_metrics=return_metrics)
            out = predicted(self._loss, hidden, head, **wanted)
        else:
            wanted = dict(return_logits=bool(return_logits), return_metrics=return_metrics)
            loss = dataclasses.replace(self._loss, token_scaling=token_scaling)
            out = scored(loss, hidden, head, targets, loss_weights, loss_normalizer, **wanted)
        experts = None
        if self.config.experts is not None and (sums := decoded.aux.get(EXPERTS)) is not None:
            experts = expert_metrics(sums) if return_metrics else None
            if targets is not None:
                share = 1.0 if loss_normalizer is None else num_tokens(targets, loss_weights) / loss_normalizer
                out = dataclasses.replace(out, loss=out.loss + share * router_loss(self.config, sums))
        return dataclasses.replace(out, cache=decoded.cache, aux=decoded.aux or None, experts=experts)

    @refusing_foreign_names
    @with_auto_axes
    def hidden_states(
        self,
        input_ids: Integer[Array, "B T"],
        *,
        positions: Int[Array, "#B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        attention_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None = None,
        token_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """The hidden states after the last norm, from which the head computes logits, for your own losses.

        Arguments and errors are those of the call.

        Returns:
            (B, T, D) in the computation's dtype. Their products with `head` are the call's logits. An adapter on the
            head adds the same number of columns to them and to `head`.
        """
        arguments.check_call(input_ids, None, None)
        return self._decoded_and_head(input_ids, positions, segment_ids, attention_mask, token_mask)[0].hidden

    @refusing_foreign_names
    @with_auto_axes
    def log_probs(
        self,
        input_ids: Integer[Array, "B T"],
        *,
        labels: Integer[Array, "B T"] | None = None,
        shift_labels: Integer[Array, "B T"] | None = None,
        selected_token_ids: Integer[Array, " K"] | Sequence[int] | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
        logits_to_keep: int | Int[Array, "kept"] = 0,
        positions: Int[Array, "#B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        attention_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None = None,
        token_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None = None,
    ) -> TokenLogProbs:
        """The log-probability of each label, and optionally each position's entropy, without logits in memory.

        Preference and policy losses are computed from it (`fused_linear_log_probs`). Position t has the log-probability
        of labels[:, t + 1], as in the call. A position that is not scored has 0.

        With `selected_token_ids`, the log-probabilities of the same K tokens are also returned for each scored
        position, such as "yes" and "no" for a grader. Labels may then be omitted: every position is scored, including
        the last one, with the first of these tokens as its label.

        Arguments that are not listed, and errors, are those of the call.

        Args:
            labels: token ids, unshifted; neither -100 nor the last position of a sequence or a segment is scored.
            shift_labels: shifted labels.
            selected_token_ids: token ids in [0, V), at least one. Under jit any other id has NaN.
            temperature: the logits are divided by it, a Python number > 0.
            entropy: whether entropies are returned, too.
            logits_to_keep: only the last k positions (0: all), or an array of positions. Each keeps its label.

        Returns:
            `TokenLogProbs` of (B, kept) arrays, where `selected_log_probs` is (B, kept, K). `selected_log_probs`,
            `log_probs` and `entropy` are differentiable.
        """
        rows = positions, segment_ids, attention_mask, token_mask
        selected = as_selected("log_probs", selected_token_ids, self.config.vocab_size)
        if selected is not None and labels is None and shift_labels is None:
            shift_labels = jnp.broadcast_to(selected[0], input_ids.shape)
        hidden, targets, head = self._labelled("log_probs", input_ids, labels, shift_labels, logits_to_keep, rows)
        return self._loss.log_probs(hidden, head, targets, selected, temperature=temperature, entropy=entropy)

    def token_loss(
        self,
        loss_fn: Callable[..., Any],
        input_ids: Integer[Array, "B T"],
        *,
        labels: Integer[Array, "B T"] | None = None,
        shift_labels: Integer[Array, "B T"] | None = None,
        per_token: tuple[Any, ...] = (),
        denominator: Any,
        temperature: float = 1.0,
        entropy: bool = False,
        logits_to_keep: int | Int[Array, "kept"] = 0,
        positions: Int[Array, "#B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        attention_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None = None,
        token_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, ""], TokenLosses]:
        """Sums any function of a log-probability over the scored positions, without logits in memory.

        It is `fused_linear_token_loss` with the labels of `log_probs`: position t scores labels[:, t + 1].
        Arguments that are not listed, and errors, are those of `log_probs`.

        Args:
            loss_fn: takes a token's log-probability, its entropy if `entropy=True`, and one number of each of
                `per_token`, and returns the token's loss. It may close over traced values.
            per_token: arrays that broadcast to (B, kept), by position, like the results of `log_probs`.
            denominator: the sum is divided by it: a number or a () array, for all devices and micro-batches together.
            entropy: whether `loss_fn` takes the entropy.

        Returns:
            (loss, `TokenLosses` of (B, kept) arrays).
        """
        check_takes_all_axes("token_loss", self.kernels.mesh_layout)
        per_token = as_tuple("token_loss", per_token)
        of_tokens = [x for x in (input_ids, labels, shift_labels, segment_ids) if x is not None]
        varying = varying_axes(*map(as_labels, of_tokens), *per_token)
        function, constants = hoisted("token_loss", loss_fn, 1 + entropy, per_token, varying)
        return self._token_loss(
            input_ids,
            function=function,
            constants=constants,
            per_token=per_token,
            denominator=jnp.asarray(denominator, jnp.float32),
            labels=labels,
            shift_labels=shift_labels,
            logits_to_keep=logits_to_keep,
            rows=(positions, segment_ids, attention_mask, token_mask),
            temperature=temperature,
            entropy=entropy,
        )

    @with_auto_axes
    def _token_loss(
        self, input_ids, *, function, constants, per_token, denominator, labels, shift_labels, logits_to_keep, rows,
        temperature, entropy,
    ):  # fmt: skip
        hidden, targets, head = self._labelled("token_loss", input_ids, labels, shift_labels, logits_to_keep, rows)
        per_token = tuple(broadcast_to_tokens("token_loss", per_token, targets.shape))
        options = dict(denominator=denominator, temperature=temperature, entropy=entropy)
        return self._loss.token_loss(function, hidden, head, targets, per_token, constants, **options)

    def _labelled(self, caller, input_ids, labels, shift_labels, logits_to_keep, rows):
        """Hidden states and labels of the kept positions, and the head; `rows` are `_decoded_and_head`'s."""
        arguments.check_call(input_ids, labels, shift_labels)
        arguments.check_shapes(input_ids.shape, labels=labels, shift_labels=shift_labels)
        targets = self._targets(labels, shift_labels, rows[1], logits_to_keep)
        if targets is None:
            raise ValueError(f"{caller} needs the labels whose log-probabilities to return. Pass labels=input_ids.")
        decoded, head = self._decoded_and_head(input_ids, *rows)
        return *arguments.keep(logits_to_keep, decoded.hidden, targets), head

    def _targets(self, labels, shift_labels, segment_ids, logits_to_keep):
        """The label of each position, or None."""
        if (sequence := self.kernels.mesh_layout.sequence_shards()) is not None:
            sequence.check_labels(labels, logits_to_keep)
        if labels is not None:
            return shifted_labels(labels, segment_ids)
        targets = None if shift_labels is None else as_labels(shift_labels)
        return targets if targets is None or segment_ids is None else jnp.where(segment_ids != 0, targets, IGNORE_INDEX)

    def _decoded_and_head(
        self, input_ids, positions, segment_ids, attention_mask, token_mask, cache=None
    ) -> tuple[Decoded, Any]:
        """What the decoder makes of the tokens, and the head (V, D)."""
        input_ids, shape = as_labels(input_ids), input_ids.shape
        masks = dict(segment_ids=segment_ids, attention_mask=attention_mask, token_mask=token_mask)
        arguments.check_rows(shape, positions, cache, **masks)
        if attention_mask is not None:  # an id outside the vocabulary is NaN, and 0 · NaN reaches other tokens
            input_ids = jnp.where(
                attention_mask.astype(bool), input_ids, jnp.clip(input_ids, 0, self.config.vocab_size - 1)
            )
        per_token = dict(positions=positions, **masks)
        words = None
        if drops(self):
            pieces = None if self.dropout_pieces is None else self.dropout_pieces[...]
            first, sequence = 0 if cache is None else cache.length, self.kernels.mesh_layout.sequence_shards()
            rows = dict(segment_ids=segment_ids, attention_mask=attention_mask)
            words = token_words(shape, pieces=pieces, **rows, first=first, sequence=sequence)
        per_token["dropout_words"] = words
        if cache is None and self.config.tie_word_embeddings:
            inputs_embeds, table = self.model.embed(input_ids)
            decoded, head = self.model(input_ids, inputs_embeds=inputs_embeds, **per_token), self._head_of(table)
        else:
            decoded, head = self.model(input_ids, **per_token, cache=cache), self.head
        return decoded._replace(hidden=self._before_head(decoded.hidden, words)), head

    @property
    def _loss(self) -> LanguageModelLoss:
        return LanguageModelLoss(self.config, self.kernels, self.model.stack.remat, self.head.dtype)
