"""Which of a model's ops run as kernels, and how."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class KernelOptions:
    """Which ops of a model run as liger_jax kernels; the others are plain jnp with the same rounding.

    Args:
        rope: rotary embedding by `liger_jax.ops.apply_rope`.
        rms_norm: normalisation by `liger_jax.ops.rms_norm`; for the residual stream, by `fused_add_rms_norm`.
        glu: the feed-forward by `liger_jax.ops.gated_mlp`; or, if its products have to stay separate, its gate by
            `swiglu` or `geglu`.
        cross_entropy: the loss by `liger_jax.ops.cross_entropy`, on logits in memory.
        fused_linear_cross_entropy: the loss by `liger_jax.ops.fused_linear_cross_entropy`, without logits in memory.
        mode: how `fused_linear_cross_entropy` trades time for memory: `"auto"`, `"fast"` or `"lean"`.
        memory_budget_bytes: the most that `fused_linear_cross_entropy` may use beside inputs and gradients; a call
            whose loss needs more is a ValueError. `None` is no bound, with one exception: with `mode="auto"`, in a
            model that rematerialises its layers, the loss gets as much as one layer needs, or as much as `"lean"`
            needs if that is more.
        attention: the `implementation` of `liger_jax.ops.causal_attention`: `None` for the platform's default.
        implementation: the `implementation` of all other ops. `None` takes the platform's default. A name such as "xla"
            or "triton" is one that every op in use must have. From a tuple such as `("mosaic_tpu", "xla")`, an op takes
            the first name that it has, and warns of each that it lacks.
        batch_axes: on several devices, the axes of the mesh in context (`jax.set_mesh`; Auto axes or Explicit ones)
            over which the batch is sharded. Ops then run on each device's part of the batch, and a layer's parameters,
            however they are sharded, are gathered where they are used. `None` on one device.

    Raises:
        ValueError: both losses are asked for, or `mode` is unknown.
        TypeError: `batch_axes` is not a tuple of names.

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

    @classmethod
    def off(cls) -> "KernelOptions":
        """Options for plain jnp everywhere, the baseline of the kernels' measurements.

        Returns:
            Options with every kernel switched off.

        Example:
            >>> KernelOptions.off().rms_norm
            False
        """
        return cls(rope=False, rms_norm=False, glu=False, fused_linear_cross_entropy=False)
