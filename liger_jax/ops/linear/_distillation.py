"""What the distillation losses share: their derivatives, their chunks, and the mesh."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from liger_jax.ops import _explicit, _vocab_shards, checks, loss_terms, meshes
from liger_jax.ops._forward_mode import reverse_only
from liger_jax.ops.layout import are_seen, gathered
from liger_jax.ops.linear._shards import shards_of
from liger_jax.ops.linear._statistics import as_shapes, from_shapes, instantiated, needs_of, present, scaled, values
from liger_jax.ops.linear.distillation_plan import KERNELS, DistillationProblem, plan_distillation
from liger_jax.ops.linear.plan import Plan
from liger_jax.ops.linear.problem import possible_mode, soft_budget_bytes, why_not_fast
from liger_jax.ops.place import Place, place_of
from liger_jax.pallas_kernels.cross_entropy.config import LogitOptions
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Needs
from liger_jax.pallas_kernels.fused_linear_distillation import chunks
from liger_jax.pallas_kernels.fused_linear_distillation.buffers import Sizes
from liger_jax.pallas_kernels.fused_linear_distillation.config import Head, HeadOptions, Options
from liger_jax.pallas_kernels.fused_linear_distillation.topk_formulas import TopK
from liger_jax.pallas_kernels.tiles import is_symbolic

_NOTHING = Needs(False, False, False)
_TWICE = "take the divergences of liger_jax.losses, on logits"


@dataclasses.dataclass(frozen=True)
class Static:
    """The static arguments of a call, except the options of the formulas."""

    op: str
    ignore_index: int | None
    reduction: str
    mode: str
    chunk_size: int | None
    memory_budget_bytes: int | None
    implementation: Any

    def __post_init__(self) -> None:
        checks.check_choice(self.op, "reduction", self.reduction, loss_terms.REDUCTIONS)
        checks.check_mode(self.op, self.mode, self.chunk_size, self.memory_budget_bytes)
        loss_terms.check_ignore_index(self.op, self.ignore_index)


# --- lean: each token's loss; dX is made in the forward, and dW in the backward ---------------------------------
# Here a token's scale is 1, or 0 or NaN. A mean divides these losses later: with its denominator in them, float16 would
# round dX to 0 before a loss scale can reach it.


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _token_losses_vjp(hidden, weight, bias, teacher, labels, scale, options, choice) -> jax.Array:
    return _run(hidden, weight, bias, teacher, labels, scale, options, choice, _NOTHING)[0]


def _token_losses_forward_rule(hidden, weight, bias, teacher, labels, scale, options, choice):
    needs = needs_of(hidden, weight, bias)
    hidden, weight, bias, teacher, labels, scale = values(hidden, weight, bias, teacher, labels, scale)
    losses, statistics, grads = _run(
        hidden, weight, bias, teacher, labels, scale, options, choice, needs._replace(weight=False, bias=False)
    )
    (dhidden,) = present(grads[:1])
    return losses, (as_shapes(needs), hidden, weight, bias, teacher, labels, scale, statistics, dhidden)


def _token_losses_backward_rule(options, choice, residuals, cotangent):
    needs, hidden, weight, bias, teacher, labels, scale, statistics, dhidden = residuals
    needs, g = from_shapes(needs), jnp.where(scale == 0, 0.0, instantiated(cotangent))
    if needs.hidden:
        dhidden = jnp.where(g[:, None] == 0, 0.0, g[:, None] * dhidden.astype(jnp.float32)).astype(hidden.dtype)
    dweight = dbias = None
    if needs.weight or needs.bias:
        _, dweight, dbias = chunks.by_vocabulary(
            Head(hidden, weight, bias), teacher, labels, statistics, g * scale, options=options, needs=needs
        )
    return dhidden if needs.hidden else None, dweight, dbias, None, None, None


_token_losses_vjp.defvjp(_token_losses_forward_rule, _token_losses_backward_rule, symbolic_zeros=True)


def _reverse_only(run):
    """`run`, with a sentence against forward mode; jitted, since shard_map runs no bare custom_vjp outside of jit."""

    def with_sentence(hidden, weight, bias, teacher, labels, scale, options, choice):
        head = reverse_only((hidden, weight, bias), choice.op, f"Else {_TWICE}.")
        return run(*head, teacher, labels, scale, options, choice)

    return jax.jit(with_sentence, static_argnums=(6, 7), inline=True)


_token_losses = _reverse_only(_token_losses_vjp)


# --- fast: the summed loss, whose gradients are made in the forward ---------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _summed_loss_vjp(hidden, weight, bias, teacher, labels, scale, options, choice) -> jax.Array:
    return jnp.sum(_run(hidden, weight, bias, teacher, labels, scale, options, choice, _NOTHING)[0])


def _summed_loss_forward_rule(hidden, weight, bias, teacher, labels, scale, options, choice):
    needs = needs_of(hidden, weight, bias)
    hidden, weight, bias, teacher, labels, scale = values(hidden, weight, bias, teacher, labels, scale)
    losses, _, grads = _run(hidden, weight, bias, teacher, labels, scale, options, choice, needs)
    return jnp.sum(losses), present(grads)


def _summed_loss_backward_rule(options, choice, grads, cotangent):
    g = instantiated(cotangent)
    return *scaled(grads, g), None, None, None


_summed_loss_vjp.defvjp(_summed_loss_forward_rule, _summed_loss_backward_rule, symbolic_zeros=True)
_summed_loss = _reverse_only(_summed_loss_vjp)


def _run(hidden, weight, bias, teacher, labels, scale, options, choice, needs):
    """(losses times scale (N,), statistics, gradients of their sum)."""
    # XLA's loss is guarded, too: its scan over chunks cannot be partitioned.
    axes = meshes.axes_of(hidden, weight)
    student, teacher = meshes.opaque((Head(hidden, weight, bias), teacher), choice.op, _TWICE, axes)
    kernel = choice.kernel("by_tokens", options=options, needs=needs)
    losses, statistics, grads = kernel.run(student, teacher, labels, scale)
    return jnp.where(scale == 0, 0.0, scale * losses), statistics, grads


# --- checks -----------------------------------------------------------------------------------------------------------


def head_options(
    op: str, prefix: str, scale: float, softcap: float | None, layout: str, precision: Any, temperature: float = 1.0
) -> HeadOptions:
    """How one model's logits are made, checked; the messages' names begin with `prefix`."""
    loss_terms.check_logit_options(op, scale, softcap, prefix)
    loss_terms.check_temperature(op, temperature)
    softcap = None if softcap is None else float(softcap)
    return HeadOptions(LogitOptions(float(scale) / float(temperature), softcap), layout, precision)


def check_tokens(
    op: str, labels: Any, where: Any, hard_weight: float, shape: tuple[int, ...], vocab_size: int
) -> tuple[Any, Any]:
    """Labels and `where` as arrays of the tokens' shape, where they are given."""
    checks.check_number(op, hard_weight=hard_weight)
    if not 0.0 <= hard_weight <= 1.0:
        raise ValueError(f"{op}: hard_weight={hard_weight} must be in [0, 1]; 0.0 leaves the labels' loss out.")
    if hard_weight and labels is None:
        raise ValueError(f"{op}: hard_weight={hard_weight} weighs the cross-entropy of labels, and none are given.")
    labels_or_zeros, where = loss_terms.as_arrays(
        op, jnp.zeros(shape, jnp.int32) if labels is None else labels, where=where
    )
    loss_terms.check_tokens(op, labels_or_zeros, where, None, None, shape, vocab_size)
    return None if labels is None else labels_or_zeros, where


