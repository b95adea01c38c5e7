"""Which of a model's ops run as kernels, and how."""

import dataclasses
from typing import Literal

from liger_jax.models.core.parallel.layout import ONE_DEVICE, Layout


@dataclasses.dataclass(frozen=True)
class KernelOptions:
    """Which operations of a model use the ops of liger_jax; the others are plain jnp with the same rounding.

    Args:
        rope: rotary embedding by `liger_jax.ops.apply_rope`.
        rms_norm: normalisation by `liger_jax.ops.rms_norm`; for the residual stream, by `fused_add_rms_norm`.
        glu: the feed-forward by `liger_jax.ops.gated_mlp`; or, if its products must be separate, its gate by `swiglu`
            or `geglu`.
        cross_entropy: the loss by `liger_jax.ops.cross_entropy`, on logits in memory.
        fused_linear_cross_entropy: the loss by `liger_jax.ops.fused_linear_cross_entropy`, without logits in memory.
        mode: how `fused_linear_cross_entropy` trades time for memory: `"auto"`, `"fast"` or `"lean"`.
        memory_budget_bytes: the memory that `fused_linear_cross_entropy` may use in addition to inputs and gradients; a
            call whose loss needs more is a ValueError. `None` for no limit, with one exception: with `mode="auto"`, in
            a model that rematerialises its layers, the loss may use as much as one layer needs, or as much as `"lean"`
            needs if that is more.
        attention: the `implementation` of `liger_jax.ops.causal_attention`: `None` for the platform's default. "xla",
            "triton" and "triton:interpret" also apply to the attention of one token to a cache.
        implementation: the `implementation` of all other ops, except for the rotary embedding, which runs in XLA alone.
            `None` for the platform's default. A single name such as "xla" or "triton" must be supported by every op in
            use. With a tuple such as `("mosaic_tpu", "xla")`, each op uses the first name that it supports, with a
            warning for each that it does not.
        layout: on several devices, what is sharded over which axes of the mesh in context (`jax.set_mesh`; with Auto or
            Explicit axes). Ops then run on each device's shard of the batch, and a layer's parameters, however they are
            sharded, are gathered where they are used. `None` on one device.
        batch_axes: a short form of a layout: the axes over which the batch is sharded; parameters are sharded over the
            last one.

    Raises:
        ValueError: both losses are switched on, `mode` is unknown, or `layout` and `batch_axes` are both given.
        TypeError: `layout` is not a `Layout`, or `batch_axes` is not a tuple of names.

    Example:
        >>> KernelOptions(fused_linear_cross_entropy=False, cross_entropy=True).cross_entropy
        True
    """

    rope: bool = True
    rms_norm: bool = True
    glu: bool = True
    cross_entropy: bool = False
    fused_linear_cross_entropy: bool = True
    mode: Literal["auto", "fast", "lean"] = "auto"
    memory_budget_bytes: int | None = None
    attention: str | tuple[str, ...] | None = None
    implementation: str | tuple[str, ...] | None = None
    layout: Layout | None = None
    batch_axes: tuple[str, ...] | None = None

    def __post_init__(self):
        if self.cross_entropy and self.fused_linear_cross_entropy:
            raise ValueError(
                "KernelOptions: cross_entropy=True and fused_linear_cross_entropy=True exclude each other, "
                "since a loss is computed once. Pass fused_linear_cross_entropy=False for the loss on logits."
            )
        if self.mode not in ("auto", "fast", "lean"):
            raise ValueError(f"KernelOptions: mode={self.mode!r} must be 'auto', 'fast' or 'lean'.")
        axes = self.batch_axes
        if axes is not None and not (isinstance(axes, tuple) and axes and all(isinstance(a, str) for a in axes)):
            raise TypeError(f"KernelOptions: batch_axes={axes!r} must be a tuple of mesh axis names, or None.")
        if self.layout is not None and not isinstance(self.layout, Layout):
            raise TypeError(f"KernelOptions: layout={self.layout!r} must be a Layout, or None.")
        if self.layout is not None and axes is not None:
            raise ValueError(
                f"KernelOptions: layout={self.layout} and batch_axes={axes} have the same meaning. Pass one of them."
            )

    @property
    def mesh_layout(self) -> Layout:
        """The layout, given as `layout` or `batch_axes`; on one device, one that shards nothing."""
        if self.batch_axes is not None:
            return Layout(batch=self.batch_axes, fsdp=self.batch_axes[-1])
        return ONE_DEVICE if self.layout is None else self.layout

    @property
    def may_add_adapters(self) -> bool:
        """Whether a kernel may compute a projection with its adapter: on one device, with the default kernels."""
        return self.glu and self.implementation is None and not self.mesh_layout.axes

    @classmethod
    def off(cls) -> "KernelOptions":
        """Options for plain jnp everywhere, with which the kernels are compared.

        Returns:
            Options with every kernel switched off.

        Example:
            >>> KernelOptions.off().rms_norm
            False
        """
        return cls(rope=False, rms_norm=False, glu=False, fused_linear_cross_entropy=False)
