"""Helpers of Hopper's kernels (Pallas Mosaic GPU): layouts, copies, the launch and the simulation."""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _mosaic_gpu as plgpu
from liger_jax.pallas_kernels.devices import GPUS, gpu_named
from liger_jax.pallas_kernels.tiles import out_like

NUM_CORES = GPUS["h200"].cores
_SWIZZLE_BYTES = 128
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
_is_interpreted = contextvars.ContextVar("is_interpreted", default=False)


def cores_here() -> int:
    """Cores of the GPU for which a kernel is traced; `NUM_CORES` where it has no row in the table.

    An H100 PCIe has 114 and an H20 78: with 132 blocks, some would begin only when others have ended.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.local_devices()[0]
    gpu = gpu_named(device.device_kind)
    return NUM_CORES if gpu is None else gpu.cores


def tile_layout() -> Any:
    """How a warpgroup's registers hold a tile."""
    return plgpu.Layout.WGMMA


def row_layout() -> Any:
    """How a warpgroup's registers hold one number for each row of a tile."""
    return tile_layout().reduce(1)


def column_layout() -> Any:
    """How a warpgroup's registers hold one number for each column of a tile."""
    return tile_layout().reduce(0)


def shared_tile(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for tiles (..., rows, columns), in the layout of matrix units and of the copy engine."""
    width = min(_SWIZZLE_BYTES, shape[-1] * jnp.dtype(dtype).itemsize)
    tiling = plgpu.TilingTransform((8, width // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(width)))


def at(ref: Any, row: Any, column: Any, piece: tuple[slice, slice]) -> Any:
    """The piece of a tile that begins at (row, column) of an array in device memory."""
    rows, columns = piece
    height, width = rows.stop - rows.start, columns.stop - columns.start
    return ref.at[pl.ds(row + rows.start, height), pl.ds(column + columns.start, width)]


def load(ref: Any, index: tuple[Any, ...], layout: Any, *, optimized: bool = True) -> Any:
    """Loads memory to registers; device memory needs optimized=False. JAX 0.12 takes no index as an argument."""
    plgpu_load: Any = plgpu.load
    if jax.__version_info__ < (0, 11):
        return plgpu_load(ref, index, layout=layout, optimized=optimized)
    return plgpu_load(ref.at[index], layout=layout, optimized=optimized)


def store(ref: Any, index: tuple[Any, ...], x: Any) -> None:
    """Stores registers to memory, in pieces of any size. JAX 0.12 refuses pieces over 16 bytes unless it is asked."""
    if jax.__version_info__ < (0, 12):
        ref[index] = x
    else:
        plgpu.store(ref.at[index], x, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]


def launch(
    body: Callable[..., None],
    *operands: Any,
    num_blocks: int,
    scratch: Any,
    name: str,
    num_warpgroups: int = 3,
    auto_barriers: bool = True,
    out_types: Sequence[Any] = (),
    in_place: Sequence[jax.Array] = (),
    has_semaphores: bool = False,
) -> Any:
    """Runs body(*operands', *outputs' and in_place's refs, *scratch) in blocks of `num_warpgroups`.

    Without `auto_barriers` a warpgroup's threads do not meet around each of its stores: the body's own barriers must
    stand between what one thread writes and another reads.
    Returns the outputs, or what became of `in_place`: arrays that the body changes where they are. Inside a
    `shard_map` that checks how values vary over its mesh, JAX has no such arrays: see `can_write_in_place`.
    `has_semaphores`: whether the body asks for global semaphores (`pl.get_global`); it has no `in_place` then.
    """
    threads = {"num_threads": num_warpgroups, "thread_name": "warpgroup"}
    mesh = plgpu.Mesh(grid=(num_blocks,), grid_names=("block",), **threads)

    def run(*refs):
        pl.run_scoped(functools.partial(body, *refs), *scratch, collective_axes="warpgroup")

    # approx_math: exp to 2 units in the last place. tanh's would be good to 2^-11 only: kernels spell it by exp.
    params = plgpu.CompilerParams(
        approx_math=True,
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        unsafe_no_auto_barriers=not auto_barriers,
    )
    kernel = pl.kernel(run, out_type=list(out_types), mesh=mesh, compiler_params=params, name=name)
    if not in_place and not has_semaphores:
        return kernel(*operands)
    # In a loop over slices, XLA (jaxlib 0.11.2) fuses a call with the slices that it reads and with the writing of its
    # results to whole arrays. The results of a call that writes in place are lost then, and its semaphores, which JAX
    # makes zeros in place, do not begin at 0. Barriers prevent the fusion.
    operands, arrays = jax.lax.optimization_barrier((operands, tuple(in_place)))
    if has_semaphores:
        return jax.lax.optimization_barrier(kernel(*operands))
    return jax.lax.optimization_barrier(pl.run_state(lambda refs: kernel(*operands, *refs) and None)(arrays))


def kept(results: Any) -> Any:
    """A call's results that a derivative keeps and other ops read, too.

    In a loop over layers, whose results are written to whole arrays, XLA of jaxlib 0.11 would run the call twice:
    fused with the writing, and alone for the other ops. A barrier prevents that.
    """
    return jax.lax.optimization_barrier(results)


def opaque_zero() -> jax.Array | int:
    """0, as a number that ptxas does not know to be constant.

    Added to the index of an operand of products in a loop, it keeps ptxas from holding the addresses of all the
    operand's slices in registers through the loop, which spills others. JAX 0.10 compiles no barrier of a number.
    """
    return jax.lax.optimization_barrier(jnp.int32(0)) if jax.__version_info__ >= (0, 11) else 0


def add_product(total: jax.Array, a: Any, b_ref: Any) -> jax.Array:
    """total + a · b, float32; `a` is in registers, or in shared memory as b is."""
    if _is_interpreted.get():  # its accumulator cannot begin with a value
        return total + jnp.dot(a[...], b_ref[...], preferred_element_type=jnp.float32)
    multiply = lambda accumulator_ref: plgpu.wgmma(accumulator_ref, a, b_ref)
    summed: Any = pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(total))
    return summed


def empty(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array with no particular values, for kernels to fill. To make zeros would cost a pass over memory.

    It depends on `like`, so that XLA does not allocate it before `like` is there.
    """
    no_scratch = [plgpu.SMEM((8,), jnp.float32)]
    (array,) = launch(
        lambda *_: None, like, num_blocks=1, scratch=no_scratch, name="empty", out_types=[out_like(like, shape, dtype)]
    )
    return array


def empty_for_slices(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """`empty`, for slices to be written to: XLA (jaxlib 0.12.0) fails where it fuses its call with such a writing."""
    return jax.lax.optimization_barrier(empty(like, shape, dtype))


def can_write_in_place(x: jax.Array) -> bool:
    """Whether `launch` may change arrays that vary over the mesh as x does."""
    return not jax.typeof(x).manual_axis_type.varying


def can_map_warps(x: Any) -> bool:
    """Whether a kernel that reads x may call `plgpu.warp_map`: JAX does not allow its inputs to vary over a mesh."""
    return not jax.typeof(x).manual_axis_type.varying


def can_add_in_place(x: jax.Array) -> bool:
    """Whether `store_tile` may add to memory. JAX's interpreter has no copies that add."""
    return can_write_in_place(x) and not _is_interpreted.get()


def is_interpreted() -> bool:
    """Whether `launch` simulates."""
    return _is_interpreted.get()


@contextlib.contextmanager
def interpreter(interpret: bool) -> Iterator[None]:
    """In this context `launch` simulates blocks on the CPU (JAX ≥ 0.12): warpgroups, barriers, copies, matrix units.

    Memory begins as NaN, and a data race is an error.
    """
    if not interpret:
        yield
        return
    token = _is_interpreted.set(True)
    try:
        gpu: Any = plgpu  # JAX 0.10's types do not know what follows
        with gpu.force_gpu_interpret_mode(gpu.InterpretGPUParams(detect_races=True)):
            yield
    finally:
        _is_interpreted.reset(token)


def tanh(x: jax.Array) -> jax.Array:
    """tanh with a relative error of about 2^-22, also near 0: a softcap multiplies it, and so its error, by 30 or more.

    Below |x| = 0.625, x + x³·p(x²) with the coefficients of Cephes' tanhf; from there on 1 − 2/(1 + exp(2x)), whose
    absolute error is 2^-23.
    """
    square = x * x
    p = _TANH[0]
    for coefficient in _TANH[1:]:
        p = p * square + coefficient
    far = 1.0 - 2.0 / (1.0 + jnp.exp2(x * (2 * math.log2(math.e))))
    return jnp.where(jnp.abs(x) < 0.625, x + x * square * p, far)