def check_vocabulary(
    op: str,
    labels: Any,
    where: Any,
    vocab_size: int,
    options: Options,
    ignore_index: int | None,
    shards: dict[str, Any],
    same: dict[str, Any],
) -> None:
    """Checks labels by their vocabulary, or where devices split it, which arrays are `shards` and which the `same`."""
    if options.vocab_axis is not None:
        _vocab_shards.check_axis(op, options.vocab_axis, shards, same | dict(labels=labels, where=where))
    elif options.hard_weight:
        loss_terms.check_label_range(op, labels, where, ignore_index, vocab_size)


def as_denominator(op: str, denominator: Any, reduction: str) -> jax.Array | None:
    """The denominator of a mean as a float32 constant; None passes."""
    if denominator is None:
        return None
    if reduction != "mean":
        raise ValueError(
            f"{op}: denominator is given with reduction={reduction!r}, which divides by nothing; pass reduction='mean'."
        )
    denominator = checks.as_real(op, "denominator", denominator)
    checks.check_shape(op, "denominator", denominator, (), "one number for all tokens")
    return jax.lax.stop_gradient(denominator.astype(jnp.float32))


# --- chunks -----------------------------------------------------------------------------------------------


def plan(
    student: Head, teacher: Head | TopK, options: Options, static: Static, implementation: str, place: Place
) -> Plan:
    """Mode and chunk of the loss on one device, by distillation_plan.py."""
    dtypes = [x.dtype for x in student if x is not None]
    reason = why_not_fast(static.reduction, options.vocab_axis is not None, *dtypes)
    heads = [head for head in (student, teacher) if isinstance(head, Head)]
    n, d = student.hidden.shape
    if is_symbolic(n):
        raise ValueError(
            f"{static.op}: hidden has the shape {student.hidden.shape}, and its kernels are planned for a number of "
            "tokens that is known. Export it for one batch."
        )
    sizes = Sizes(
        n,
        d,
        v=student.weight.shape[options.student.vocab_dim],
        itemsize=student.hidden.dtype.itemsize,
        weight_itemsize=student.weight.dtype.itemsize,
        num_heads=len(heads),
        head_copies_bytes=sum(
            head.weight.size * head.hidden.dtype.itemsize for head in heads if head.weight.dtype != head.hidden.dtype
        ),
    )
    problem = DistillationProblem(
        sizes,
        platform=place.platform,
        implementation=implementation.partition(":")[0],
        mode=possible_mode(static.op, static.mode, reason),
        chunk_size=static.chunk_size,
        hard_budget_bytes=static.memory_budget_bytes,
        soft_budget_bytes=soft_budget_bytes(place.memory_bytes),
        op=static.op,
    )
    return plan_distillation(problem)


