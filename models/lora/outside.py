"""A model's tables, the embedding and the head: what is trained of them, and a head that is its own.

A model whose tables are adapted changes its class, as its projections do: `add_outside` and `train_more` call `adapt`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

from flax import nnx

from liger_jax.models.causal_lm import CausalLM
from liger_jax.models.core.decoder import Decoder
from liger_jax.models.core.experts import ExpertWeights
from liger_jax.models.core.parameters import projections
from liger_jax.models.lora.linear import LoRALinear, become
from liger_jax.models.lora.vocabulary import Adapter, EmbeddingAdapter, HeadAdapter
from liger_jax.models.quantized import is_quantized


class Table(NamedTuple):
    """The embedding or the head."""

    name: str  # its name in a checkpoint
    holder: Any  # the module that holds the weight
    weight: str  # the weight's attribute
    kind: type[Adapter]  # the class of its adapter

    @property
    def adapter(self) -> Any:
        """Its adapter, or `None`."""
        return getattr(self.holder, f"{self.weight}_adapter", None)

    def widths(self, model: Any) -> tuple[int, int]:
        """Its inputs and outputs, as of a projection."""
        sizes = model.config.vocab_size, model.config.hidden_size
        return sizes if self.kind is EmbeddingAdapter else sizes[::-1]

    @property
    def rows(self) -> Any:
        """The vectors of its tokens that are trained, or `None`."""
        return getattr(self.holder, f"{self.weight}_rows", None)


def tables(model: Any) -> list[Table]:
    """The embedding and the head of a causal language model; none of another module."""
    if not isinstance(model, CausalLM):
        return []
    return [
        Table("model.embed_tokens", model.model, "embed_tokens", EmbeddingAdapter),
        Table("lm_head", model, "lm_head", HeadAdapter),
    ]


class AdaptedDecoder(Decoder):
    """A decoder whose embedding may have an adapter, or vectors of single tokens that are trained."""

    embed_tokens_adapter: Any = None
    embed_tokens_rows: Any = None

    def embed(self, input_ids):
        """As the decoder's own, with what is trained of the embedding."""
        x, table = super().embed(input_ids)
        if (tensor := self.layout.tensor_shards()) is not None:
            input_ids = tensor.padded(input_ids)
        if self.embed_tokens_adapter is not None and self.embed_tokens_adapter.on:
            x = self.embed_tokens_adapter(x, input_ids, self.layout)
        if self.embed_tokens_rows is not None and self.embed_tokens_rows.on:
            x = self.embed_tokens_rows.of_embedding(x, input_ids)
        return x, table


class AdaptedLM(CausalLM):
    """A model whose head may have an adapter, which widens hidden states and head, or vectors of single tokens."""

    lm_head_adapter: Any = None
    lm_head_rows: Any = None
    model: AdaptedDecoder

    def _head_of(self, weight):
        rows = self.model.embed_tokens_rows if self.config.tie_word_embeddings else self.lm_head_rows
        weight = rows.of_table(weight) if rows is not None and rows.on else weight
        adapter = self.lm_head_adapter
        return adapter.of_head(weight, self.model.dtype) if adapter is not None and adapter.on else weight

    def _before_head(self, hidden, words):
        adapter = self.lm_head_adapter
        return adapter.of_hidden(hidden, words) if adapter is not None and adapter.on else hidden


@functools.cache
def _adapted(kind: type[CausalLM]) -> type[CausalLM]:
    """The class of a family's adapted models, which has the family's name, as a result's config.json says it."""
    make: Any = type(kind)
    return make(kind.__name__, (AdaptedLM, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def adapt(model: Any) -> None:
    """Lets the model compute with what is trained of its embedding and its head, in place."""
    if not isinstance(model, AdaptedLM):
        become(model, _adapted(type(model)))
        become(model.model, AdaptedDecoder)


def unadapt(model: Any) -> None:
    """Gives the model its family's class back, in place."""
    if isinstance(model, AdaptedLM):
        become(model, type(model).__bases__[1])
        become(model.model, Decoder)


def without_adapters(caller: str, model: nnx.Module) -> list[tuple[tuple[Any, ...], Any]]:
    """The projections of a model that has no adapters yet."""
    layers = projections(model)
    is_adapted = any(hasattr(projection, "lora_a") for _, projection in layers)
    if is_adapted or any(each.adapted for each in _experts(model)) or any(table.adapter for table in tables(model)):
        raise ValueError(f"{caller}: the model has adapters already. Merge them first: merge_lora(model).")
    return layers


def with_adapters_on(caller: str, model: nnx.Module) -> list[tuple[tuple[Any, ...], LoRALinear]]:
    """The projections whose adapters are on; none if only the embedding, the head or experts have some that are on."""
    adapted = [(path, projection) for path, projection in projections(model) if isinstance(projection, LoRALinear)]
    of_experts = any(each.adapted and each.adapters_on for each in _experts(model))
    if not adapted and not of_experts and not any(table.adapter and table.adapter.on for table in tables(model)):
        raise ValueError(
            f"{caller}: the model has no adapters, or they are off. Add them, add_lora(model, …), or turn them on, "
            "with_adapters(model, True)."
        )
    return adapted


def _experts(model: nnx.Module) -> list[ExpertWeights]:
    return [node for _, node in nnx.iter_graph(model) if isinstance(node, ExpertWeights)]


def untie(model: Any) -> None:
    """Gives the model its own head, which is the same array as the embedding until one of them changes."""
    if model.config.tie_word_embeddings:
        model.lm_head = nnx.Param(model.model.embed_tokens[...])
        model.config = dataclasses.replace(model.config, tie_word_embeddings=False)
        model.model.config, model.untied = model.config, True


def check_dense(caller: str, table: Table) -> None:
    """Raises a ValueError if the table is quantised."""
    if hasattr(table.holder, table.weight) and is_quantized(getattr(table.holder, table.weight)[...]):
        raise ValueError(
            f"{caller}: {table.name} is quantised, and only quantised projections can have adapters. Leave "
            'the head dense: quantize(model, "nf4", head=False).'
        )


def switch(model: Any, on: bool) -> bool:
    """Switches these tables on or off, in place. Returns whether there are any."""
    adapters = [each for table in tables(model) for each in (table.adapter, table.rows) if each is not None]
    for each in adapters:
        each.on = on
    return bool(adapters)
