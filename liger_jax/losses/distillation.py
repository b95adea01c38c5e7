"""Divergences of a student's and a teacher's distribution over the vocabulary, from their logits."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from liger_jax.losses import _checks
from liger_jax.ops.checks import ArrayLike, as_real, broadcast_mask, check_axes, check_choice, check_shape, floating

REDUCTIONS = ("mean", "sum", "none")
_IMPOSSIBLE = -1e30  # a log-probability whose exponential is 0, and finite


def kl_divergence(
    log_predictions: Float[ArrayLike, "..."],
    targets: Float[ArrayLike, "..."],
    axis: int | tuple[int, ...] | None = -1,
    where: Bool[ArrayLike, "..."] | None = None,
) -> Float[Array, "..."]:
    """Drop-in for `optax.kl_divergence`: Σ_v targets (log targets − log_predictions) for each example.

    It takes a student's log-probabilities and a teacher's probabilities; `forward_kl` and `reverse_kl` take logits of
    both. The arithmetic is float32. It differs from optax in one point: an entry whose target is 0 and whose
    log-prediction is −inf adds 0, where optax gives NaN.

    Args:
        log_predictions: log-probabilities, any float dtype.
        targets: probabilities, any float dtype.
        axis: the axis of the sum, several, or None for all.
        where: bool, which entries count, of a shape that broadcasts to the others'; None counts all.

    Returns:
        The divergence of each example, the arguments' promoted dtype.

    Example:
        >>> teacher, student = jnp.array([[0.5, 0.5]]), jnp.log(jnp.array([[0.25, 0.75]]))
        >>> kl_divergence(student, teacher)
        Array([0.144], dtype=float32)
    """
    arrays = dict(log_predictions=log_predictions, targets=targets)
    (log_predictions, targets), where, dtype = _elementwise("kl_divergence", arrays, where)
    check_axes("kl_divergence", axis, targets.ndim)
    is_impossible = (targets == 0) & (log_predictions == -jnp.inf)
    log_predictions = jnp.where(is_impossible, 0.0, log_predictions)
    # entr's derivative at 0 is inf, as it is, where a stand-in for log 0 would make it a finite number.
    terms = -jax.scipy.special.entr(targets) - targets * log_predictions
    return jnp.sum(terms, axis=axis, where=where).astype(dtype)


def forward_kl(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    *,
    temperature: float = 1.0,
    where: Bool[Array, "*N"] | None = None,
    reduction: str = "mean",
) -> Float[Array, "*R"]:
    """KL(teacher ‖ student) = Σ_v p_teacher (log p_teacher − log p_student) at each token.

    Gradients flow to both arguments; put `jax.lax.stop_gradient` around a teacher that is computed in the same program.
    No factor of temperature² is applied.

    Args:
        student: logits or log-probabilities, any float dtype. −inf is a probability of 0.
        teacher: the same for the teacher, over the same vocabulary.
        temperature: > 0; both distributions are softmax(logits / temperature).
        where: bool, which tokens count; None counts all.
        reduction: "mean" over the tokens that count, "sum", or "none", a number for each token.

    Returns:
        float32; a token that does not count has 0, and no gradient. The mean of no token is 0. The result is inf where
        the student gives probability 0 to an entry to which the teacher does not.

    Example:
        >>> teacher, student = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.25, 0.75]]))
        >>> forward_kl(student, teacher)
        Array(0.144, dtype=float32)

    References:
        Hinton, Vinyals and Dean, Distilling the Knowledge in a Neural Network, arXiv:1503.02531.
    """
    op = "forward_kl"
    log_student, log_teacher, where = _distributions(op, student, teacher, temperature, where)
    return _reduced(op, _kl(log_teacher, log_student), where, reduction)


def reverse_kl(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    *,
    temperature: float = 1.0,
    where: Bool[Array, "*N"] | None = None,
    reduction: str = "mean",
) -> Float[Array, "*R"]:
    """KL(student ‖ teacher) = Σ_v p_student (log p_student − log p_teacher) at each token.

    The arguments are those of `forward_kl`.

    Returns:
        As `forward_kl`; inf where the teacher gives probability 0 to an entry to which the student does not.

    Example:
        >>> teacher, student = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.25, 0.75]]))
        >>> reverse_kl(student, teacher)
        Array(0.131, dtype=float32)

    References:
        Gu et al., MiniLLM: Knowledge Distillation of Large Language Models, arXiv:2306.08543.
    """
    op = "reverse_kl"
    log_student, log_teacher, where = _distributions(op, student, teacher, temperature, where)
    return _reduced(op, _kl(log_student, log_teacher), where, reduction)


def js_divergence(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    where: Bool[Array, "*N"] | None = None,
    reduction: str = "mean",
) -> Float[Array, "*R"]:
    """The generalised Jensen-Shannon divergence, beta · KL(teacher ‖ m) + (1 − beta) · KL(student ‖ m), at each token.

    m = (1 − beta) · p_student + beta · p_teacher. Divided by beta it tends to `forward_kl` as beta → 0, and divided by
    1 − beta to `reverse_kl` as beta → 1.

    Args:
        beta: in (0, 1); the others are those of `forward_kl`.

    Returns:
        As `forward_kl`, at most log 2.

    Example:
        >>> teacher, student = jnp.array([[0.0, 80.0]]), jnp.array([[80.0, 0.0]])
        >>> js_divergence(student, teacher)
        Array(0.693, dtype=float32)

    References:
        Agarwal et al., On-Policy Distillation of Language Models, arXiv:2306.13649.
    """
    op = "js_divergence"
    _checks.check_python_numbers(op, beta=beta)
    law = "in (0, 1); the limits 0 and 1 are forward_kl and reverse_kl"
    _checks.check_number(op, "beta", beta, 0 < beta < 1, law)
    log_student, log_teacher, where = _distributions(op, student, teacher, temperature, where)
    return _reduced(op, _js(log_student, log_teacher, beta), where, reduction)


def _js(log_student: jax.Array, log_teacher: jax.Array, beta: float) -> jax.Array:
    # Where both probabilities are 0 so is the mixture's, and logaddexp has no derivative at −inf.
    log_student, log_teacher = (jnp.maximum(x, _IMPOSSIBLE) for x in (log_student, log_teacher))
    mixture = jnp.logaddexp(log_student + jnp.log(1.0 - beta), log_teacher + jnp.log(beta))
    return beta * _kl(log_teacher, mixture) + (1.0 - beta) * _kl(log_student, mixture)


def gkd_loss(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    where: Bool[Array, "*N"] | None = None,
    reduction: str = "mean",
) -> Float[Array, "*R"]:
    """GKD's divergence of student and teacher: `js_divergence` for 0 < beta < 1, and the KL divergences at 0 and 1.

    At beta = 0 it is the forward KL(teacher ‖ student), and at beta = 1 the reverse KL(student ‖ teacher), which is
    usual on the student's own samples. In between it is not divided by beta or 1 − beta, so it is small near both ends.
    GKD samples each batch from the student with probability λ and otherwise takes it from the data, which is left to
    the training loop.

    Args:
        beta: in [0, 1]; the others are those of `forward_kl`.

    Returns:
        As `forward_kl`.

    Example:
        >>> teacher, student = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.25, 0.75]]))
        >>> [round(gkd_loss(student, teacher, beta=beta).item(), 3) for beta in (0.0, 0.5, 1.0)]
        [0.144, 0.034, 0.131]

    References:
        Agarwal et al., On-Policy Distillation of Language Models, arXiv:2306.13649.
    """
    op = "gkd_loss"
    _checks.check_python_numbers(op, beta=beta)
    law = "in [0, 1], from the forward KL at 0 to the reverse KL at 1"
    _checks.check_number(op, "beta", beta, 0 <= beta <= 1, law)
    log_student, log_teacher, where = _distributions(op, student, teacher, temperature, where)
    if beta == 0:
        losses = _kl(log_teacher, log_student)
    elif beta == 1:
        losses = _kl(log_student, log_teacher)
    else:
        losses = _js(log_student, log_teacher, beta)
    return _reduced(op, losses, where, reduction)


def tv_distance(
    student: Float[Array, "*N V"],
    teacher: Float[Array, "*N V"],
    *,
    temperature: float = 1.0,
    where: Bool[Array, "*N"] | None = None,
    reduction: str = "mean",
) -> Float[Array, "*R"]:
    """The total variation distance, ½ Σ_v |p_student − p_teacher|, at each token.

    The arguments are those of `forward_kl`.

    Returns:
        As `forward_kl`, in [0, 1].

    Example:
        >>> teacher, student = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.25, 0.75]]))
        >>> tv_distance(student, teacher)
        Array(0.25, dtype=float32)

    References:
        Wen et al., f-Divergence Minimization for Sequence-Level Knowledge Distillation, arXiv:2307.15190.
    """
    op = "tv_distance"
    log_student, log_teacher, where = _distributions(op, student, teacher, temperature, where)
    losses = 0.5 * jnp.sum(jnp.abs(jnp.exp(log_student) - jnp.exp(log_teacher)), axis=-1)
    return _reduced(op, losses, where, reduction)


def cosine_distance(
    predictions: Float[ArrayLike, "..."],
    targets: Float[ArrayLike, "..."],
    *,
    epsilon: float | Float[ArrayLike, ""] = 0.0,
    axis: int | tuple[int, ...] | None = -1,
    where: Bool[ArrayLike, "..."] | None = None,
) -> Float[Array, "..."]:
    """Drop-in for `optax.cosine_distance`: 1 − the cosine of the angle between two vectors, for each pair.

    The arithmetic is float32, and no square overflows. It differs from optax in one point: a vector of zeros has the
    distance 1 and gradient 0, where optax gives NaN unless `epsilon` is above 0.

    Args:
        predictions: vectors such as hidden states or logits, any float dtype.
        targets: vectors of the same shape.
        epsilon: the least squared length that a vector is divided by, as in optax.
        axis: the axis of the vectors' entries, several, or None for all.
        where: bool, which entries count, of a shape that broadcasts to the vectors'; None counts all.

    Returns:
        The distance of each pair in [0, 2], the arguments' promoted dtype.

    Example:
        >>> cosine_distance(jnp.array([[3.0, 4.0]]), jnp.array([[1.0, 0.0]]))
        Array([0.4], dtype=float32)
    """
    op = "cosine_distance"
    (x, y), where, dtype = _elementwise(op, dict(predictions=predictions, targets=targets), where)
    check_axes(op, axis, x.ndim)
    epsilon = as_real(op, "epsilon", epsilon)
    check_shape(op, "epsilon", epsilon, (), "one number")
    x, y = _unit(x, axis, epsilon), _unit(y, axis, epsilon)
    return (1.0 - jnp.sum(x * y, axis=axis, where=where)).astype(dtype)


def _elementwise(op: str, arrays: dict[str, Any], where: Any) -> tuple[list[jax.Array], Any, Any]:
    """Two arrays of one shape in float32, with zeros where entries do not count, `where`, and the result's dtype."""
    dtype = jnp.result_type(*floating(op, **arrays))
    inputs = _checks.as_float32(op, **arrays)
    try:
        inputs = list(jnp.broadcast_arrays(*inputs))  # JAX 0.12 has a tuple
    except ValueError as error:
        shapes = " and ".join(f"{name} {x.shape}" for name, x in zip(arrays, inputs, strict=True))
        raise ValueError(f"{op}: {shapes} do not broadcast to one shape; cut or reshape one of them.") from error
    if where is None:
        return inputs, None, dtype
    where = broadcast_mask(op, where, inputs[0].shape)
    return [jnp.where(where, x, 0.0) for x in inputs], where, dtype


