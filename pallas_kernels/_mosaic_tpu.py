"""`jax.experimental.pallas.tpu`, imported at the first use of a name: only kernels for TPUs, and their interpreter, do.

The import takes a sixteenth of what `import jax, flax.nnx` takes.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Its names, all of them, for type checkers.
    from jax.experimental.pallas.tpu import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
else:

    def __getattr__(name):
        from jax.experimental.pallas import tpu

        return getattr(tpu, name)
