"""The call that all causal language models share: labels, what is scored, and whether logits come to exist."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Integer, Num

from liger_jax.losses import shifted_labels
from liger_jax.models.core import arguments
from liger_jax.models.core.cache import KVCache, empty_cache
from liger_jax.models.core.decoder import Decoder
from liger_jax.models.core.generation import generate
from liger_jax.models.core.head import head_logits
from liger_jax.models.core.kernel_options import KernelOptions
from liger_jax.models.core.lm_loss import LanguageModelLoss
from liger_jax.models.core.output import CausalLMOutput
from liger_jax.models.core.remat import Remat
from liger_jax.models.core.sharding import on_batch_shards, with_auto_axes
from liger_jax.models.hugging_face import checkpoint, pretrained
from liger_jax.ops.labels import as_labels

Model = TypeVar("Model", bound="CausalLM")


class CausalLM(nnx.Module):
    """A decoder with a language-model head and its loss: base of the families' `…ForCausalLM`.

    A family says what its `layer` is, and by `config_type` and `config_fixed` how its config stands in a checkpoint
    (`config_json.read`).

    Args:
        config: the architecture.
        kernels: which ops run as kernels.
        dtype: dtype of the computation; norms, rotary embedding, logits and loss round from float32.
        param_dtype: dtype of the parameters.
        remat: what each layer keeps for the backward: `"none"` (all that costs), `"dots"` (its matrix products),
            `"full"` (only its input) or `"offload"` (only its input, in the host's memory).
        scan_layers: stack the layers' parameters and scan over them, so that a layer is compiled once.
        rngs: `nnx.Rngs` with a stream `params`, or a default one.

    Raises:
        ValueError: `remat` is unknown.
    """

    layer: type[nnx.Module]
    config_type: type
    config_fixed: Mapping[str, tuple[Any, ...]]

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
        self.kept = checkpoint.Kept()  # of the checkpoint that the model is read from
        self.model = Decoder(
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

    @classmethod
    def from_pretrained(
        cls: type[Model],
        path_or_id: str | os.PathLike[str],
        *,
        dtype: Any = None,
        param_dtype: Any = None,
        mesh: Mesh | None = None,
        partition_specs: Callable[[str, tuple[int, ...]], PartitionSpec] | Any = None,
        kernels: KernelOptions = KernelOptions(),
        remat: Remat = "none",
        scan_layers: bool = True,
    ) -> Model:
        """A model with the weights of a Hugging Face checkpoint: config.json and safetensors, one file or many.

        Each parameter is read by itself, to its place: a host holds one of them beside the model, and on a mesh of
        several hosts only the parts of its own devices.

        Args:
            path_or_id: a folder, or an id such as "org/name", which `huggingface_hub` downloads.
            dtype: of the computation; `None` for the parameters'.
            param_dtype: of the parameters; `None` for what config.json says, or float32.
            mesh: where the parameters go; `None` for the default device.
            partition_specs: how each is split over the mesh: a function of its name, such as
                "model.layers.mlp.up_proj.kernel", and its shape, that returns a `PartitionSpec`; or a pytree
                of them, as `nnx.state(model)` has its parameters; `None` for whole ones on every device.
            kernels: as the constructor takes them.
            remat: likewise.
            scan_layers: likewise.

        Returns:
            The model. What config.json holds beside the architecture, and generation_config.json, it keeps for
            `generate` and `save_pretrained`.

        Raises:
            FileNotFoundError: no such folder, or no config.json or safetensors in it. Pickled weights are not read.
                Where a save was cut off, the message says how the folder is mended.
            ValueError: config.json, generation_config.json, the index or a safetensors file is damaged; the index names
                what is no safetensors file of the folder; config.json has fields that the model does not support, or
                another number of layers or tokens than the tensors; or tensors are missing, left over, of another shape
                or no floats. All of these are listed. Or `partition_specs` do not fit the parameters.
            ImportError: an id is given, and `huggingface_hub` is not installed.
        """
        return pretrained.read(
            cls,
            path_or_id,
            dtype=dtype,
            param_dtype=param_dtype,
            mesh=mesh,
            partition_specs=partition_specs,
            kernels=kernels,
            remat=remat,
            scan_layers=scan_layers,
        )

    def save_pretrained(
        self,
        path: str | os.PathLike[str],
        *,
        max_shard_bytes: int = 5 * 10**9,
        config_fields: Mapping[str, Any] | None = None,
        tokenizer_from: str | os.PathLike[str] | None = None,
    ) -> None:
        """Writes config.json and safetensors that Hugging Face and `from_pretrained` read.

        A model that is read from a checkpoint gets that one's other fields of config.json and its
        generation_config.json again. The earlier model in a folder is replaced at the end, by one rename: a save that
        is killed leaves one of the two. Where config.json changes what is computed, or another small file changes, it
        may leave a folder without config.json; `from_pretrained` then says how that is mended, and so does the next
        save.

        Args:
            path: a folder, made if there is none, to which no other process writes at the time. Safetensors and
                generation_config.json of an earlier model in it are deleted; the disk holds both models for a while.
            max_shard_bytes: the most that one file holds, unless a single tensor has more.
            config_fields: more of config.json that others read, such as `{"eos_token_id": 2}`.
            tokenizer_from: a folder with a tokenizer's files, such as tokenizer.json, tokenizer_config.json and
                chat_template.jinja, which replace those in `path`; `None` leaves the latter alone.

        Raises:
            ValueError: `max_shard_bytes` is not positive, the model has adapters (`nnx.LoRAParam`), or `tokenizer_from`
                is no folder with a tokenizer's files.
        """
        pretrained.write(self, path, max_shard_bytes, config_fields, tokenizer_from)

    @property
    def head(self) -> Float[Array, "V D"]:
        """The head's weight: the embedding's where the two are tied."""
        return self.model.embed_tokens[...] if self.config.tie_word_embeddings else self.lm_head[...]

    generate = generate

    def init_cache(self, batch: int, length: int, dtype: Any = None) -> KVCache:
        """An empty key-value cache; `model(input_ids, cache=cache)` returns it with the tokens in it.

        Args:
            batch: B, at least 1.
            length: S, how many tokens it takes in all, from 1 to the config's `longest_sequence`.
            dtype: of keys and values; `None` for the computation's.

        Returns:
            The cache, 2·L·B·S·K·H numbers.

        Raises:
            ValueError: `batch` or `length` is out of its range.
        """
        return empty_cache(self.config, batch, length, self.model.dtype if dtype is None else dtype)

    @with_auto_axes
    def __call__(
        self,
        input_ids: Integer[Array, "B T"],
        *,
        labels: Integer[Array, "B T"] | None = None,
        shift_labels: Integer[Array, "B T"] | None = None,
        loss_weights: Float[Array, "B T"] | None = None,
        loss_normalizer: Num[Array, ""] | float | int | None = None,
        logits_to_keep: int | Int[Array, "kept"] = 0,
        return_logits: bool | None = None,
        return_metrics: bool = False,
        positions: Int[Array, "#B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        attention_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None = None,
        cache: KVCache | None = None,
    ) -> CausalLMOutput:
        """Runs the model; with labels it computes the loss, and then logits only if asked for.

        loss = Σ w·ce / Σ w over scored positions, or Σ w·ce / loss_normalizer. Nothing depends on training or
        evaluation:

        | labels | return_logits | logits | loss |
        |---|---|---|---|
        | no | None, True | kept positions | none |
        | no | False | none | none |
        | yes | None, False | none returned | fused with the head, or as `kernels` says |
        | yes | True | kept positions | from those logits |

        Args:
            input_ids: token ids in [0, V).
            labels: token ids, unshifted as Hugging Face's: position t is scored against labels[:, t + 1]. -100 is
                not scored, nor is the last position of a sequence or of a segment.
            shift_labels: labels that are shifted already: position t is scored against shift_labels[:, t].
            loss_weights: weight of each scoring position t (not of the label's own position).
            loss_normalizer: denominator of the mean, so that the losses of micro-batches add up to one batch's.
            logits_to_keep: score and return only the last k positions (0: all), or these positions. The hidden
                states are cut before the head; each kept position keeps its label.
            return_logits: see the table.
            return_metrics: also return accuracy, argmax tokens, largest logit and log-normaliser per position.
            positions: rotary positions; 0, 1, 2, … if none.
            segment_ids: attention and loss stay within equal ids of a packed sequence.
            attention_mask: 0 where a token is padding, of any id, which no other token sees. What is scored is the
                labels'.
            cache: of `init_cache`, or an earlier call's: what these tokens follow and see. Windows, and `positions` if
                none, then count the tokens of a row and not its padding, on whichever side that is.

        Returns:
            A `CausalLMOutput`; logits are float32.

        Raises:
            ValueError: a shape, an exclusive pair, an argument that would be ignored, or a loss that needs more than
                `KernelOptions.memory_budget_bytes`.
            TypeError: integers are expected and something else comes.
        """
        arguments.check_call(input_ids, labels, shift_labels, loss_weights, loss_normalizer)
        input_ids, shape = as_labels(input_ids), input_ids.shape
        arguments.check_shapes(shape, labels=labels, shift_labels=shift_labels, loss_weights=loss_weights)
        arguments.check_shapes(shape, segment_ids=segment_ids, attention_mask=attention_mask)
        if cache is not None and segment_ids is not None:
            raise ValueError("segment_ids is given with a cache, whose rows hold one sequence each. Unpack the rows.")
        if positions is not None and positions.shape not in (shape, (1, shape[1])):
            raise ValueError(f"positions has shape {positions.shape}; it must be {shape} or {(1, shape[1])}.")
        if attention_mask is not None:  # an id outside the vocabulary is NaN, and 0 · NaN reaches other tokens
            input_ids = jnp.where(attention_mask != 0, input_ids, jnp.clip(input_ids, 0, self.config.vocab_size - 1))
        targets = None if shift_labels is None else as_labels(shift_labels)
        if labels is not None:
            targets = shifted_labels(labels, segment_ids)
        per_token = dict(positions=positions, segment_ids=segment_ids, attention_mask=attention_mask)
        head = self.head
        if cache is not None:
            hidden, cache = self.model(input_ids, **per_token, cache=cache)
        elif self.config.tie_word_embeddings:
            rows, head = self.model.embed(input_ids)
            hidden = self.model(input_ids, inputs_embeds=rows, **per_token)
        else:
            hidden = self.model(input_ids, **per_token)
        hidden, targets, loss_weights = arguments.keep(logits_to_keep, hidden, targets, loss_weights)
        if targets is None:
            out = self._predict(hidden, head, return_logits is not False, return_metrics)
        else:
            out = self._score(hidden, head, targets, loss_weights, loss_normalizer, bool(return_logits), return_metrics)
        return out if cache is None else dataclasses.replace(out, cache=cache)

    def _predict(self, hidden, head, return_logits, return_metrics):
        """The result without labels."""
        logits = self._logits(hidden, head) if return_logits else None
        metrics = None
        if return_metrics:
            labels = jnp.zeros(hidden.shape[:-1], jnp.int32)
            _, metrics = self._loss(hidden, head, logits, labels, None, reduction="mean", return_metrics=True)
            # Nothing is scored.
            metrics = dataclasses.replace(metrics, accuracy=jnp.zeros(()), num_tokens=jnp.zeros(()))
        return CausalLMOutput(logits=logits, metrics=metrics)

    def _score(self, hidden, head, targets, loss_weights, loss_normalizer, return_logits, return_metrics):
        """The result with labels."""
        with_logits = return_logits or not self.kernels.fused_linear_cross_entropy
        logits = self._logits(hidden, head) if with_logits else None
        reduction = "mean" if loss_normalizer is None else "sum"
        loss, metrics = self._loss(
            hidden, head, logits, targets, loss_weights, reduction=reduction, return_metrics=return_metrics
        )
        if loss_normalizer is not None:
            loss = loss / jnp.asarray(loss_normalizer, jnp.float32)
        return CausalLMOutput(loss=loss, logits=logits if return_logits else None, metrics=metrics)

    @property
    def _loss(self) -> LanguageModelLoss:
        return LanguageModelLoss(self.config, self.kernels, self.model.stack.remat, self.head.dtype)

    def _logits(self, hidden, head):
        logits = on_batch_shards(head_logits, self.kernels.batch_axes, (hidden,), (head,))
        softcap = self.config.final_logit_softcapping
        return logits if softcap is None else softcap * jnp.tanh(logits / softcap)
