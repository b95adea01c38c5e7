"""The options of XLA when it compiles a step for several GPUs: when collectives begin."""

from typing import Any

from jax.sharding import Mesh

# A product fills a GPU, so that a collective that becomes ready during one has to wait for its end. By XLA's default a
# matrix is gathered during the product before the one that uses it, one matrix at a time: the gather then runs after
# that product, and the next product waits for it. Gathers that begin as early as possible run beside the products that
# follow. Llama-3.2-1B over two H200s, 4 × 2,048 tokens each: 137.5 to 138.3 ms a step in place of 140.2.
GPU_OPTIONS: dict[str, Any] = {
    "xla_gpu_experimental_parallel_collective_overlap_limit": 8,
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
}


def compiler_options(mesh: Mesh | None) -> dict[str, Any] | None:
    """XLA's options for a training step on a mesh, for `jax.jit(step, compiler_options=…)`.

    Args:
        mesh: the mesh, of real devices or of a topology; `None` for one device.

    Returns:
        The options for several GPUs; `None` for one, and for other devices.

    Example:
        >>> import jax
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> compiler_options(mesh) is None
        True
    """
    if mesh is None or mesh.size == 1 or mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return None
    return dict(GPU_OPTIONS)
