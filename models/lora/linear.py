"""A projection with an adapter, and a model's projections by their names."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from liger_jax.models.core.parameters import kernel_of, projections
from liger_jax.models.core.remat import ADAPTED


class DropoutKey(nnx.Variable):
    """The key of an adapter's dropout, one for each layer."""


class LoRALinear(nnx.Linear):
    """A projection with an adapter, which `add_lora` makes of an `nnx.Linear`.

    The kernel keeps its name and its place in the model's state. If the adapter is switched off, the class is
    `nnx.Linear` again, and the layer runs as if there were no adapter.

    Attributes:
        lora_a: A (in, rank), float32.
        lora_b: B (rank, out), float32.
        magnitude: DoRA's m (out,), float32, or `None`.
        alpha: numerator of the scale.
        rslora: whether the scale is alpha/√rank rather than alpha/rank.
        dropout: the share of the adapter's inputs that are dropped, where there is a key.
        dropout_key: from `with_dropout`, or `None`.
    """

    lora_a: nnx.LoRAParam
    lora_b: nnx.LoRAParam
    magnitude: nnx.LoRAParam | None = None
    alpha: float
    rslora: bool
    dropout: float
    dropout_key: DropoutKey | None = None

    @property
    def scale(self) -> float:
        """alpha/rank, or alpha/√rank."""
        rank = self.lora_a.shape[-1]
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)

    @property
    def adapted_kernel(self) -> Float[Array, "*layers in out"]:
        """W + scale·A·B in float32, before DoRA's magnitude."""
        return self._sum(self.kernel[...].astype(jnp.float32), self.lora_a[...], self.lora_b[...])

    def _sum(self, kernel, a, b):
        return kernel + self.scale * jnp.matmul(a, b, precision="highest")

    def factor(self) -> Float[Array, "*layers out"] | None:
        """DoRA's m/‖W + scale·A·B‖, by columns, whose norm is a constant to the gradient; `None` without DoRA.

        The norm is that of the numbers that the products take, as `rounded` makes them. A mesh gathers no others.
        """
        if self.magnitude is None:
            return None
        arrays = (self.kernel[...], self.lora_a[...], self.lora_b[...])
        norm = jnp.linalg.norm(jax.lax.stop_gradient(self._sum(*map(self.rounded, arrays))), axis=-2)
        return self.magnitude[...] / checkpoint_name(norm, ADAPTED)

    def rounded(self, x: Any) -> jax.Array:
        """A weight in float32, rounded to the computation's dtype; XLA may drop a conversion there and back."""
        dtype = jnp.finfo(self.dtype or x.dtype)
        return jax.lax.reduce_precision(jnp.asarray(x).astype(jnp.float32), dtype.nexp, dtype.nmant)

    # Without Linear's out_sharding, which no layer passes.
    def __call__(self, inputs: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        y = super().__call__(inputs)
        x, a, b = (array.astype(y.dtype) for array in (inputs, self.lora_a[...], self.lora_b[...]))
        if self.dropout_key is not None:
            share = np.float32(1 - self.dropout)  # of a Python float, other bits are drawn under jax_enable_x64
            kept = jax.random.bernoulli(self.dropout_key[...], share, x.shape)
            x = jnp.where(kept, x / (1 - self.dropout), 0)
        y += jnp.matmul(self.scale * jnp.matmul(x, a, precision=self.precision), b, precision=self.precision)
        y, factor = checkpoint_name(y, ADAPTED), self.factor()
        if factor is not None:
            of_rows = lambda x: jnp.expand_dims(x.astype(y.dtype), tuple(range(y.ndim - 1)))
            if self.bias is None:
                return of_rows(factor) * y
            bias = of_rows(self.bias[...])
            y = of_rows(factor) * (y - bias) + bias
        return y


def without_adapters(caller: str, model: nnx.Module) -> list[tuple[tuple[Any, ...], Any]]:
    """The projections of a model that has no adapters yet."""
    found = projections(model)
    if any(hasattr(projection, "lora_a") for _, projection in found):
        raise ValueError(f"{caller}: the model has adapters already. Merge them first: merge_lora(model).")
    return found


def matching(
    caller: str, found: list[tuple[tuple[Any, ...], Any]], targets: Sequence[str]
) -> list[tuple[tuple[Any, ...], Any]]:
    """Those of the projections whose names end in one of the targets."""
    found_names = [".".join(map(str, path)) for path, _ in found]
    ends = lambda name, target: f".{name}".endswith(f".{target}")
    if unknown := [target for target in targets if not any(ends(name, target) for name in found_names)]:
        raise ValueError(
            f"{caller}: targets={list(targets)}: no projection is called {unknown}. The model has "
            f"{sorted({name.rpartition('.')[2] for name in found_names})}."
        )
    result = [item for item, name in zip(found, found_names, strict=True) if any(ends(name, t) for t in targets)]
    if not result:
        raise ValueError(f"{caller}: targets={list(targets)} must name one projection at least.")
    return result


def with_adapters_on(caller: str, model: nnx.Module) -> list[tuple[tuple[Any, ...], LoRALinear]]:
    """The projections whose adapters are on."""
    adapted = [(path, projection) for path, projection in projections(model) if isinstance(projection, LoRALinear)]
    if not adapted:
        raise ValueError(
            f"{caller}: the model has no adapters, or they are off. Add them, add_lora(model, …), or turn them on, "
            "with_adapters(model, True)."
        )
    return adapted


def become(projection: nnx.Linear, kind: type[nnx.Linear]) -> None:
    """Changes the projection's class, which says whether its adapter counts; attributes stay."""
    object.__setattr__(projection, "__class__", kind)  # nnx's own would record an attribute of that name


def trained(projection: LoRALinear) -> dict[str, nnx.LoRAParam]:
    """The adapter's trained arrays, by their names."""
    variables = dict(lora_a=projection.lora_a, lora_b=projection.lora_b, magnitude=projection.magnitude)
    return {name: variable for name, variable in variables.items() if variable is not None}


def names(path: tuple[Any, ...], projection: nnx.Linear) -> tuple[str, ...]:
    """The projection's names in a checkpoint, one for each stacked layer."""
    return tuple(name.removesuffix(".weight") for name in kernel_of(path, projection).tensor_names)
