"""The sizes of chunks, and what the kernels take."""

import dataclasses

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.devices import AMPERE, HOPPER, Capability

CHUNK = 64  # tokens: the products within a chunk are as wide as those with its state
CHUNKS_A_STATE = 16  # the backward of XLA keeps the state before every so many chunks, and makes those between again
TOKENS_A_STATE = CHUNK * CHUNKS_A_STATE
TPU_CHUNK = 128  # an MXU's width; the inverse of a longer chunk's system would cost more than its other products
GATED_DELTA_RULE_STATES = "gated_delta_rule_states"  # `checkpoint_name` of the states that the backward needs

WIDTHS = (16, 32, 64, 128, 256)  # others are padded to the next
_MOST_ELEMENTS = 2**31 - 1
_LARGE = (0, 0), AMPERE, (10, 0)  # the interpreter, and GPUs whose blocks have at least 163 KiB of shared memory
Typed = jax.Array | jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Launch:
    """The warps of a program, the stages of its copies, and the columns of a state that it has at a time."""

    num_warps: int
    num_stages: int = 1
    columns: int = 0


# What measured best on an H200. A tile of C × 128 in float32 takes 64 of a thread's 255 registers with 4 warps.
PREPARE = Launch(4)
OUTPUT = Launch(4, 1, 64)
PAIR_GRADIENTS = Launch(4, 1, 64)
KEY_GRADIENTS = Launch(4, 1, 64)

TPU_MOST_HEADS = 4  # of values, in a program


def scan_launch(depth: int, capability: Capability, *, is_backward: bool) -> Launch:
    """A head of 128 has 4 programs, so that 32 heads fill an H100. Large GPUs have the memory for three stages, an A100
    only forwards.
    """
    is_large = _is_large(capability) and not (is_backward and capability == AMPERE)
    return Launch(4, 3 if depth <= 128 and is_large else 2, 32 if depth <= 128 else 16)


def tpu_heads(key_heads: int, heads: int) -> tuple[int, int]:
    """The heads of keys of a program, and the heads of values of each: as many as the counts allow, up to four in all.

    The products of one head wait for each other, and those of several run meanwhile.
    """
    group = heads // key_heads
    members = max(count for count in range(1, TPU_MOST_HEADS + 1) if group % count == 0)
    most = TPU_MOST_HEADS // group
    return max((count for count in range(1, most + 1) if key_heads % count == 0), default=1), members


def width_of(size: int) -> int:
    """The width that the kernels compute with."""
    return next(width for width in WIDTHS if width >= size)


def _is_large(capability: Capability) -> bool:
    return capability in _LARGE or capability[0] == HOPPER[0]


def unsupported(
    q: Typed, k: Typed, v: Typed, gate: Typed, beta: Typed, state: Typed | None, *, capability: Capability
) -> str | None:
    """Why the Triton kernels cannot run a case, or None. They need shared memory in proportion to the widths."""
    if any(x is not None and x.dtype == jnp.float64 for x in (q, k, v, gate, beta, state)):
        return "the kernels compute in float32; use 'xla' for float64."
    depth, width = q.shape[3], v.shape[3]
    is_half = all(x.dtype == jnp.bfloat16 for x in (q, k, v))
    widest = (256 if _is_large(capability) else 128) if is_half else 64
    if max(depth, width) > widest:
        dtypes = "bfloat16" if is_half else "other dtypes than bfloat16"
        return f"the kernels support widths up to {widest} of {dtypes} here, and D is {depth} and E {width}; use 'xla'."
    batch, length, heads, _ = v.shape
    wide, deep = width_of(width), width_of(depth)
    most = batch * heads * -(-length // CHUNK) * max(deep * wide, CHUNK * max(deep, wide))
    if most > _MOST_ELEMENTS:
        return (
            f"the kernels count an array's elements in 32 bits, and one would have {most}; use 'xla', or split the "
            "rows and pass the state on."
        )
    return None
