"""What one block of Hopper's grouped products does: it walks over its items, fills a ring of tiles and multiplies them.

One warpgroup copies tiles of both operands into the ring, without a pause between items, and two multiply them. These
two share an item, 64 rows each, or take items in turn. In turns, one multiplies while the other stores.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _mosaic_gpu as plgpu
from liger_jax.pallas_kernels._hopper_product import Ring
from liger_jax.pallas_kernels._hopper_tiles import NUM_CONSUMERS, Tiles
from liger_jax.pallas_kernels.hopper import NUM_CORES, cores_here


def num_blocks(num_items: int) -> int:
    """The blocks for so many items, at most one on each core."""
    return min(NUM_CORES, cores_here(), num_items)


class Item(NamedTuple):
    """An item on a block's way."""

    number: Any  # which of all items
    done: Any  # steps of the block's items before
    turn: Any  # whose barriers its tiles have: 0, or the number of the warpgroup that takes it in its turn


class Block(NamedTuple):
    """A block's way over the items, which its warpgroups share."""

    total: Any  # items of all blocks
    busy: Any  # those of them that have steps, which come first
    num_blocks: int  # blocks of the kernel
    ring: Ring  # tiles of both operands
    tiles: Tiles  # their sizes

    def run(self, steps: Callable[[Any], Any], copy: Callable[..., None], finish: Callable[..., None]) -> None:
        """Calls copy(item) in one warpgroup and finish(item, warpgroup) in others, for items of steps(number) steps."""
        warpgroup = jax.lax.axis_index("warpgroup")

        @pl.when(warpgroup == NUM_CONSUMERS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            self._over_items(steps, lambda i, item: copy(item))

        @pl.when(warpgroup < NUM_CONSUMERS)
        def _():
            plgpu.set_max_registers(232, action="increase")

            def in_turn(i, item):
                pl.when(jax.lax.rem(i, NUM_CONSUMERS) == warpgroup)(lambda: finish(item, warpgroup))

            self._over_items(steps, in_turn if self.tiles.in_turn else lambda i, item: finish(item, warpgroup))
            plgpu.wait_smem_to_gmem(0)

    def _over_items(self, steps: Callable[[Any], Any], function: Callable[..., None]) -> None:
        """Rounds of items go over the blocks forth and back, so that items that become shorter are dealt evenly.

        Where fewer items than blocks have steps, the blocks without take all items without.
        """
        block, rounds = jax.lax.axis_index("block"), jax.lax.div(self.total, self.num_blocks)
        idle = self.num_blocks - self.busy

        def number(i):
            place = jnp.where(jax.lax.rem(i, 2) == 0, block, self.num_blocks - 1 - block)
            of_idle = jnp.where(i == 0, block, self.num_blocks - idle + block - self.busy + i * idle)
            return jnp.where(idle > 0, of_idle, i * self.num_blocks + place)

        def one(i, done):
            item = Item(number(i), done, jax.lax.rem(i, NUM_CONSUMERS) if self.tiles.in_turn else 0)
            function(i, item)
            return done + steps(item.number)

        rest = jnp.maximum(self.total - self.num_blocks - (block - self.busy), 0)  # from an idle block's second on
        further = jnp.where(block < self.busy, 0, jax.lax.div(rest + idle - 1, jnp.maximum(idle, 1)))
        of_idle = jnp.where(block < self.total, 1, 0) + further
        own = jnp.where(idle > 0, of_idle, rounds + jnp.where(number(rounds) < self.total, 1, 0))
        jax.lax.fori_loop(0, own, one, jnp.int32(0))

    def _slot(self, item: Item, step: Any) -> Any:
        return jax.lax.rem(item.done + step, self.tiles.stages)

    def barrier(self, barriers: Any, item: Item, step: Any) -> Any:
        """The barrier of a step's place in the ring. Whoever waits at one must see each of its phases."""
        return barriers.at[self._slot(item, step) + item.turn * self.tiles.stages]

    def copy_steps(self, item: Item, steps: Any, copy: Callable[[Any, Any], None]) -> None:
        """Calls copy(step, slot) when the step's place in the ring is free."""

        def copy_step(step, _):
            slot = self._slot(item, step)
            pl.when(item.done + step >= self.tiles.stages)(lambda: plgpu.barrier_wait(self.ring.emptied.at[slot]))
            copy(step, slot)

        jax.lax.fori_loop(0, steps, copy_step, None)

    def copy_tiles(self, item: Item, step: Any, slot: Any, sources: Sequence[Any]) -> None:
        """Copies a tile of each operand."""
        for source, stage in zip(sources, (self.ring.a, self.ring.b), strict=True):
            plgpu.copy_gmem_to_smem(source, stage.at[slot], self.barrier(self.ring.filled, item, step))

    def multiply(
        self, item: Item, steps: Any, rows: int, factors: Callable[[Any], Any], wait: Callable[[Any], None]
    ) -> jax.Array:
        """The sum over steps of the products of factors(slot), after wait(step): (rows, columns) float32."""

        def run(accumulator):
            def multiply_step(step, _):
                wait(step)
                plgpu.wgmma(accumulator, *factors(self._slot(item, step)))
                plgpu.wgmma_wait(1)  # all products but the last are done, so the tiles that they read are free
                pl.when(step > 0)(lambda: plgpu.barrier_arrive(self.ring.emptied.at[self._slot(item, step - 1)]))

            jax.lax.fori_loop(0, steps, multiply_step, None)
            plgpu.wgmma_wait(0)
            pl.when(steps > 0)(lambda: plgpu.barrier_arrive(self.ring.emptied.at[self._slot(item, steps - 1)]))
            return accumulator[...]

        return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((rows, self.tiles.columns), jnp.float32))

    def wait(self, item: Item, step: Any) -> None:
        """Until `copy_tiles` has filled a step's place."""
        plgpu.barrier_wait(self.barrier(self.ring.filled, item, step))

    def pass_over(self, item: Item, steps: Any) -> None:
        """Empties the ring as `multiply` does, without a product."""

        def pass_step(step, _):
            self.wait(item, step)
            plgpu.barrier_arrive(self.ring.emptied.at[self._slot(item, step)])

        jax.lax.fori_loop(0, steps, pass_step, None)
