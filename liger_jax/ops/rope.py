"""Rotary position embedding."""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from liger_jax.ops import _explicit, checks, meshes
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.kernels import Implementation, only_xla
from liger_jax.ops.layout import spec_of
from liger_jax.pallas_kernels.tiles import in_float32

_KERNELS = {op: only_xla(op) for op in ("apply_rope", "apply_mrope")}
_LAYOUTS = ("half", "interleaved")


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _rotate(q, k, cos, sin, sections, layout):
    cos, sin = (_of_sections(table, sections) for table in (cos, sin))
    return _rotated(q, cos, sin, layout), _rotated(k, cos, sin, layout)


def _forward_rule(q, k, cos, sin, sections, layout):
    return _rotate(q, k, cos, sin, sections, layout), (cos, sin)


def _backward_rule(sections, layout, tables, cotangents):
    cos, sin = (_of_sections(table, sections) for table in tables)
    # The transpose of the rotation, which is its inverse where both halves of a table are equal.
    sin = -jnp.roll(sin, sin.shape[-1] // 2, axis=-1)
    return *(_rotated(dy, cos, sin, layout) for dy in cotangents), None, None


_rotate.defvjp(_forward_rule, _backward_rule)


def _of_sections(table: jax.Array, sections: tuple[int, ...] | None) -> jax.Array:
    """(3, 1|B, T, R) → (1|B, T, R): the columns of each section come from its own table. One table stays as it is."""
    if sections is None:
        return table
    *edges, _ = itertools.accumulate((*sections, *sections))
    columns = jnp.split(table, edges, axis=-1)
    return jnp.concatenate([x[i % 3] for i, x in enumerate(columns)], axis=-1)


def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array, layout: str) -> jax.Array:
    """Rotates the first R columns of x (B, T, heads, H) in float32; cos and sin (1|B, T, R)."""
    rotary, rest = jnp.split(x, [cos.shape[-1]], axis=-1)
    halves = functools.partial(jnp.split, indices_or_sections=2, axis=-1)
    pairs = halves(rotary) if layout == "half" else (rotary[..., 0::2], rotary[..., 1::2])
    x1, x2 = map(in_float32, pairs)
    (cos1, cos2), (sin1, sin2) = (halves(table.astype(x1.dtype)[:, :, None, :]) for table in (cos, sin))
    rotated = [y.astype(x.dtype) for y in (x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2)]
    if layout == "interleaved":
        rotated = [jnp.stack(rotated, axis=-1).reshape(rotary.shape)]
    return jnp.concatenate([*rotated, rest], axis=-1)


def apply_rope(
    q: Float[ArrayLike, "B T Q H"],
    k: Float[ArrayLike, "B T K H"],
    cos: Float[ArrayLike, "_ T R"],
    sin: Float[ArrayLike, "_ T R"],
    *,
    layout: str = "half",
    implementation: Implementation = None,
) -> tuple[Float[Array, "B T Q H"], Float[Array, "B T K H"]]:
    """Rotates queries and keys by their positions: (x₁, x₂)·cos + (−x₂, x₁)·sin.

    x₁ and x₂ are the halves of the first R columns of each head, or their even and odd columns; the columns from R on
    pass through. The rotation is computed in float32 and rounded once. The backward is the inverse rotation: only `cos`
    and `sin` are kept for it, and they are constants. XLA is the only implementation: it fuses the op with its
    neighbours.

    Args:
        q: (B, T, Q, H), any float dtype.
        k: (B, T, K, H), any float dtype; K may differ from Q.
        cos: (B, T, R) or (1, T, R), any float dtype, as `rope_table` makes it; R is even and at most H. Columns i and i
            + R/2 of the table belong to pair i, in either layout.
        sin: as `cos`.
        layout: "half": the pair i is columns i and i + R/2, as in Hugging Face's LLaMA, Qwen and Gemma;
            "interleaved": columns 2i and 2i + 1, as in Meta's LLaMA checkpoints and in GLM.
        implementation: None or "xla".

    Returns:
        q and k, rotated, each in its own shape and dtype.

    Raises:
        TypeError: `cos` or `sin` is differentiated.

    Example:
        >>> q = k = jnp.array([1.0, 2.0]).reshape(1, 1, 1, 2)
        >>> quarter_turn = jnp.zeros((1, 1, 2)), jnp.ones((1, 1, 2))
        >>> apply_rope(q, k, *quarter_turn)[0].squeeze().tolist()
        [-2.0, 1.0]

    References:
        Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021 (arXiv:2104.09864).
    """
    return _rope("apply_rope", q, k, cos, sin, None, layout, implementation)


