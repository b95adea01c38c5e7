"""What the cross-entropy kernels are compiled for, and their tile sizes."""

import dataclasses

from liger_jax.pallas_kernels.tiles import next_power_of_2, round_up


@dataclasses.dataclass(frozen=True)
class LogitOptions:
    """How logits z are made from the raw logits u, and which statistics are made in addition to lse and target.

    z = scale · softcap · tanh(u / softcap), or scale · u without a softcap.
    """

    scale: float = 1.0
    softcap: float | None = None
    logit_sum: bool = False  # Σ_v c_v·z_v, for label smoothing
    metrics: bool = False  # the maximum and its first index
    entropy: bool = False  # −Σ_v p_v·log p_v, and log Σ_v p_v²


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """Rows per program, columns per step, warps."""

    n_block_size: int
    v_block_size: int
    num_warps: int


def triton_config(v: int) -> TritonConfig:
    """One row a program; 8,192 float32 over 8 warps are 32 registers a thread."""
    v_block_size = min(8192, next_power_of_2(v))
    return TritonConfig(1, v_block_size, num_warps=min(8, max(1, v_block_size // 256)))


def tpu_block_sizes(n: int, v: int) -> tuple[int, int]:
    """Rows and columns per step: a float32 tile of 1 MiB. The compiler holds a few such tiles."""
    return min(128, round_up(n, 16)), min(2048, round_up(v, 128))
