"""JAX's splash attention for TPUs, imported at the first use of a name: it imports `jax.experimental.pallas.tpu`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Its names, all of them, for type checkers.
    from jax.experimental.pallas.ops.tpu.splash_attention import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
else:

    def __getattr__(name):
        from jax.experimental.pallas.ops.tpu import splash_attention

        return getattr(splash_attention, name)
