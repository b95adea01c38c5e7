"""The loss of a causal language model from its hidden states and head, in any library."""

import difflib
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer

from liger_jax.ops import LossMetrics, checks, fused_linear_cross_entropy
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.labels import IGNORE_INDEX
from liger_jax.ops.layout import is_explicit, names, spec_of
from liger_jax.ops.linear.fused_linear_cross_entropy import named_loss
from liger_jax.ops.loss_terms import as_arrays
from liger_jax.ops.segment_ids import check_segment_ids, is_numbered

_PARAMETERS = inspect.signature(fused_linear_cross_entropy).parameters.values()
_OPTIONS = {option.name: option.default for option in _PARAMETERS if option.kind is option.KEYWORD_ONLY}


def causal_lm_loss(
    hidden: Float[ArrayLike, "*B T D"],
    head: Float[ArrayLike, "..."],
    labels: Integer[ArrayLike, "*B T"],
    *,
    segment_ids: Int[ArrayLike, "*B T"] | None = None,
    **options: Any,
) -> jax.Array | tuple[jax.Array, LossMetrics]:
    """The loss of predicting each token from those before it, without logits, for a model of any library.

    Pass the hidden states after the model's last norm, and the head's matrix from its parameters. In Flax's `Linear`
    and `Dense` this is the kernel, (D, V), whose layout is "dv". Gradients flow to the hidden states and to the head.

    loss = mean over scored t of −log softmax(hidden[..., t, :]·headᵀ)[labels[..., t + 1]]

    Inside `jax.shard_map`, each device must have whole rows, which cannot be checked: a shard of a row would lack the
    label of its last position. If rows are sharded, call `shifted_labels` with the whole rows outside of it, and
    `fused_linear_cross_entropy` inside.

    A batch axis is not needed: `hidden` may be one sequence, and `jax.vmap` over sequences gives a mean for each.

    Args:
        hidden: (..., T, D) hidden states after the last norm, any float dtype.
        head: (V, D), any float dtype; or (D, V) with `weight_layout="dv"`.
        labels: token ids in [0, V), unshifted; -100 is not scored, nor is the last position of a sequence.
        segment_ids: ids of a packed row's documents, whose last positions are not scored either. Documents are numbered
            from 1. Padding has the id 0, follows them, and is not scored.
        **options: options of `fused_linear_cross_entropy`, such as `bias`, `weight_layout`, `logit_softcap`,
            `token_weights`, `reduction`, `return_metrics` and `mode`; `ignore_index` is -100.

    Returns:
        A float32 scalar, or (..., T) with `reduction="none"`; with `return_metrics=True`, (loss, metrics).

    Raises:
        ValueError: there is no axis of positions, the shape of `labels` or `segment_ids` is not that of the positions,
            the labels' rows are sharded over Explicit axes of a mesh, or an option is refused; and, outside of jit, an
            id is negative, or a 0 comes before another id. Under jit such a row makes the loss NaN.
        TypeError: an option is unknown, an array has a wrong dtype, or an argument is not an array, but for example a
            model's whole output.

    Example:
        >>> model = jax.random.normal(jax.random.key(0), (5, 8)), jnp.zeros((8, 5))  # an embedding and a Flax kernel
        >>> tokens = jnp.array([[1, 2, 3, 4]])
        >>> causal_lm_loss(model[0][tokens], model[1], tokens, weight_layout="dv")
        Array(1.609, dtype=float32)
    """
    for name in options:
        _check_option(name)
    checks.as_array("causal_lm_loss", "hidden", hidden, checks.HIDDEN)
    checks.as_array("causal_lm_loss", "head", head, checks.HEAD)
    checks.as_array("causal_lm_loss", "labels", labels, "token ids (..., T), unshifted, such as the tokens themselves")
    hidden, head = checks.floating("causal_lm_loss", hidden=hidden, head=head)
    labels, segment_ids = _integers("causal_lm_loss", labels, segment_ids)
    if hidden.ndim < 2:
        raise ValueError(
            f"causal_lm_loss: hidden has shape {hidden.shape}; it must be (..., T, D), with an axis of positions: each "
            "predicts the next one's label. For labels that are shifted already, call fused_linear_cross_entropy."
        )
    for name, x in dict(labels=labels, segment_ids=segment_ids).items():
        if x is not None and x.shape != hidden.shape[:-1]:
            raise ValueError(
                f"causal_lm_loss: {name} has shape {x.shape}; it must be {hidden.shape[:-1]}, one for each position."
            )
    _check_whole_rows(labels)
    targets = shifted_labels(labels, segment_ids)
    return named_loss("causal_lm_loss", hidden, head, targets, **_OPTIONS | options)


