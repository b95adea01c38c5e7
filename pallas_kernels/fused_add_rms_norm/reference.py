"""The addition and the RMSNorm, one after the other: the oracle of the tests, in whatever precision it is given."""

import jax

from liger_jax.pallas_kernels.norms import reference


def fused_add_rms_norm(
    x: jax.Array, residual: jax.Array, scale: jax.Array | None, *, eps: float, offset: float
) -> tuple[jax.Array, jax.Array]:
    """s = x + residual → rms_norm(s), s."""
    added = x + residual
    return reference.rms_norm(added, scale, eps=eps, offset=offset), added
