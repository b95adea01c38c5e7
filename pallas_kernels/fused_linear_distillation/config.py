"""What the computation is compiled for."""

import dataclasses
from typing import NamedTuple

import jax

from liger_jax.pallas_kernels.cross_entropy.config import LogitOptions


class Head(NamedTuple):
    """One model's side, flat over tokens."""

    hidden: jax.Array  # (N, D)
    weight: jax.Array  # (V, D) or (D, V)
    bias: jax.Array | None  # (V,)


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """How products with a head are made, and its logits; `logit.scale` has the temperature's reciprocal as a factor."""

    logit: LogitOptions
    weight_layout: str  # "vd" or "dv"
    precision: jax.lax.PrecisionLike

    @property
    def vocab_dim(self) -> int:
        """Which axis of the weight is the vocabulary."""
        return self.weight_layout.index("v")


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of both losses.

    A token's loss is (1 − hard_weight) · D + hard_weight · cross-entropy. `hard` says how the cross-entropy's logits
    come from the student's raw ones. `vocab_axis` is the mesh axis over which the vocabulary is split, or None.
    """

    student: HeadOptions
    hard: LogitOptions
    hard_weight: float
    vocab_axis: str | None
    tokens: int  # in a chunk
    entries: int  # of the vocabulary in a slice


@dataclasses.dataclass(frozen=True)
class DivergenceOptions(Options):
    """The options of the divergence from a teacher whose logits are made here."""

    teacher: HeadOptions
    divergence: str  # "forward_kl", "reverse_kl", "jsd", "tvd" or "cosine"
    beta: float


@dataclasses.dataclass(frozen=True)
class TopKOptions(Options):
    """The options of the divergence from a teacher whose largest log-probabilities are stored."""

    has_bucket: bool  # whether all other tokens are one event, or nothing