def _integers(op: str, labels: Any, segment_ids: Any) -> Iterator[jax.Array]:
    arrays = tuple(as_arrays(op, labels, segment_ids=segment_ids))
    for name, x in zip(("labels", "segment_ids"), arrays, strict=True):
        if x is not None and not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{op}: {name} have dtype {x.dtype}, but must be integers; cast them.")
    return iter(arrays)


def _check_whole_rows(labels: jax.Array) -> None:
    split = names(spec_of(labels)[-1]) if is_explicit(labels) else ()
    if split:
        raise ValueError(
            f"causal_lm_loss: labels are sharded over the mesh as {spec_of(labels)}, which splits the positions over "
            f"{split}, and the label of a shard's last position is on another device. Move labels and segment_ids by "
            "jax.sharding.reshard so that rows are whole; or take shifted_labels before you place them, and then "
            "fused_linear_cross_entropy."
        )


def _check_option(name: str) -> None:
    if name == "ignore_index":
        raise TypeError(f"causal_lm_loss: {name} is {IGNORE_INDEX}; write that over the labels that are not scored.")
    if name not in _OPTIONS:
        near = [own for own in _OPTIONS if name in own] or difflib.get_close_matches(name, _OPTIONS)
        hint = f"did you mean {near[0]}?" if near else f"pass some of {(*_OPTIONS,)}."
        raise TypeError(f"causal_lm_loss: {name} is not an option of fused_linear_cross_entropy; {hint}")


def shifted_labels(
    labels: Integer[ArrayLike, "*B T"], segment_ids: Int[ArrayLike, "*B T"] | None = None
) -> Int[Array, "*B T"]:
    """Moves labels one position to the left, with -100 at the end of each sequence and segment, and at padding.

    Args:
        labels: integer labels, unshifted, in any integer dtype.
        segment_ids: ids of a packed row's documents, which are numbered from 1; 0 is padding, which follows them.

    Returns:
        The label against which each position is scored, in at least 32 bits. Under jit, a row in which an id is
        negative or a 0 comes before another id has −1 everywhere, which makes every loss NaN.

    Raises:
        ValueError: outside of jit there is such a row.

    Example:
        >>> shifted_labels(jnp.array([[5, 6, 7, 8, 0, 0]]), jnp.array([[1, 1, 2, 2, 0, 0]])).tolist()
        [[6, -100, 8, -100, -100, -100]]
    """
    op = "shifted_labels"
    labels, segment_ids = _integers(op, labels, segment_ids)
    if labels.ndim == 0:
        raise ValueError(f"{op}: labels has shape (), but must be (..., T), with an axis of positions.")
    checks.check_shape(op, "segment_ids", segment_ids, labels.shape, "one entry for each label")
    shifted = jnp.concatenate([labels[..., 1:], jnp.full_like(labels[..., :1], IGNORE_INDEX)], axis=-1)
    if segment_ids is None:
        return shifted
    check_segment_ids(segment_ids, f"{op}: ")
    same = (segment_ids[..., 1:] == segment_ids[..., :-1]) & (segment_ids[..., 1:] != 0)
    same_segment = jnp.concatenate([same, jnp.zeros_like(segment_ids[..., :1], bool)], axis=-1)
    return jnp.where(is_numbered(segment_ids)[..., None], jnp.where(same_segment, shifted, IGNORE_INDEX), -1)
