"""A projection with an adapter, and a model's projections by their names."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from liger_jax.models.core.dropout import DropoutKey, DropoutWords, dropped, words_of
from liger_jax.models.core.parameters import kernel_of
from liger_jax.models.core.remat import ADAPTED
from liger_jax.models.lora.together import gated_mlp, one_projection, several_projections


class LoRAScale(nnx.Variable):
    """The scales of a stack's adapters, one for each layer, where they differ. They are not trained."""


class LoRALinear(nnx.Linear):
    """A projection with an adapter, which `add_lora` makes from an `nnx.Linear`.

    The kernel keeps its name and its path in the model's state. If the adapter is switched off, the class is
    `nnx.Linear` again, and the layer runs as if there were no adapter.

    Attributes:
        lora_a: A (in, rank), float32.
        lora_b: B (rank, out), float32.
        magnitude: DoRA's m (out,), float32, or `None`.
        alpha: numerator of the scale.
        rslora: whether the scale is alpha/√rank rather than alpha/rank.
        each: rank and alpha of each stacked layer if they differ, with (0, alpha) for a layer without an adapter;
            otherwise `None`. Entries of A and B beyond a layer's rank are zero, and so are their gradients.
        lora_scale: the scale of each layer if `each` is given, otherwise `None`.
        dropout: the dropout probability of the adapter's inputs, applied if there is a key.
        dropout_key: from `with_dropout`, or `None`.
        dropout_words: hashes of the tokens, set while the model's layer runs; `None` to use rows and positions.
        has_kernels: whether a kernel may compute the sum with the frozen product: on one device, with a model's default
            kernels.
    """

    lora_a: nnx.LoRAParam
    lora_b: nnx.LoRAParam
    magnitude: nnx.LoRAParam | None = None
    alpha: float
    rslora: bool
    each: tuple[tuple[int, float], ...] | None = None
    lora_scale: LoRAScale | None = None
    dropout: float
    dropout_key: DropoutKey | None = None
    dropout_words: DropoutWords | None = None
    has_kernels: bool = False

    @property
    def drops(self) -> bool:
        """Whether some of the adapter's inputs are dropped."""
        return self.dropout_key is not None

    @property
    def scale(self) -> float | Float[Array, "*layers"]:
        """alpha/rank, or alpha/√rank; an array if stacked layers differ."""
        if self.lora_scale is not None:
            return self.lora_scale[...]
        return scale_of(self.lora_a.shape[-1], self.alpha, self.rslora)

    @property
    def adapted_kernel(self) -> Float[Array, "*layers in out"]:
        """W + scale·A·B in float32, before DoRA's magnitude."""
        return self._sum(self.kernel[...].astype(jnp.float32), self.lora_a[...], self.lora_b[...])

    def _sum(self, kernel, a, b):
        scale = self.scale if self.lora_scale is None else self.lora_scale[...][..., None, None]
        return kernel + scale * jnp.matmul(a, b, precision="highest")

    def factor(self, input_axis: str | None = None) -> Float[Array, "*layers out"] | None:
        """DoRA's m/‖W + scale·A·B‖ for each column, where the norm has no gradient; `None` without DoRA.

        `input_axis` is the mesh axis whose devices have the other rows of W and A.

        The norm is that of the rounded numbers that the matrix products use, which are also all that a mesh gathers.
        """
        if self.magnitude is None:
            return None
        arrays = (self.kernel[...], self.lora_a[...], self.lora_b[...])
        norm = jnp.linalg.norm(jax.lax.stop_gradient(self._sum(*map(self.rounded, arrays))), axis=-2)
        if input_axis is not None:
            norm = jnp.sqrt(jax.lax.psum(norm * norm, input_axis))
        factor = self.magnitude[...] / checkpoint_name(norm, ADAPTED)
        if self.lora_scale is None:
            return factor
        return jnp.where(self.lora_scale[...][..., None] > 0, factor, 1.0)  # 1 in layers without an adapter

    def rounded(self, x: Any) -> jax.Array:
        """A weight in float32, rounded to the computation's dtype without a pair of casts, which XLA may remove."""
        dtype = jnp.finfo(self.dtype or x.dtype)
        return jax.lax.reduce_precision(jnp.asarray(x).astype(jnp.float32), dtype.nexp, dtype.nmant)

    # Without Linear's out_sharding, which no layer passes.
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, inputs: Float[Array, "*batch in"], *, input_axis: str | None = None
    ) -> Float[Array, "*batch out"]:
        y = one_projection(inputs, self)
        if y is None:
            y = self._of_separate_products(inputs, input_axis)
        elif self.bias is not None:
            y += self.bias[...].astype(y.dtype)
        y, factor = checkpoint_name(y, ADAPTED), self.factor(input_axis)
        if factor is not None:
            of_rows = lambda x: jnp.expand_dims(x.astype(y.dtype), tuple(range(y.ndim - 1)))
            if self.bias is None:
                return of_rows(factor) * y
            bias = of_rows(self.bias[...])
            y = of_rows(factor) * (y - bias) + bias
        return y

    # For layers that have several projections, and do not know of adapters.
    several = staticmethod(several_projections)
    gated_mlp = staticmethod(gated_mlp)

    def _of_separate_products(self, inputs, input_axis):
        """x·W + scale·(x·A)·B, with the bias."""
        y = super().__call__(inputs)
        x, a, b = (array.astype(y.dtype) for array in (inputs, self.lora_a[...], self.lora_b[...]))
        if self.dropout_key is not None:
            first = 0 if input_axis is None else jax.lax.axis_index(input_axis) * x.shape[-1]
            x = dropped(x, self.dropout, self.dropout_key[...], words_of(self, x), first)
        scale = self.scale if self.lora_scale is None else self.lora_scale[...].astype(y.dtype)
        return y + jnp.matmul(scale * jnp.matmul(x, a, precision=self.precision), b, precision=self.precision)


def scale_of(rank: int, alpha: float, rslora: bool) -> float:
    """alpha/rank, or alpha/√rank."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def of_layers(path: tuple[Any, ...], projection: LoRALinear) -> dict[str, tuple[int, float]]:
    """Rank and alpha of each layer's adapter, by the layers' names; layers without one are left out."""
    own = names(path, projection)
    each = projection.each or ((projection.lora_a.shape[-1], projection.alpha),) * len(own)
    return {name: options for name, options in zip(own, each, strict=True) if options[0] > 0}


def become(module: nnx.Module, kind: type[nnx.Module]) -> None:
    """Changes the class of a module, which says whether its adapter counts; attributes stay."""
    object.__setattr__(module, "__class__", kind)  # nnx's own would record an attribute of that name


def trained(adapter: Any) -> dict[str, nnx.LoRAParam]:
    """An adapter's trained arrays, by their names."""
    variables = dict(lora_a=adapter.lora_a, lora_b=adapter.lora_b, magnitude=adapter.magnitude)
    return {name: variable for name, variable in variables.items() if variable is not None}


def names(path: tuple[Any, ...], projection: nnx.Linear) -> tuple[str, ...]:
    """The projection's names in a checkpoint, one for each stacked layer."""
    return tuple(name.removesuffix(".weight") for name in kernel_of(path, projection).tensor_names)
