"""Distillation of a language model from another one, without the logits of either."""

import jax
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
from liger_jax.pallas_kernels.fused_linear_distillation.config import DivergenceOptions, Head

OP = "fused_linear_distillation"
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "tvd", "cosine")


def fused_linear_distillation(
    student_hidden: Float[ArrayLike, "*tokens D"],
    student_weight: Float[ArrayLike, "_ _"],
    teacher_hidden: Float[ArrayLike, "*tokens E"],
    teacher_weight: Float[ArrayLike, "_ _"],
    *,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    where: Bool[ArrayLike, "*tokens"] | None = None,
    labels: Integer[ArrayLike, "*tokens"] | None = None,
    hard_weight: float = 0.0,
    ignore_index: int | None = -100,
    student_bias: Float[ArrayLike, " V"] | None = None,
    student_weight_layout: str = "vd",
    student_logit_scale: float = 1.0,
    student_logit_softcap: float | None = None,
    teacher_bias: Float[ArrayLike, " V"] | None = None,
    teacher_weight_layout: str = "vd",
    teacher_logit_scale: float = 1.0,
    teacher_logit_softcap: float | None = None,
    reduction: str = "mean",
    denominator: Num[ArrayLike, ""] | float | int | None = None,
    vocab_axis: str | None = None,
    mode: str = "auto",
    chunk_size: int | None = None,
    memory_budget_bytes: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation = None,
) -> Float[Array, "*reduced"]:
    """The divergence of a student's next-token distribution from its teacher's, with no logits of all tokens.

    With p = softmax(z_student / temperature) and q = softmax(z_teacher / temperature), where each z is
    logit_scale · softcap(hidden · weightᵀ + bias), a token's loss is

        (1 − hard_weight) · D(p, q) + hard_weight · cross_entropy(z_student, label)

    | divergence | D |
    |---|---|
    | "forward_kl" | KL(q ‖ p) |
    | "reverse_kl" | KL(p ‖ q) |
    | "jsd" | beta · KL(q ‖ m) + (1 − beta) · KL(p ‖ m), m = (1 − beta) · p + beta · q |
    | "tvd" | ½ Σ_v |p_v − q_v| |
    | "cosine" | 1 − cos(z_student, z_teacher), of the logits, which a temperature does not change |

    There is no factor of temperature². The cross-entropy has temperature 1. The teacher has no gradient. The models may
    differ in width and dtype, and must have the same vocabulary. Arguments that are not listed here are those of
    `fused_linear_cross_entropy`; those of one model have the prefix `student_` or `teacher_`.

    Mode "fast" computes the gradients together with the loss, one chunk of tokens at a time, with three products of the
    student and one of the teacher. It needs a scalar loss. Mode "lean" recomputes the logits in the backward, in slices
    of the vocabulary, and writes the weight's gradient once: four products of the student and two of the teacher.
    "auto" is "fast" if the device's memory or `memory_budget_bytes` allows it. In mode "fast", the weight's gradient is
    summed over chunks in float32, or on Hopper, for a weight of 16 bits, in the three upper bytes of a float32.

    Args:
        student_hidden: (..., D), any float dtype.
        student_weight: (V, D), or (D, V) with `student_weight_layout="dv"`, any float dtype.
        teacher_hidden: (..., E), any float dtype.
        teacher_weight: (V, E), or (E, V) with `teacher_weight_layout="dv"`, any float dtype.
        divergence: see the table.
        beta: the teacher's weight in the mixture, in (0, 1), a Python number; for "jsd" only.
        temperature: > 0, a Python number; 1 for "cosine".
        where: (...) bool, which tokens count; None for all.
        labels: (...), integers in [0, V), or `ignore_index` where a token does not count. Any other label makes its
            token's loss and gradient NaN under jit, if there is a `hard_weight`.
        hard_weight: in [0, 1], a Python number; above 0 it needs labels.
        reduction: "mean" over the tokens that count, "sum", or "none".
        denominator: replaces the number of tokens in a mean, so that the losses of micro-batches add up to that of the
            batch.
        vocab_axis: inside `jax.shard_map`, the mesh axis over which both heads are shards of the vocabulary, while
            hidden states, labels and `where` are the same on all; needs mode "lean". With `check_vma=False` this is
            not checked.
        chunk_size: tokens in a chunk; None to choose.
        implementation: None to choose, or "xla" or "mosaic_gpu" (Hopper); see `liger_jax.ops`.

    Returns:
        The loss, float32: () for "mean" and "sum", (...) for "none". The mean of no token is 0.

    Raises:
        ValueError: as from `fused_linear_cross_entropy`, or the vocabularies differ in size.

    Example:
        >>> import jax.numpy as jnp
        >>> student, teacher = jnp.eye(2, 4), jnp.eye(2, 8)
        >>> heads = jnp.zeros((16, 4)), jnp.zeros((16, 8)).at[0].set(1.0)
        >>> print(fused_linear_distillation(student, heads[0], teacher, heads[1]).round(4))
        0.0514

    References:
        Hinton, Vinyals and Dean, Distilling the Knowledge in a Neural Network, arXiv:1503.02531.
        Agarwal et al., On-Policy Distillation of Language Models, arXiv:2306.13649.
        Hsu et al., Liger Kernel, arXiv:2410.10989, whose cosine loss is "cosine" times its beta.
    """
    *student, vocab_size = checks.linear_head(
        OP, student_hidden, student_weight, student_bias, student_weight_layout, "student_"
    )
    *teacher, teacher_vocab_size = checks.linear_head(
        OP, teacher_hidden, teacher_weight, teacher_bias, teacher_weight_layout, "teacher_"
    )
    student, teacher = Head(*student), Head(*teacher)
    _check_divergence(divergence, beta, temperature)
    precision = checks.current_precision(OP, precision)
    of_student = student_logit_scale, student_logit_softcap, student_weight_layout, precision
    of_teacher = teacher_logit_scale, teacher_logit_softcap, teacher_weight_layout, precision
    checks.check_number(OP, hard_weight=hard_weight)
    static = Static(OP, ignore_index, reduction, mode, chunk_size, memory_budget_bytes, implementation)
    options = DivergenceOptions(
        student=head_options(OP, "student_", *of_student, temperature),
        teacher=head_options(OP, "teacher_", *of_teacher, temperature),
        hard=head_options(OP, "student_", *of_student).logit,
        hard_weight=float(hard_weight),
        divergence=divergence,
        beta=float(beta),
        vocab_axis=vocab_axis,
        tokens=0,
        entries=0,
    )
    if vocab_size != teacher_vocab_size:
        raise ValueError(
            f"{OP}: the student's vocabulary has {vocab_size} entries and the teacher's {teacher_vocab_size}: "
            "distributions over different vocabularies have no divergence. Cut the padding off the larger head."
        )
    tokens = student.hidden.shape[:-1]
    wanted = (*tokens, *teacher.hidden.shape[-1:])
    checks.check_shape(OP, "teacher_hidden", teacher.hidden, wanted, "its tokens are those of student_hidden")
    labels, where = check_tokens(OP, labels, where, hard_weight, tokens, vocab_size)
    shards = dict(student_weight=student.weight, student_bias=student.bias)
    shards |= dict(teacher_weight=teacher.weight, teacher_bias=teacher.bias)
    same = dict(student_hidden=student.hidden, teacher_hidden=teacher.hidden)
    check_vocabulary(OP, labels, where, vocab_size, options, ignore_index, shards, same)
    denominator = as_denominator(OP, denominator, reduction)
    return loss(student, jax.lax.stop_gradient(teacher), labels, where, denominator, options, static)


def _check_divergence(divergence: str, beta: float, temperature: float) -> None:
    checks.check_choice(OP, "divergence", divergence, DIVERGENCES)
    loss_terms.check_temperature(OP, temperature)
    if divergence == "cosine" and temperature != 1.0:
        raise ValueError(
            f"{OP}: temperature={temperature} changes no angle between logits, which divergence='cosine' compares; "
            "leave it out."
        )
    checks.check_number(OP, beta=beta)
    if divergence != "jsd" and beta != 0.5:
        raise ValueError(f"{OP}: beta={beta} is read by divergence='jsd' alone, not by {divergence!r}; leave it out.")
    if not 0.0 < beta < 1.0:
        raise ValueError(
            f"{OP}: beta={beta} must be in (0, 1); the limits 0 and 1 are divergence='forward_kl' and 'reverse_kl'."
        )
