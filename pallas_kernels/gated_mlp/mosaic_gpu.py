"""The gated feed-forward in Pallas Mosaic GPU (Hopper): the epilogues of its products compute the gate.

Forward: the product that makes up reads gate's tiles, and writes up and the gated product.
Backward: the product that makes dh, the gated product's gradient, reads gate's and up's tiles, and writes their
gradients and the gated product. If gate and up were made again, their gradients are written over them. dh never
reaches memory. x's gradient is the sum of two products, which go through one accumulator.
Two warpgroups take tiles in turn: one reads and writes memory while the other multiplies. They share those of x's
gradient.
Memory passes saved: forward one read of up; backward one write and one read of dh, and for x's gradient two of each.
Rounding: the formulas are those of glu/formulas.py, and their dh is the float32 accumulator. x's gradient is rounded
once.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels import _mosaic_gpu as plgpu
from liger_jax.pallas_kernels import hopper
from liger_jax.pallas_kernels._hopper_product import Factors, product
from liger_jax.pallas_kernels._hopper_tiles import PIECE_COLUMNS, Epilogue, Tile, pieces, staging, store_tile
from liger_jax.pallas_kernels.gated_mlp.config import NUM_NEW_SLOTS, NUM_SLOTS, TILES, TILES_OF_SUM
from liger_jax.pallas_kernels.glu import formulas as glu
from liger_jax.pallas_kernels.tiles import out_like

Typed = jax.Array | jax.ShapeDtypeStruct  # an array, or its shape and dtype


def unsupported(x: Typed, up_kernel: Typed, *, activation: str) -> str | None:
    """Takes 16-bit operands in sizes that the copy engine moves in tiles. It has no error function."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"Hopper's matrix units support bfloat16 and float16, and x is {x.dtype}; use 'xla' or 'triton'."
    if any(size % 64 for size in up_kernel.shape):
        return f"the copy engine moves rows of 64, and up_kernel is {up_kernel.shape}; use 'xla' or 'triton'."
    num_rows = math.prod(x.shape[:-1])
    if num_rows % 8:
        return f"the copy engine moves 8 rows at a time, and x has {num_rows}; pad it, or use 'xla' or 'triton'."
    if activation == "gelu":
        return "the kernel has no error function, which the exact GELU needs; use 'xla', or activation='gelu_tanh'."
    return None


def _product_with(
    factors: Factors,
    matrices: Sequence[jax.Array],
    formula: Callable[..., Sequence[jax.Array]],
    name: str,
    in_place: bool = False,
) -> Sequence[jax.Array]:
    """formula(the product, *matrices), element by element. It makes one result more than there are matrices.

    A tile is computed piece by piece. `NUM_SLOTS` pieces of each matrix are fetched ahead, and results are written to
    their slots. With `in_place` the results are written over the matrices, and the last one to a separate array.
    """
    todo = pieces((TILES.rows, TILES.columns))
    like, num_matrices = matrices[0], len(matrices)
    written = 0 if in_place else num_matrices  # where the results' refs begin

    def fetch(tile: Tile, refs, scratch, i):
        arrived = scratch[-1].at[tile.warpgroup * NUM_SLOTS + i % NUM_SLOTS]
        for ref, stage in zip(refs[:num_matrices], scratch, strict=False):
            source = hopper.at(ref, tile.row, tile.column, todo[i])
            plgpu.copy_gmem_to_smem(source, stage.at[tile.warpgroup, i % NUM_SLOTS], arrived)

    def prepare(tile: Tile, refs, scratch):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i in range(NUM_SLOTS):  # these pieces arrive during the product
            fetch(tile, refs, scratch, i)

    def finish(tile: Tile, refs, scratch):
        *stages, arrived = scratch
        for i, piece in enumerate(todo):
            slots = [(tile.warpgroup, i % NUM_SLOTS)] * num_matrices + [(tile.warpgroup, i % NUM_NEW_SLOTS)]
            plgpu.barrier_wait(arrived.at[tile.warpgroup * NUM_SLOTS + i % NUM_SLOTS])
            values = [hopper.load(stage, slots[0], hopper.tile_layout()) for stage in stages[:num_matrices]]
            for stage, slot, y in zip(stages, slots, formula(tile.values[piece], *values), strict=True):
                stage[slot] = y.astype(stage.dtype)
            plgpu.commit_smem()
            for k, (stage, slot, ref) in enumerate(zip(stages, slots, refs[written:], strict=True)):
                there = hopper.at(ref, tile.row, tile.column, piece)
                plgpu.copy_smem_to_gmem(stage.at[slot], there, commit_group=k == num_matrices)
            if i > 0:  # into the slots of the piece before, once that piece has left
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                if i - 1 + NUM_SLOTS < len(todo):
                    fetch(tile, refs, scratch, i - 1 + NUM_SLOTS)

    slots = [NUM_SLOTS] * num_matrices + [NUM_NEW_SLOTS]
    if in_place:
        arrays: dict[str, Any] = dict(in_place=[*matrices, hopper.empty(like, like.shape, like.dtype)])
    else:
        arrays = dict(matrices=matrices, out_types=[out_like(like, like.shape, like.dtype)] * len(slots))
    stages = [hopper.shared_tile((2, count, 64, PIECE_COLUMNS), like.dtype) for count in slots]
    scratch = [*stages, plgpu.Barrier(num_arrivals=num_matrices, num_barriers=2 * NUM_SLOTS)]
    return product(factors, TILES, Epilogue(finish, prepare, scratch=scratch, **arrays), name=name)


