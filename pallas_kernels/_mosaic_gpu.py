"""`jax.experimental.pallas.mosaic_gpu`, imported at the first use of a name: a machine without a GPU never imports it.

The import takes a third of a second, a sixth of what `import liger_jax` took with it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Its names, all of them, for type checkers.
    from jax.experimental.pallas.mosaic_gpu import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
else:

    def __getattr__(name):
        from jax.experimental.pallas import mosaic_gpu

        return getattr(mosaic_gpu, name)
