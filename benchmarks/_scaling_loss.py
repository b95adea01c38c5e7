"""The fused loss of `scaling`: its head's vocabulary is split over several GPUs, as tensor parallelism splits it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax.ops import fused_linear_cross_entropy

_AXIS = "tensor"


@dataclasses.dataclass(frozen=True)
class LossCase:
    """A loss and both its gradients, in bfloat16."""

    batch: int  # tokens
    width: int  # of the hidden states
    vocab: int  # entries of the head
    count: int  # the GPUs that split them
    mode: Any = "auto"  # of the loss
    how: str = "strong"
    seq: int = 1  # tokens in one of the batch

    @classmethod
    def of(cls, text: str) -> "LossCase":
        """The case of a text such as loss:8192x4096x128256:tensor=2, or loss+fast:…"""
        try:
            name, sizes, mesh = text.split(":")
            tokens, width, vocab = map(int, sizes.split("x"))
            axis, count = mesh.split("=")
            mode: Any = name.removeprefix("loss").removeprefix("+") or "auto"
            case = cls(tokens, width, vocab, int(count), mode)
        except ValueError:
            raise ValueError(f"case={text!r} must be such as loss:8192x4096x128256:{_AXIS}=2.") from None
        if axis != _AXIS or tokens % case.count or vocab % case.count:
            raise ValueError(f"case={text!r}: {_AXIS} alone splits a loss, and divides its tokens and its entries.")
        return case

    @property
    def alone(self) -> "LossCase":
        """The same on one GPU."""
        return dataclasses.replace(self, count=1, mode="auto")

    @property
    def name(self) -> str:
        """In words, for a table."""
        where = f"strong, {_AXIS}={self.count}" if self.count > 1 else "one GPU"
        where += "" if self.mode == "auto" else f", mode {self.mode}"
        return f"fused loss, {self.batch} × {self.width} × {self.vocab}, {where}"


def program_of(case: LossCase, devices: list[Any]) -> tuple[Any, tuple[Any, ...], Callable[[], tuple[Any, ...]]]:
    """The jitted loss with its gradients by hidden states and head, its arguments' types, and what makes them.

    A GPU has its shard of the positions and of the vocabulary, as between a model's layers. Positions are gathered, and
    their gradients scattered.
    """
    mesh = jax.make_mesh((case.count,), (_AXIS,), devices=devices[: case.count], axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, P(_AXIS)), NamedSharding(mesh, P())

    def local(hidden, weight, labels):
        hidden = jax.lax.all_gather(hidden, _AXIS, axis=0, tiled=True)
        return fused_linear_cross_entropy(hidden, weight, labels, mode=case.mode, vocab_axis=_AXIS)

    specs: Any = dict(in_specs=(P(_AXIS), P(_AXIS), P()), out_specs=P(), check_vma=False)
    loss = fused_linear_cross_entropy if case.count == 1 else jax.shard_map(local, mesh=mesh, **specs)
    typed = lambda shape, dtype, sharding: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    types = (
        typed((case.batch, case.width), jnp.bfloat16, split),
        typed((case.vocab, case.width), jnp.bfloat16, split),
        typed((case.batch,), jnp.int32, whole),
    )

    def filled():
        keys = jax.random.split(jax.random.key(0), 3)
        hidden, weight = (jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys[:2], types[:2], strict=True))
        return hidden, 0.02 * weight, jax.random.randint(keys[2], (case.batch,), 0, case.vocab, jnp.int32)

    shardings = tuple(x.sharding for x in types)
    return jax.jit(jax.value_and_grad(loss, (0, 1))), types, jax.jit(filled, out_shardings=shardings)
