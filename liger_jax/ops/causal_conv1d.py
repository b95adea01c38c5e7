"""A short causal convolution along the tokens, each channel by itself."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Integer

from liger_jax.ops import _explicit, checks, meshes
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.layout import names
from liger_jax.ops.segment_ids import document_numbers, ids_of_rows, numbered
from liger_jax.pallas_kernels.tiles import promoted

_OP = "causal_conv1d"


def causal_conv1d(
    x: Float[ArrayLike, "B T D"],
    weight: Float[ArrayLike, "D W"],
    bias: Float[ArrayLike, " D"] | None = None,
    *,
    segment_ids: Integer[ArrayLike, "B T"] | None = None,
    state: Float[ArrayLike, "B W_1 D"] | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B W_1 D"]]:
    """Convolves the last W tokens of each channel: y_t = bias + Σ_j weight[:, j] · x_{t − W + 1 + j}.

    This is `torch.nn.Conv1d` with `groups=D` and a padding of W − 1 on the left. It is computed in float32 or wider and
    rounded once; only the arguments are kept for the backward. XLA is the only implementation.

    Args:
        x: (B, T, D), any float dtype.
        weight: (D, W), any float dtype; its last column is the factor of the token itself. W is 4 in most models.
        bias: (D,), any float dtype, or None for 0.
        segment_ids: (B, T) integers of packed rows, as in `causal_attention`: tokens of other documents count as 0.
        state: (B, W − 1, D), any float dtype, rounded to x's: the tokens before the first one, in the same document;
            None for 0.

    Returns:
        (B, T, D) in x's dtype; and the `state` for the tokens that follow, (B, W − 1, D) in x's dtype: the last W − 1
        tokens of the last document, with zeros before them if it has fewer. Padding at the end of a row counts as its
        last document.

    Raises:
        ValueError: `segment_ids` do not count documents, or a mesh splits T.

    Example:
        >>> y, state = causal_conv1d(jnp.arange(1.0, 5.0).reshape(1, 4, 1), jnp.array([[10.0, 1.0]]))
        >>> y.ravel().tolist(), state.item()
        ([1.0, 12.0, 23.0, 34.0], 4.0)
    """
    x, weight, bias, state = checks.floating(_OP, "bias", "state", x=x, weight=weight, bias=bias, state=state)
    if x.ndim != 3 or 0 in x.shape[1:] or weight.ndim != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] == 0:
        raise ValueError(
            f"{_OP}: x has shape {x.shape} and weight {weight.shape}, but they must be (B, T, D) and (D, W), of which "
            "only B may be 0; of a torch.nn.Conv1d (D, 1, W) pass weight[:, 0]."
        )
    checks.check_shape(_OP, "bias", bias, (x.shape[2],), "it is (D,), with x's D")
    before = x.shape[0], weight.shape[1] - 1, x.shape[2]
    checks.check_shape(_OP, "state", state, before, "it is (B, W − 1, D), with x's B and D and weight's W")
    arrays = x, weight, bias, ids_of_rows(_OP, segment_ids, x.shape[:2]), state
    if (spec := _explicit.spec_of_explicit(x)) is not None:
        batch, length, width = spec
        if names((length,)):
            raise ValueError(
                f"{_OP}: x is sharded as {spec}, but each device must have T whole. Move it by jax.sharding.reshard."
            )
        rows = P(batch, None, width)
        return _explicit.on_shards(
            _OP, _conv, arrays, (rows, P(width, None), P(width), P(batch, None), rows), (rows, rows)
        )
    return _conv(*meshes.align_varying(*arrays))


@jax.checkpoint
def _conv(x, weight, bias, segment_ids, state) -> tuple[jax.Array, jax.Array]:
    (batch, length, _), width = x.shape, weight.shape[1]
    wide = promoted(jnp.float32, promoted(x.dtype, weight.dtype))
    if state is None:
        state = jnp.zeros((batch, width - 1, x.shape[2]), x.dtype)
    tokens = jnp.concatenate([state.astype(x.dtype), x], axis=1)
    if segment_ids is None:
        number, factor = jnp.zeros((batch, length), jnp.int32), jnp.float32(1)
    else:
        number, factor = document_numbers(segment_ids), numbered(segment_ids)[..., None]
    numbers = jnp.pad(number, ((0, 0), (width - 1, 0)))  # the state belongs to the first document
    total = jnp.zeros(x.shape, wide) if bias is None else bias.astype(wide)[None, None]
    for j in range(width):
        seen = jnp.where((numbers[:, j : j + length] == number)[..., None], tokens[:, j : j + length], 0)
        total += seen.astype(wide) * weight[:, j].astype(wide)[None, None]
    last = jnp.where((numbers[:, length:] == number[:, -1:])[..., None], tokens[:, length:], 0)
    return (total * jnp.asarray(factor, wide)).astype(x.dtype), last * jnp.asarray(factor, x.dtype)
