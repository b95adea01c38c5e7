"""The loss of a language model from hidden states or from logits, on one device or on a batch that is sharded."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from liger_jax import ops
from liger_jax.models.core import plain
from liger_jax.models.core.embedding import logit_options_of
from liger_jax.models.core.kernel_options import KernelOptions
from liger_jax.models.core.memory import Head, loss_budget_bytes
from liger_jax.models.core.parallel.vocabulary_shards import vocabulary_of
from liger_jax.models.core.remat import Remat
from liger_jax.ops import LossMetrics, TokenLogProbs, TokenLosses
from liger_jax.ops.block_quantized import BlockQuantized
from liger_jax.ops.labels import IGNORE_INDEX
from liger_jax.ops.linear.quantized_head import quantized_log_probs
from liger_jax.ops.linear.split_head import SplitHead
from liger_jax.ops.place import device_of
from liger_jax.pallas_kernels.tiles import least_size

Result = tuple[Float[Array, ""], LossMetrics | None]


@dataclasses.dataclass(frozen=True)
class LanguageModelLoss:
    """Σ w·ce over the positions that are scored, or its mean."""

    config: Any  # the architecture
    kernels: KernelOptions  # which of the losses runs, and how
    remat: Remat  # what the model's layers keep for the backward, which decides the fused loss's share of memory
    table_dtype: Any  # dtype of the parameter that the head is. A tied bfloat16 head reaches the loss as float32.
    token_scaling: bool = False  # whether each position's loss is multiplied by its label's probability

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        head: Any,
        logits: Float[Array, "B T V"] | None,
        targets: Int[Array, "B T"],
        loss_weights: Float[Array, "B T"] | None,
        *,
        reduction: str,
        return_metrics: bool,
    ) -> Result:
        """The loss from the logits where there are any, else from hidden states and head."""
        if self.kernels.mesh_layout.axes:
            return self._sharded(hidden, head, logits, targets, loss_weights, reduction, return_metrics)
        return self._local(hidden, logits, targets, loss_weights, head, reduction, return_metrics)

    def log_probs(
        self,
        hidden: Float[Array, "B T D"],
        head: Any,
        targets: Int[Array, "B T"],
        selected: Int[Array, " K"] | None = None,
        *,
        temperature: float,
        entropy: bool,
    ) -> TokenLogProbs:
        """The log-probabilities of the targets, of each device's shard of the batch where it is sharded.

        `selected`: the tokens whose log-probabilities are wanted at every position.
        """
        local = functools.partial(
            quantized_log_probs if isinstance(head, BlockQuantized) else ops.fused_linear_log_probs,
            ignore_index=IGNORE_INDEX,
            temperature=temperature,
            entropy=entropy,
            memory_budget_bytes=self.kernels.memory_budget_bytes,
            implementation=self.kernels.implementation,
            **logit_options_of(self.config),
        )
        vocabulary = self._vocabulary()
        in_order = lambda hidden, targets, selected, head: local(
            hidden, head, targets, selected_token_ids=selected, **vocabulary(head)
        )
        layout = self.kernels.mesh_layout
        return layout.run(in_order, (hidden, targets), (selected,), head, spec=layout.in_loss)

    def token_loss(
        self,
        function: Callable[..., jax.Array],
        hidden: Float[Array, "B T D"],
        head: Any,
        targets: Int[Array, "B T"],
        per_token: tuple[Array, ...],
        constants: tuple[Array, ...],
        *,
        denominator: Float[Array, ""],
        temperature: float,
        entropy: bool,
    ) -> tuple[Float[Array, ""], TokenLosses]:
        """Sums a function of the log-probability over all devices' tokens, and divides by a denominator.

        `function`: a function of one token's numbers and of the constants. `constants`: what else the function reads;
        the same for all tokens.
        """
        num = len(per_token)
        if isinstance(head, BlockQuantized):
            raise ValueError(
                "token_loss: the head is quantised, which only log_probs and the call's loss support. Quantise "
                'only the projections: quantize(model, "nf4", head=False).'
            )

        def local(hidden, targets, *others):
            per_token, (denominator, *constants, head) = others[:num], others[num:]
            return ops.fused_linear_token_loss(
                # Outside of jit, nothing is compiled anew for the same function.
                (lambda *numbers: function(*numbers, *constants)) if constants else function,
                hidden,
                head,
                targets,
                per_token,
                denominator=denominator,
                entropy=entropy,
                ignore_index=IGNORE_INDEX,
                temperature=temperature,
                mode=self.kernels.mode,
                memory_budget_bytes=budget,
                implementation=self.kernels.implementation,
                **logit_options_of(self.config),
                **vocabulary(head),
            )

        vocabulary = self._vocabulary()
        budget = self._budget_bytes(hidden, targets, head)
        batch, shared = (hidden, targets, *per_token), (denominator, *constants)
        if self.kernels.mesh_layout.axes:
            return self.kernels.mesh_layout.run_sum(local, batch, shared, head)
        return local(*batch, *shared, head)

    def _sharded(self, hidden, head, logits, targets, loss_weights, reduction, return_metrics):
        """The loss of a batch that is sharded: each device sums its tokens, and "mean" is the global mean."""
        layout = self.kernels.mesh_layout

        def local(hidden, logits, targets, weights, head=None):
            options = vocabulary(head) if logits is None else of_logits
            loss, own = self._local(hidden, logits, targets, weights, head, "sum", return_metrics, **options)
            return loss, own and (own.predicted_tokens, own.max_logit, own.log_normalizer)

        # Where there are logits, the head would be gathered once more for nothing.
        vocabulary, of_logits, tensor = self._vocabulary(), {}, layout.tensor_shards()
        per_token, specs = (hidden, None), None
        if logits is not None:
            per_token, head, tokens = (None, logits), None, layout.in_loss
            specs = tokens, tokens, tokens, tokens
            # The loss in plain jnp, which is for measurements, gathers logits whose vocabulary is split.
            if tensor is not None and (self.kernels.cross_entropy or self.kernels.fused_linear_cross_entropy):
                of_logits, specs = dict(vocab_axis=tensor.axis), (tokens, layout.of_logits, tokens, tokens)
        loss, per_token = layout.run_sum(local, (*per_token, targets, loss_weights), head=head, spec=specs)
        return _with_metrics(loss, targets, loss_weights, reduction, per_token if return_metrics else None)

    def _vocabulary(self) -> Callable[[Any], dict[str, Any]]:
        """A linear loss's arguments for a device's shard of the head; none if the device has all of it."""
        tensor = self.kernels.mesh_layout.tensor_shards()
        return lambda head: {} if tensor is None else vocabulary_of(tensor, head, self.config)

    def _local(self, hidden, logits, targets, loss_weights, head, reduction, return_metrics, **vocabulary):
        """The loss of tokens that are all on this device, as their vocabulary may be."""
        kernels = self.kernels
        if logits is None and isinstance(head, BlockQuantized):
            return self._by_quantized_head(hidden, targets, loss_weights, head, reduction, return_metrics, **vocabulary)
        options = dict(
            token_weights=loss_weights,
            ignore_index=IGNORE_INDEX,
            reduction=reduction,
            token_scaling=self.token_scaling,
            return_metrics=return_metrics,
            implementation=kernels.implementation,
            **vocabulary,
        )
        if logits is None:
            budget = self._budget_bytes(hidden, targets, head, vocabulary.get("vocab_axis"))
            logit_options = logit_options_of(self.config)
            result = ops.fused_linear_cross_entropy(
                hidden, head, targets, mode=kernels.mode, memory_budget_bytes=budget, **logit_options, **options
            )
        elif kernels.cross_entropy or kernels.fused_linear_cross_entropy:
            result = ops.cross_entropy(logits, targets, **options)
        else:
            options = dict(reduction=reduction, token_scaling=self.token_scaling)
            loss, metrics = plain.cross_entropy(logits, targets, loss_weights, IGNORE_INDEX, **options)
            return loss, metrics if return_metrics else None
        return result if return_metrics else (result, None)

    def _by_quantized_head(self, hidden, targets, loss_weights, head, reduction, return_metrics, **vocabulary):
        """The loss by a quantised head, from log-probabilities: the head is made dense slice by slice."""
        weights, counts = _weights_and_counts(targets, loss_weights)
        output = quantized_log_probs(
            hidden,
            head,
            jnp.where(counts, targets, IGNORE_INDEX),
            ignore_index=IGNORE_INDEX,
            metrics=return_metrics,
            memory_budget_bytes=self.kernels.memory_budget_bytes,
            implementation=self.kernels.implementation,
            **logit_options_of(self.config),
            **vocabulary,
        )
        if self.token_scaling:
            weights = weights * jax.lax.stop_gradient(jnp.exp(output.log_probs))
        loss = -jnp.sum(weights * output.log_probs, where=counts)
        per_token = output.predicted_tokens, output.max_logit, output.log_normalizer
        return _with_metrics(loss, targets, loss_weights, reduction, per_token if return_metrics else None)

    def _budget_bytes(self, hidden, targets, head, vocab_axis=None):
        """How much of this device's memory the fused loss may use."""
        tensor = 1 if vocab_axis is None else jax.lax.axis_size(vocab_axis)
        of_loss = Head(self.table_dtype, head.dtype, isinstance(head, SplitHead))
        sizes = least_size(targets.size), hidden.shape[-1]
        options = self.config, self.kernels, self.remat, hidden.dtype, of_loss, sizes
        return loss_budget_bytes(*options, device_of(hidden), tensor)


