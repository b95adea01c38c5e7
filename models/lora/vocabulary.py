"""Adapters of the embedding and of the head, and vectors of single tokens that are trained.

    embedding   x = W[ids] + scale·A[ids]·B           A (V, rank), B (rank, D)
    head        z = h·Wᵀ + scale·(h·A)·B              A (D, rank), B (rank, V)

The losses take one head. It gets [W | Bᵀ], and the hidden states become [h | scale·h·A], so that no product is rounded
to the weight's dtype before it is added, and dropout drops the adapter's inputs alone. The sum W + scale·(A·B)ᵀ would
cost as much: a copy of the head and its gradient. The rank is filled up to whole tiles of the kernels.
"""

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Integer

from liger_jax.models.core.dropout import DropoutKey, dropped
from liger_jax.models.core.embedding import embed
from liger_jax.models.core.parallel.layout import Layout
from liger_jax.models.lora.linear import scale_of

_TILE = 128  # columns of a kernel's tile


class Adapter(nnx.Module):
    """What both adapters hold: A, B and the options of their scale."""

    magnitude: nnx.LoRAParam | None = None
    dropout_key: DropoutKey | None = None

    def __init__(self, a: Any, b: Any, *, alpha: float, rslora: bool, dropout: float):
        self.lora_a, self.lora_b = nnx.LoRAParam(a), nnx.LoRAParam(b)
        self.alpha, self.rslora, self.dropout, self.on = float(alpha), rslora, float(dropout), True

    @property
    def rank(self) -> int:
        """Columns of A."""
        return self.lora_a.shape[-1]

    @property
    def scale(self) -> float:
        """alpha/rank, or alpha/√rank."""
        return scale_of(self.rank, self.alpha, self.rslora)

    @property
    def product(self) -> Float[Array, "in out"]:
        """scale·A·B in float32."""
        return self.scale * jnp.matmul(self.lora_a[...], self.lora_b[...], precision="highest")


class EmbeddingAdapter(Adapter):
    """The adapter of the embedding. As in PEFT it has no dropout."""

    def __call__(self, x: Float[Array, "B T D"], ids: Integer[Array, "B T"], layout: Layout) -> Float[Array, "B T D"]:
        """The embeddings plus what the adapter adds."""
        look_up = lambda ids, a: embed(a, ids, x.dtype)
        rows = layout.run(look_up, (ids,), (self.lora_a[...],))
        return x + self.scale * jnp.matmul(rows, self.lora_b[...].astype(x.dtype))


class HeadAdapter(Adapter):
    """The adapter of the head, perhaps with DoRA's lengths (V,) of the head's rows."""

    @property
    def drops(self) -> bool:
        """Whether some of the adapter's inputs are dropped."""
        return self.on and self.dropout_key is not None

    def of_hidden(self, hidden: Float[Array, "B T D"], words: Any = None) -> Float[Array, "B T wide"]:
        """[h | scale·h·A], which the head of `of_head` turns into logits; `words` are those of the tokens' dropout."""
        x = hidden
        if self.dropout_key is not None:
            x = dropped(x, self.dropout, self.dropout_key[...], words)
        own = self.scale * jnp.matmul(x, self.lora_a[...].astype(hidden.dtype))
        return jnp.concatenate([hidden, _filled(own, hidden.shape[-1])], -1)

    def of_head(self, head: Float[Array, "V D"], dtype: Any) -> Float[Array, "V wide"]:
        """[W | Bᵀ] in the computation's dtype, with DoRA each row times its length over that of W + scale·(A·B)ᵀ."""
        own = self.lora_b[...].T.astype(dtype)
        both = jnp.concatenate([head.astype(dtype), _filled(own, head.shape[-1])], -1)
        factor = self.factor(head, dtype)
        return both if factor is None else factor[:, None].astype(dtype) * both

    def factor(self, head: Float[Array, "V D"], dtype: Any) -> Float[Array, " V"] | None:
        """DoRA's m/‖W + scale·(A·B)ᵀ‖ in float32; the norm is a constant to the gradient. `None` without DoRA."""
        if self.magnitude is None:
            return None
        return self.magnitude[...] / jax.lax.stop_gradient(self.lengths(head, dtype))

    def lengths(self, head: Float[Array, "V D"], dtype: Any) -> Float[Array, " V"]:
        """‖W + scale·(A·B)ᵀ‖ by rows, in float32, of the numbers that the products take."""
        info = jnp.finfo(dtype)
        rounded = lambda x: jax.lax.reduce_precision(x.astype(jnp.float32), info.nexp, info.nmant)
        a, b = rounded(self.lora_a[...]), rounded(self.lora_b[...])
        return jnp.linalg.norm(rounded(head) + self.scale * jnp.matmul(b.T, a.T, precision="highest"), axis=-1)


class TokenRows(nnx.Module):
    """Vectors of single tokens that are trained in the place of the table's."""

    def __init__(self, tokens: tuple[int, ...], rows: Any):
        self.tokens, self.rows, self.on = tokens, nnx.LoRAParam(rows), True

    def of_embedding(self, x: Float[Array, "B T D"], ids: Integer[Array, "B T"]) -> Float[Array, "B T D"]:
        """The embeddings, with these vectors for these tokens."""
        is_own = ids[..., None] == jnp.asarray(self.tokens, ids.dtype)
        own = jnp.take(self.rows[...], jnp.argmax(is_own, -1), axis=0).astype(x.dtype)
        return jnp.where(is_own.any(-1, keepdims=True), own, x)

    def of_table(self, table: Float[Array, "V D"]) -> Float[Array, "V D"]:
        """The table or the head, with these vectors for these tokens."""
        return table.at[jnp.asarray(self.tokens)].set(self.rows[...].astype(table.dtype))


def columns(rank: int, width: int) -> int:
    """How many columns an adapter of this rank adds to hidden states and a head of `width`.

    Returns the rank, up to whole tiles if `width` has whole tiles.
    """
    return rank + (-rank % _TILE if width % _TILE == 0 else 0)


def _filled(x: jax.Array, width: int) -> jax.Array:
    """x (..., r), with columns of zeros after it, up to those that stand beside `width` others."""
    missing = columns(x.shape[-1], width) - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])


def new_adapter(kind: type[Adapter], weight: Any, rank: int, key: Any, **options: Any) -> Adapter:
    """An adapter without an effect, as PEFT begins: A random and B zero, of an embedding the other way round."""
    tokens, width = weight.shape
    if kind is EmbeddingAdapter:
        return kind(jnp.zeros((tokens, rank)), jax.random.normal(key, (rank, width), jnp.float32), **options)
    bound = 1 / math.sqrt(width)
    a = jax.random.uniform(key, (width, rank), jnp.float32, -bound, bound)
    return kind(a, jnp.zeros((rank, tokens)), **options)


def key_of(key: Any, name: str) -> Any:
    """The key for a module of this name."""
    return jax.random.fold_in(key, np.uint32(zlib.crc32(name.encode())))