def _entries_of_slice(planned: Plan, student: Head, teacher: Head | TopK, v: int) -> int:
    """Vocabulary entries in a slice of the lean backward, which takes as many bytes as a chunk of the forward.

    A slice has logits of all tokens, its rows of both heads, and those of the weight's gradient.
    """
    n, d = student.hidden.shape
    width = 2 * d + (teacher.hidden.shape[1] if isinstance(teacher, Head) else 0)
    bytes_of_logit = planned.slice_bytes // (planned.chunk_size * v)
    bytes_of_entry = bytes_of_logit * n + student.hidden.dtype.itemsize * width
    return max(128, planned.slice_bytes // bytes_of_entry // 128 * 128)


# --- the computation of one device, and of many -----------------------------------------------------------------------


def loss(student: Head, teacher: Head | TopK, labels: Any, where: Any, denominator: Any, options: Any, static: Static):
    """The loss of tokens of any shape, on one device or on a mesh of Explicit axes."""
    heads = [*student[:2], *(teacher[:2] if isinstance(teacher, Head) else ())]
    if options.vocab_axis is not None or not are_seen(*heads):
        return _local(student, teacher, labels, where, denominator, options, static, ())
    op = static.op
    shards = shards_of(op, student.hidden, student.weight, options.student.vocab_dim)
    specs = [(shards.hidden, shards.weight, shards.vocabulary), (shards.hidden, shards.hidden)]
    sent_of_teacher = P()
    if isinstance(teacher, Head):
        own = shards_of(op, student.hidden, teacher.weight, options.teacher.vocab_dim)
        if own.vocab_axis != shards.vocab_axis:
            raise ValueError(
                f"{op}: the student's vocabulary is split over the mesh axis {shards.vocab_axis}, and the teacher's "
                f"over {own.vocab_axis}. Move one of the heads by jax.sharding.reshard."
            )
        specs[1], sent_of_teacher = (own.hidden, own.weight, own.vocabulary), own.along_tokens
    own_options = dataclasses.replace(options, vocab_axis=shards.vocab_axis)

    def local(*arrays):
        student, rest = Head(*arrays[:3]), arrays[3:]
        own_teacher, (labels, where, denominator) = type(teacher)(*rest[: len(specs[1])]), rest[len(specs[1]) :]
        student = student._replace(weight=gathered(student.weight, shards.along_tokens))
        if isinstance(own_teacher, Head):
            own_teacher = own_teacher._replace(weight=gathered(own_teacher.weight, sent_of_teacher))
        return _local(student, own_teacher, labels, where, denominator, own_options, static, shards.token_axes)

    arrays = *student, *teacher, labels, where, denominator
    out = shards.tokens if static.reduction == "none" else P()
    return _explicit.on_shards(op, local, arrays, (*specs[0], *specs[1], shards.tokens, shards.tokens, P()), out)


def _local(student, teacher, labels, where, denominator, options, static, token_axes):
    op, tokens_shape = static.op, student.hidden.shape[:-1]
    flat = lambda x: x.reshape(-1, x.shape[-1])
    student = student._replace(hidden=flat(student.hidden))
    if isinstance(teacher, TopK):
        teacher = TopK(*map(flat, teacher))
    else:
        teacher = teacher._replace(hidden=flat(teacher.hidden))
    is_free = static.mode == "auto" and static.memory_budget_bytes is None
    place = place_of(*student, *teacher, memory_is_needed=is_free)
    choice = dataclasses.replace(KERNELS, op=op).choose(
        static.implementation, *student, *teacher, place=place, options=options
    )
    if place.mesh_refusal is not None:
        call = meshes.loss_call(op, meshes.axes_of(student.hidden, student.weight))
        raise ValueError(f"{op}: {place.mesh_refusal} {call}")
    n, shard_size = student.hidden.shape[0], student.weight.shape[options.student.vocab_dim]
    planned = plan(student, teacher, options, static, choice.name, place)
    entries = _entries_of_slice(planned, student, teacher, shard_size)
    options = dataclasses.replace(options, tokens=planned.chunk_size, entries=entries)

    first, vocab_size = 0, shard_size
    if options.vocab_axis is not None:
        first = jax.lax.axis_index(options.vocab_axis).astype(jnp.int32) * shard_size
        vocab_size = shard_size * jax.lax.axis_size(options.vocab_axis)
    counts = jnp.ones((n,), bool) if where is None else where.reshape(-1)
    is_right, own_labels = counts, jnp.zeros((n,), jnp.int32)
    if labels is not None:
        labels = labels.reshape(-1)
        counts = counts if static.ignore_index is None else counts & (labels != static.ignore_index)
        if options.hard_weight:
            is_right = (labels >= 0) & (labels < vocab_size)
            own_labels = (labels - first).astype(jnp.int32)
    if isinstance(teacher, TopK):
        is_right = is_right & _is_right(teacher, vocab_size) if labels is not None else _is_right(teacher, vocab_size)
        teacher = teacher._replace(token_ids=teacher.token_ids - first)
    scale = jnp.where(counts, jnp.where(is_right, 1.0, jnp.nan), 0.0)
    total = lambda x: jax.lax.psum(jnp.sum(x), token_axes) if token_axes else jnp.sum(x)
    divided = lambda x: x
    if static.reduction == "mean":
        if denominator is None:
            denominator = jnp.maximum(total(counts.astype(jnp.float32)), 1.0)
        else:
            denominator = loss_terms.denominator(denominator, jnp.any(counts))
        divided = lambda x: jnp.where(counts, x / denominator, 0.0)
    if planned.mode == "fast":
        scale = divided(scale)
    hidden, weight, bias, labels, scale, *of_teacher = meshes.align_varying(*student, own_labels, scale, *teacher)
    arrays = hidden, weight, bias, type(teacher)(*of_teacher), labels, scale
    if planned.mode == "fast":
        value = _summed_loss(*arrays, options, choice)
        return jax.lax.psum(value, token_axes) if token_axes else value
    losses = _token_losses(*arrays, options, choice)
    if options.vocab_axis is not None:
        losses = jax.lax.psum(losses, options.vocab_axis)
    return losses.reshape(tokens_shape) if static.reduction == "none" else total(divided(losses))


def _is_right(teacher: TopK, vocab_size: int) -> jax.Array:
    """(N,): whether the stored tokens differ and are in the vocabulary, and their probabilities can be a teacher's."""
    used = teacher.log_probs != -jnp.inf
    ids = jnp.sort(jnp.where(used, teacher.token_ids, -1), axis=1)
    differ = jnp.all((ids[:, 1:] != ids[:, :-1]) | (ids[:, 1:] == -1), axis=1)
    inside = (teacher.token_ids >= 0) & (teacher.token_ids < vocab_size)
    within_one = jnp.sum(jnp.exp(teacher.log_probs), axis=1) < 1.05  # bfloat16 rounds log-probabilities by 0.4 %
    return differ & jnp.all(inside | ~used, axis=1) & within_one