def apply_mrope(
    q: Float[ArrayLike, "B T Q H"],
    k: Float[ArrayLike, "B T K H"],
    cos: Float[ArrayLike, "3 _ T R"],
    sin: Float[ArrayLike, "3 _ T R"],
    *,
    sections: Sequence[int],
    layout: str = "half",
    implementation: Implementation = None,
) -> tuple[Float[Array, "B T Q H"], Float[Array, "B T K H"]]:
    """Rotates queries and keys by three positions each, of time, height and width: Qwen2-VL's multimodal RoPE.

    The first sections[0] pairs of a head are rotated by the first table, the next sections[1] by the second, and the
    others by the third. The backward is the inverse rotation, for which only `cos` and `sin` are kept. XLA is the only
    implementation. Other arguments, and the result, are those of `apply_rope`.

    Args:
        cos: (3, B, T, R) or (3, 1, T, R), any float dtype, as `rope_table` makes it from positions (3, B, T).
        sin: as `cos`.
        sections: three Python ints, R/2 in sum: a config's `mrope_section`.

    Example:
        >>> q = k = jnp.ones((1, 1, 1, 4))
        >>> cos, sin = jnp.zeros((3, 1, 1, 4)), jnp.array([1.0, 2.0, 3.0]).reshape(3, 1, 1, 1) * jnp.ones(4)
        >>> apply_mrope(q, k, cos, sin, sections=(1, 0, 1))[0].squeeze().tolist()
        [-1.0, -3.0, 1.0, 3.0]

    References:
        Wang et al., "Qwen2-VL: Enhancing Vision-Language Model's Perception of the World at Any Resolution", 2024
        (arXiv:2409.12191), section 2.1.
    """
    op = "apply_mrope"
    cos, sin = checks.floating(op, cos=cos, sin=sin)
    half = cos.shape[-1] // 2 if cos.ndim else 0
    if cos.ndim != 4 or cos.shape[0] != 3:
        raise ValueError(
            f"{op}: cos has shape {cos.shape}, but must be (3, 1, T, R) or (3, B, T, R): tables for time, height and "
            "width; make them by rope_table from positions (3, B, T)."
        )
    checks.check_shape(op, "sin", sin, cos.shape, "the shape of cos")
    if not isinstance(sections, (tuple, list)):
        raise TypeError(f"{op}: sections is a {type(sections).__name__}, but must be three Python ints, R/2 in sum.")
    checks.check_int(op, **{f"sections[{i}]": size for i, size in enumerate(sections)})
    if len(sections) != 3 or min(sections) < 0 or sum(sections) != half:
        raise ValueError(
            f"{op}: sections={tuple(sections)} must be three numbers of pairs, R/2={half} in sum; pass the config's "
            "mrope_section."
        )
    return _rope(op, q, k, cos, sin, tuple(sections), layout, implementation)


def _rope(op, q, k, cos, sin, sections, layout, implementation) -> tuple[jax.Array, jax.Array]:
    q, k, cos, sin = checks.floating(op, q=q, k=k, cos=cos, sin=sin)
    checks.check_choice(op, "layout", layout, _LAYOUTS)
    _check_shapes(op, q, k, cos.shape if sections is None else cos.shape[1:])
    checks.check_shape(op, "sin", sin, cos.shape, "the shape of cos")
    cos, sin = checks.constant(cos, op, "cos"), checks.constant(sin, op, "sin")
    _KERNELS[op].choose(implementation, q, k, cos, sin)
    if (spec := _explicit.row_spec(q)) is not None:
        tables_axis = () if sections is None else (None,)
        table_spec = P(*tables_axis, spec[0] if cos.shape[-3] > 1 else None, spec[1])
        key_spec = P(*spec[:2], *spec_of(k)[2:])  # the heads of k may be split or not
        local = functools.partial(_rope, op, sections=sections, layout=layout, implementation=None)
        specs = spec, key_spec, table_spec, table_spec
        return _explicit.on_shards(op, local, (q, k, cos, sin), specs, specs[:2])
    return _rotate(*meshes.align_varying(q, k, cos, sin), sections, layout)


def _check_shapes(op: str, q: jax.Array, k: jax.Array, table_shape: tuple[int, ...]) -> None:
    if q.ndim != 4 or k.ndim != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"{op}: q has shape {q.shape} and k {k.shape}, but they must be (B, T, Q, H) and (B, T, K, H) with "
            "the same B, T and H; transpose heads and positions if they come as (B, Q, T, H)."
        )
    batch, length, _, width = q.shape
    if len(table_shape) != 3 or table_shape[0] not in (1, batch) or table_shape[1] != length:
        raise ValueError(
            f"{op}: cos has shape {table_shape}, but must be (1, {length}, R) or ({batch}, {length}, R): one row for "
            "each position; index the table by position first."
        )
    if table_shape[2] % 2 or table_shape[2] > width:
        raise ValueError(
            f"{op}: cos has width R={table_shape[2]}, but R must be even and at most H={width}, the head's; a table "
            "of R/2 columns must be concatenated with itself."
        )