def _distributions(
    op: str, student: Any, teacher: Any, temperature: Any, where: Any
) -> tuple[jax.Array, jax.Array, Any]:
    """Log-probabilities in float32, from logits or from log-probabilities; values that do not count may be NaN."""
    _checks.check_positive(op, temperature=temperature)
    student, teacher = _checks.as_float32(op, student=student, teacher=teacher)
    if student.shape != teacher.shape or student.ndim == 0:
        raise ValueError(
            f"{op}: student has shape {student.shape} and teacher {teacher.shape}, but must have one shape, with an "
            "axis to compare: vocabularies of different sizes have no divergence; cut the padding off the larger head."
        )
    if where is not None:
        where = _checks.as_mask(op, "where", where, student.shape[:-1])
        student, teacher = (jnp.where(where[..., None], x, 0.0) for x in (student, teacher))
    return jax.nn.log_softmax(student / temperature), jax.nn.log_softmax(teacher / temperature), where


def _kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """Σ_v p (log p − log q), where p = 0 adds nothing, whatever q is, and no gradient. NaN in either is NaN."""
    p = jnp.exp(log_p)
    is_impossible = (p == 0) & ~jnp.isnan(log_q)
    difference = jnp.where(is_impossible, 0.0, log_p) - jnp.where(is_impossible, 0.0, log_q)
    return jnp.sum(p * difference, axis=-1)


def _unit(x: jax.Array, axis: Any, epsilon: Any) -> jax.Array:
    """x over its length, or √epsilon if that is more; 0 for zeros. x is first divided by its largest entry."""
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis=axis, keepdims=True, initial=0.0))
    largest = jnp.where(largest == 0, 1.0, largest)
    x = x / largest
    square = jnp.sum(jnp.square(x), axis=axis, keepdims=True)
    length = jnp.where(square == 0, 0.0, jnp.sqrt(jnp.where(square == 0, 1.0, square)))  # no derivative of √0
    length = jnp.maximum(length, jnp.sqrt(epsilon.astype(jnp.float32)) / largest)
    return x / jnp.where(length == 0, jnp.inf, length)


def _reduced(op: str, losses: jax.Array, where: Any, reduction: str) -> jax.Array:
    check_choice(op, "reduction", reduction, REDUCTIONS)
    losses = losses if where is None else jnp.where(where, losses, 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return jnp.sum(losses)
    count = float(losses.size) if where is None else jnp.sum(where).astype(jnp.float32)
    return jnp.sum(losses) / jnp.maximum(count, 1.0)
