"""`jax.experimental.pallas.mosaic_gpu`, imported at the first use of a name: a machine without a GPU never imports it.

The import takes a third of a second, a sixth of what `import liger_jax` took with it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Its names, all of them, for type checkers.
    from jax.experimental.pallas.mosaic_gpu import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
else:
    import functools
    import os

    def __getattr__(name):
        return getattr(_module(), name)

    @functools.cache
    def _module():
        from jax.experimental.pallas import mosaic_gpu

        _leave_out_numbers()
        return mosaic_gpu

    def _leave_out_numbers():
        """Since JAX 0.11.1 a kernel names its dumps by how many were lowered before, and no cache finds it again."""
        from jax.experimental.mosaic.gpu.core import dialect
        from jax.extend.mlir import ir

        number = getattr(dialect, "get_or_set_dump_options", None)
        if number is None or any(name.startswith("MOSAIC_GPU_DUMP") for name in os.environ):
            return

        def named(module):
            if "mosaic_gpu.dump_basename" not in module.operation.attributes:
                name = ir.StringAttr.get("kernel", module.context)
                module.operation.attributes["mosaic_gpu.dump_basename"] = name
            return number(module)

        dialect.get_or_set_dump_options = named
