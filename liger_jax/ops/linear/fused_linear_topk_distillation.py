"""Distillation from a teacher whose largest log-probabilities are stored, without the student's logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer, Num

from liger_jax.ops import checks, loss_terms
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.kernels import Implementation
from liger_jax.ops.linear._distillation import (
    Static,
    as_denominator,
    check_tokens,
    check_vocabulary,
    head_options,
    loss,
)
from liger_jax.pallas_kernels.fused_linear_distillation.config import Head, TopKOptions
from liger_jax.pallas_kernels.fused_linear_distillation.topk_formulas import TopK

OP = "fused_linear_topk_distillation"
TAILS = ("ignore", "bucket")


def fused_linear_topk_distillation(
    hidden: Float[ArrayLike, "*tokens D"],
    weight: Float[ArrayLike, "_ _"],
    token_ids: Integer[ArrayLike, "*tokens K"],
    log_probs: Float[ArrayLike, "*tokens K"],
    *,
    tail: str = "ignore",
    temperature: float = 1.0,
    where: Bool[ArrayLike, "*tokens"] | None = None,
    labels: Integer[ArrayLike, "*tokens"] | None = None,
    hard_weight: float = 0.0,
    ignore_index: int | None = -100,
    bias: Float[ArrayLike, " V"] | None = None,
    weight_layout: str = "vd",
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    reduction: str = "mean",
    denominator: Num[ArrayLike, ""] | float | int | None = None,
    vocab_axis: str | None = None,
    mode: str = "auto",
    chunk_size: int | None = None,
    memory_budget_bytes: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation = None,
) -> Float[Array, "*reduced"]:
    """The KL divergence of a student from a teacher of which K log-probabilities per token are stored.

    With q the teacher's stored probabilities, and p = softmax(z / temperature) of the student's
    z = logit_scale · softcap(hidden · weightᵀ + bias), a token's loss is

        (1 − hard_weight) · D + hard_weight · cross_entropy(z, label),    D = Σ_k q_k (log q_k − log p_k) + tail

    With tail="ignore", the tail is 0. With tail="bucket", it is q_r (log q_r − log p_r), where q_r and p_r are the
    total probabilities of all tokens that are not stored, so that D is a divergence of distributions over K + 1 events.
    If all V are stored, it is 0. There is no factor of temperature², and the cross-entropy has temperature 1. The
    stored probabilities have no gradient.

    The modes, and the arguments that are not listed here, are those of `fused_linear_distillation` for its student:
    three products or four, and none for the teacher.

    Args:
        token_ids: (..., K), integers in [0, V), all different within a token. Any other ids make the token's loss and
            gradient NaN.
        log_probs: (..., K), the teacher's log-probabilities of these tokens at the same temperature, any float dtype.
            An entry with −inf is not used, whatever its id. Where their probabilities sum to more than 1.05, as with
            probabilities or logits in their place, the token's loss and gradient are NaN.
        tail: "ignore" or "bucket".

    Returns:
        The loss, float32: () for "mean" and "sum", (...) for "none". The mean of no token is 0.

    Raises:
        ValueError: as from `fused_linear_cross_entropy`.

    Example:
        >>> hidden, weight = jnp.eye(1, 4), jnp.zeros((4, 4))
        >>> token_ids, log_probs = jnp.array([[2, 0]]), jnp.log(jnp.array([[0.5, 0.25]]))
        >>> print(fused_linear_topk_distillation(hidden, weight, token_ids, log_probs, tail="bucket").round(4))
        0.1733

    References:
        Hinton, Vinyals and Dean, Distilling the Knowledge in a Neural Network, arXiv:1503.02531.
    """
    *student, vocab_size = checks.linear_head(OP, hidden, weight, bias, weight_layout)
    student = Head(*student)
    (log_probs,) = checks.floating(OP, log_probs=log_probs)
    token_ids = loss_terms.as_labels(token_ids, OP, "token_ids")
    if not jnp.issubdtype(token_ids.dtype, jnp.integer):
        raise TypeError(f"{OP}: token_ids have dtype {token_ids.dtype}, but must be integers.")
    checks.check_choice(OP, "tail", tail, TAILS)
    checks.check_number(OP, hard_weight=hard_weight)
    static = Static(OP, ignore_index, reduction, mode, chunk_size, memory_budget_bytes, implementation)
    of_student = logit_scale, logit_softcap, weight_layout, checks.current_precision(OP, precision)
    options = TopKOptions(
        student=head_options(OP, "", *of_student, temperature),
        hard=head_options(OP, "", *of_student).logit,
        hard_weight=float(hard_weight),
        has_bucket=tail == "bucket",
        vocab_axis=vocab_axis,
        tokens=0,
        entries=0,
    )
    tokens = student.hidden.shape[:-1]
    wanted = (*tokens, *token_ids.shape[-1:])
    for name, x in dict(token_ids=token_ids, log_probs=log_probs).items():
        checks.check_shape(OP, name, x, wanted, "K entries for each token of hidden")
    labels, where = check_tokens(OP, labels, where, hard_weight, tokens, vocab_size)
    shards = dict(weight=student.weight, bias=student.bias)
    same = dict(hidden=student.hidden, token_ids=token_ids, log_probs=log_probs)
    check_vocabulary(OP, labels, where, vocab_size, options, ignore_index, shards, same)
    teacher = TopK(token_ids.astype(jnp.int32), jax.lax.stop_gradient(log_probs.astype(jnp.float32)))
    return loss(student, teacher, labels, where, as_denominator(OP, denominator, reduction), options, static)