def num_tokens(targets: jax.Array, loss_weights: jax.Array | None) -> jax.Array:
    """Σ w over the positions that are scored."""
    weights, counts = _weights_and_counts(targets, loss_weights)
    return jnp.sum(weights, where=counts)


def _weights_and_counts(targets: jax.Array, loss_weights: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Each position's weight in float32, and whether it is scored."""
    weights = jnp.ones(targets.shape, jnp.float32) if loss_weights is None else loss_weights.astype(jnp.float32)
    return weights, (targets != IGNORE_INDEX) & (weights != 0)


def _with_metrics(loss, targets, loss_weights, reduction, per_token) -> Result:
    """A sum of losses, or its mean; and metrics, where `per_token` has predictions, largest logits and normalisers."""
    _, counts = _weights_and_counts(targets, loss_weights)
    total = num_tokens(targets, loss_weights)
    if reduction == "mean":
        loss = loss / jnp.where(jnp.any(counts), total, 1.0)
    if per_token is None:
        return loss, None
    predicted, max_logit, log_normalizer = per_token
    correct = jnp.sum((predicted.astype(targets.dtype) == targets) & counts, dtype=jnp.float32)
    return loss, LossMetrics(
        accuracy=correct / jnp.maximum(jnp.sum(counts, dtype=jnp.float32), 1.0),
        predicted_tokens=predicted,
        max_logit=max_logit,
        log_normalizer=log_normalizer,
        z_loss=jnp.zeros((), jnp.float32),
        num_tokens=jax.lax.stop_gradient(total),
    )
