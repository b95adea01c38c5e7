"""The parts of a model that may be trained beside its projections: which there are, and a head that is its own."""

import dataclasses
from typing import Any, NamedTuple

from flax import nnx

from liger_jax.models.lora.vocabulary import Adapter, EmbeddingAdapter, HeadAdapter
from liger_jax.models.quantized import is_quantized


class Part(NamedTuple):
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


def parts(model: Any) -> list[Part]:
    """The embedding and the head of a causal language model; none of another module."""
    if not hasattr(model, "config") or not hasattr(getattr(model, "model", None), "embed_tokens"):
        return []
    return [
        Part("model.embed_tokens", model.model, "embed_tokens", EmbeddingAdapter),
        Part("lm_head", model, "lm_head", HeadAdapter),
    ]


def untie(model: Any) -> None:
    """Gives the model a head of its own, which is the same array as the embedding until one of them changes."""
    if model.config.tie_word_embeddings:
        model.lm_head = nnx.Param(model.model.embed_tokens[...])
        model.config = dataclasses.replace(model.config, tie_word_embeddings=False)
        model.model.config, model.untied = model.config, True


def check_dense(caller: str, part: Part) -> None:
    """Raises a ValueError if the part is quantised."""
    if hasattr(part.holder, part.weight) and is_quantized(getattr(part.holder, part.weight)[...]):
        raise ValueError(
            f"{caller}: {part.name} is quantised, and only projections have adapters beside quantised weights. Leave "
            'the head as it is: quantize(model, "nf4", head=False).'
        )


def switch(model: Any, on: bool) -> bool:
    """Switches these parts on or off, in place. Returns whether there are any."""
    found = [each for part in parts(model) for each in (part.adapter, part.rows) if each is not None]
    for each in found:
        each.on = on
    return bool(found)
