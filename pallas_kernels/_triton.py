"""`jax.experimental.pallas.triton`, imported at the first use of a name: only a kernel of Triton's does.

The import takes a fortieth of what `import jax, flax.nnx` takes.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Its names, all of them, for type checkers.
    from jax.experimental.pallas.triton import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
else:

    def __getattr__(name):
        from jax.experimental.pallas import triton

        return getattr(triton, name)