def _factors(rows: jax.Array, kernel: jax.Array, contract: tuple[int, int], added: Sequence[jax.Array]) -> Factors:
    if not added:
        return Factors(rows, kernel, contract)
    return Factors(rows, kernel, contract, added=(_as_rows(added[0])[0], added[1]))


def _as_rows(*arrays: jax.Array) -> list[jax.Array]:
    return [x.reshape(-1, x.shape[-1]) for x in arrays]


def up_and_product(
    x: jax.Array, up_kernel: jax.Array, gate: jax.Array, *added: jax.Array, activation: str, precision: Any
) -> tuple[jax.Array, ...]:
    """x (..., D), up_kernel (D, F), gate (..., F) → up and act(gate) · up (..., F).

    `*added`: none, or t (..., R) and b (R, F), whose product is added to up.
    """
    del precision  # products of 16-bit numbers are exact, and their sums float32

    def formula(up, gate):
        up = up.astype(gate.dtype)
        return up, glu.product(gate, up, activation=activation)

    rows, gates = _as_rows(x, gate)
    results = _product_with(_factors(rows, up_kernel, (1, 0), added), [gates], formula, "gated_mlp_up")
    return tuple(y.reshape(gate.shape) for y in results)


def gradients_and_product(
    dy: jax.Array,
    down_kernel: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    *added: jax.Array,
    activation: str,
    precision: Any,
    in_place: bool,
) -> tuple[jax.Array, ...]:
    """dy (..., D), down_kernel (F, D), gate, up (..., F) → dgate, dup, act(gate) · up (..., F).

    With `in_place` the gradients are written over gate and up. `*added`: none, or u (..., R) and a (F, R), whose
    product u · aᵀ is added to the gated product's gradient.
    """
    del precision  # products of 16-bit numbers are exact, and their sums float32

    def formula(dh, gate, up):
        return glu.gradients_and_product(dh, gate, up, activation=activation)

    rows, *both = _as_rows(dy, gate, up)
    in_place = in_place and hopper.can_write_in_place(gate)
    results = _product_with(_factors(rows, down_kernel, (1, 1), added), both, formula, "gated_mlp_gradients", in_place)
    return tuple(y.reshape(gate.shape) for y in results)


def input_gradient(
    dgate: jax.Array, dup: jax.Array, gate_kernel: jax.Array, up_kernel: jax.Array, *, precision: Any
) -> jax.Array:
    """dgate, dup (..., F), gate_kernel, up_kernel (D, F) → dgate · gate_kernelᵀ + dup · up_kernelᵀ (..., D).

    Both products go through one accumulator, and their sum is rounded once.
    """
    del precision  # products of 16-bit numbers are exact, and their sums float32

    def finish(tile: Tile, refs, scratch):
        store_tile(tile, tile.values, scratch[0], refs[0], tile.row, tile.column)

    (rows, more), dtype = _as_rows(dgate, dup), dgate.dtype
    shape = len(rows), len(gate_kernel)
    (dx,) = product(
        Factors(rows, gate_kernel, (1, 1), added=(more, up_kernel)),
        TILES_OF_SUM,
        Epilogue(finish, out_types=[out_like(rows, shape, dtype)], scratch=[staging(dtype)]),
        name="gated_mlp_input_gradient",
    )
    return dx.reshape(*dgate.shape[:-1], shape[1])
