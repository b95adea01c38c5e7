"""What the distillation losses share: how they are differentiated, how much is done at a time, and the mesh."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from liger_jax.ops import _checks, _explicit, _loss, _mesh
from liger_jax.ops._device import device_of, memory_of_device
from liger_jax.ops._kernels import Kernels
from liger_jax.ops._linear_statistics import as_shapes, from_shapes, instantiated, values
from liger_jax.pallas_kernels.cross_entropy.config import LogitOptions
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Needs
from liger_jax.pallas_kernels.fused_linear_distillation import chunks, mosaic_gpu, xla
from liger_jax.pallas_kernels.fused_linear_distillation.config import Head, HeadOptions, Options
from liger_jax.pallas_kernels.fused_linear_distillation.topk_formulas import TopK

MODES = ("auto", "fast", "lean")
LAYOUTS = ("vd", "dv")
_KERNELS = Kernels("distillation", {"xla": xla, "mosaic_gpu": mosaic_gpu}, {"gpu": ("mosaic_gpu",)})
_NOTHING = Needs(False, False, False)
_TWICE = "take the divergences of liger_jax.losses, on logits"
_LEAN_BYTES = 384 * 2**20  # of a chunk in mode "lean", at most: 512 tokens of 128,256 entries in bfloat16


@dataclasses.dataclass(frozen=True)
class Static:
    """What a call says beside its arrays, the options of the formulas apart."""

    op: str
    ignore_index: int | None
    reduction: str
    mode: str
    chunk_size: int | None
    memory_budget_bytes: int | None
    implementation: Any

    def __post_init__(self) -> None:
        _checks.check_choice(self.op, "reduction", self.reduction, _loss.REDUCTIONS)
        _checks.check_choice(self.op, "mode", self.mode, MODES)
        size = self.chunk_size
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ValueError(f"{self.op}: chunk_size={size!r} must be a Python int of at least 1; None chooses one.")


# --- lean: each token's loss, whose dX is made in the forward, and dW in the backward ---------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _token_losses_vjp(hidden, weight, bias, teacher, labels, scale, options, choice) -> jax.Array:
    return _run(hidden, weight, bias, teacher, labels, scale, options, choice, _NOTHING)[0]


def _token_losses_forward_rule(hidden, weight, bias, teacher, labels, scale, options, choice):
    needs = Needs(hidden.perturbed, weight.perturbed, bias is not None and bias.perturbed)
    hidden, weight, bias, teacher, labels, scale = values(hidden, weight, bias, teacher, labels, scale)
    losses, statistics, grads = _run(
        hidden, weight, bias, teacher, labels, scale, options, choice, needs._replace(weight=False, bias=False)
    )
    dhidden = jnp.zeros(()) if grads[0] is None else grads[0]
    return losses, (as_shapes(needs), hidden, weight, bias, teacher, labels, scale, statistics, dhidden)


def _token_losses_backward_rule(options, choice, residuals, cotangent):
    needs, hidden, weight, bias, teacher, labels, scale, statistics, dhidden = residuals
    needs, g = from_shapes(needs), instantiated(cotangent)
    if needs.hidden:
        dhidden = jnp.where(g[:, None] == 0, 0.0, g[:, None] * dhidden.astype(jnp.float32)).astype(hidden.dtype)
    dweight = dbias = None
    if needs.weight or needs.bias:
        _, dweight, dbias = chunks.by_vocabulary(
            Head(hidden, weight, bias), teacher, labels, statistics, g * scale, options=options, needs=needs
        )
    return dhidden if needs.hidden else None, dweight, dbias, None, None, None


_token_losses_vjp.defvjp(_token_losses_forward_rule, _token_losses_backward_rule, symbolic_zeros=True)
# Outside of jit, shard_map runs no custom_vjp with symbolic zeros, but it runs a jitted one.
_token_losses = jax.jit(_token_losses_vjp, static_argnums=(6, 7), inline=True)


# --- fast: the summed loss, whose gradients are made in the forward ---------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _summed_loss_vjp(hidden, weight, bias, teacher, labels, scale, options, choice) -> jax.Array:
    return jnp.sum(_run(hidden, weight, bias, teacher, labels, scale, options, choice, _NOTHING)[0])


def _summed_loss_forward_rule(hidden, weight, bias, teacher, labels, scale, options, choice):
    needs = Needs(hidden.perturbed, weight.perturbed, bias is not None and bias.perturbed)
    hidden, weight, bias, teacher, labels, scale = values(hidden, weight, bias, teacher, labels, scale)
    losses, _, grads = _run(hidden, weight, bias, teacher, labels, scale, options, choice, needs)
    return jnp.sum(losses), tuple(jnp.zeros(()) if grad is None else grad for grad in grads)


def _summed_loss_backward_rule(options, choice, grads, cotangent):
    g = instantiated(cotangent)
    scaled = [(g * grad.astype(jnp.float32)).astype(grad.dtype) if grad.ndim else None for grad in grads]
    return *scaled, None, None, None


_summed_loss_vjp.defvjp(_summed_loss_forward_rule, _summed_loss_backward_rule, symbolic_zeros=True)
_summed_loss = jax.jit(_summed_loss_vjp, static_argnums=(6, 7), inline=True)


def _run(hidden, weight, bias, teacher, labels, scale, options, choice, needs):
    """(losses times scale (N,), statistics, gradients of their sum)."""
    # XLA cannot partition its scan over chunks any more than a kernel.
    student, teacher = _mesh.opaque((Head(hidden, weight, bias), teacher), choice.op, _TWICE)
    kernel = choice.kernel("by_tokens", options=options, needs=needs)
    losses, statistics, grads = kernel.run(student, teacher, labels, scale)
    return jnp.where(scale == 0, 0.0, scale * losses), statistics, grads


# --- checks -----------------------------------------------------------------------------------------------------------


def head_options(
    op: str, prefix: str, scale: float, softcap: float | None, layout: str, temperature: float = 1.0
) -> HeadOptions:
    """How one model's logits are made, checked; the messages' names begin with `prefix`."""
    _loss.check_logit_options(op, scale, softcap, prefix)
    _checks.check_choice(op, f"{prefix}weight_layout", layout, LAYOUTS)
    _checks.check_number(op, temperature=temperature)
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"{op}: temperature={temperature} must be finite and > 0; 1.0 leaves the logits as they are.")
    softcap = None if softcap is None else float(softcap)
    return HeadOptions(LogitOptions(float(scale) / float(temperature), softcap), layout)


def check_head(op: str, prefix: str, head: Head, layout: str) -> int:
    """Raises a ValueError unless hidden states, weight and bias fit; returns the size of the vocabulary."""
    width = head.hidden.shape[-1:]
    if not width or head.weight.ndim != 2 or head.weight.shape[layout.index("d")] != width[0]:
        raise ValueError(
            f"{op}: {prefix}weight has shape {head.weight.shape}, but with {prefix}weight_layout={layout!r} and "
            f"{prefix}hidden of shape {head.hidden.shape} it must be {'(V, D)' if layout == 'vd' else '(D, V)'}, "
            "where D is the last axis of the hidden states."
        )
    vocab_size = head.weight.shape[layout.index("v")]
    _checks.check_shape(op, f"{prefix}bias", head.bias, (vocab_size,), "one entry for each row of the vocabulary")
    return vocab_size


def check_tokens(
    op: str, labels: Any, where: Any, hard_weight: float, shape: tuple[int, ...], vocab_size: int
) -> tuple[Any, Any]:
    """Labels and `where` as arrays of the tokens' shape, where they are given."""
    _checks.check_number(op, hard_weight=hard_weight)
    if not 0.0 <= hard_weight <= 1.0:
        raise ValueError(f"{op}: hard_weight={hard_weight} must be in [0, 1]; 0.0 leaves the labels' loss out.")
    if hard_weight and labels is None:
        raise ValueError(f"{op}: hard_weight={hard_weight} weighs the cross-entropy of labels, and none are given.")
    found, where = _loss.as_arrays(jnp.zeros(shape, jnp.int32) if labels is None else labels, where)
    _loss.check_tokens(op, found, where, None, None, shape, vocab_size)
    return None if labels is None else found, where


def as_denominator(op: str, denominator: Any, reduction: str) -> jax.Array | None:
    """The denominator of a mean as a float32 constant; None passes."""
    if denominator is None:
        return None
    if reduction != "mean":
        raise ValueError(
            f"{op}: denominator is given with reduction={reduction!r}, which divides by nothing; pass reduction='mean'."
        )
    return jax.lax.stop_gradient(jnp.asarray(denominator, jnp.float32))


# --- how much at a time -----------------------------------------------------------------------------------------------


def why_not_fast(student: Head, options: Options, reduction: str) -> str | None:
    """The reason why gradients cannot be made in the forward, or None."""
    if reduction == "none":
        return "the cotangent of each token's loss is unknown in the forward; use mode='lean' or reduction='sum'"
    if options.vocab_axis is not None:
        return "the vocabulary is split over a mesh axis; use mode='lean'"
    if jnp.float16 in (student.hidden.dtype, student.weight.dtype):
        return "float16 rounds gradients to 0 before a loss scale can reach them; use mode='lean' or bfloat16"
    return None


def plan(student: Head, teacher: Head | TopK, options: Options, static: Static) -> tuple[bool, int, int]:
    """(whether the mode is fast, tokens in a chunk, vocabulary entries in a slice)."""
    n, d = student.hidden.shape
    v, itemsize = student.weight.shape[options.student.vocab_dim], student.hidden.dtype.itemsize
    reason = why_not_fast(student, options, static.reduction)
    if static.mode == "fast" and reason is not None:
        raise ValueError(f"{static.op}: mode='fast' makes gradients in the forward, and here {reason}.")
    heads = [head for head in (student, teacher) if isinstance(head, Head)]
    # At most: raw logits and the gradient in hidden's dtype; stored teachers scatter into float32.
    entry = itemsize * (len(heads) + 1) + (4 if isinstance(teacher, TopK) else 0)
    copies = sum(h.weight.size * h.hidden.dtype.itemsize for h in heads if h.weight.dtype != h.hidden.dtype)
    fixed = {
        "fast": copies + (4 * v * d if student.weight.dtype.itemsize < 4 else 0),
        "lean": copies + itemsize * n * d,
    }
    bytes_of = lambda mode, tokens: fixed[mode] + tokens * v * entry
    on_cpu = device_of(student.hidden, student.weight).platform == "cpu"
    # dW's sum is read and written once a chunk, for which 2,048 tokens are enough work.
    preferred = {"fast": 128 if on_cpu else 2048, "lean": max(64, _LEAN_BYTES // (v * entry) // 128 * 128)}

    mode, budget = static.mode, static.memory_budget_bytes
    if mode == "auto":
        memory = memory_of_device(student.hidden, student.weight)
        bound = budget if budget is not None or memory is None else memory // 8
        least = min(n, static.chunk_size or 128)
        fits = bound is None or bytes_of("fast", least) <= bound
        mode = "fast" if reason is None and fits else "lean"
    tokens = min(n, static.chunk_size or preferred[mode])
    if budget is not None:
        while static.chunk_size is None and tokens > 64 and bytes_of(mode, tokens) > budget:
            tokens = max(64, tokens // 2)
        if bytes_of(mode, tokens) > budget:
            raise ValueError(
                f"{static.op}: memory_budget_bytes={budget} is too small: mode={mode!r} needs {bytes_of(mode, tokens)} "
                f"bytes beside inputs and gradients with chunk_size={tokens}. Raise the budget, or split the tokens "
                "over several calls."
            )
    return mode == "fast", max(1, tokens), max(128, tokens * v // max(1, n) // 128 * 128)


# --- the computation of one device, and of many -----------------------------------------------------------------------


def loss(student: Head, teacher: Head | TopK, labels: Any, where: Any, denominator: Any, options: Any, static: Static):
    """The loss of tokens of any shape, on one device or on a mesh of Explicit axes."""
    if options.vocab_axis is not None or not _explicit.is_explicit(student.hidden):
        return _local(student, teacher, labels, where, denominator, options, static, ())
    op = static.op
    tokens, token_axes = _explicit.token_spec(op, student.hidden)
    of_weight, vocab_axis = _explicit.head_spec(op, student.weight, options.student.vocab_dim, token_axes)
    by_token = P(*tokens, None)
    specs = [(by_token, of_weight, P(vocab_axis)), (by_token, by_token)]
    if isinstance(teacher, Head):
        of_teacher, teacher_axis = _explicit.head_spec(op, teacher.weight, options.teacher.vocab_dim, token_axes)
        specs[1] = (by_token, of_teacher, P(vocab_axis))
        if teacher_axis != vocab_axis:
            raise ValueError(
                f"{op}: the student's vocabulary is split over the mesh axis {vocab_axis}, and the teacher's over "
                f"{teacher_axis}. Move one of the heads by jax.sharding.reshard."
            )
    own_options = dataclasses.replace(options, vocab_axis=vocab_axis)

    def gathered(head, spec):
        if isinstance(head, TopK):
            return head
        return head._replace(weight=_explicit.gathered(head.weight, spec[1], token_axes))

    def local(*arrays):
        student, rest = Head(*arrays[:3]), arrays[3:]
        size = len(specs[1])
        own_teacher = type(teacher)(*rest[:size])
        student, own_teacher = gathered(student, specs[0]), gathered(own_teacher, specs[1])
        labels, where, denominator = rest[size:]
        return _local(student, own_teacher, labels, where, denominator, own_options, static, token_axes)

    arrays = *student, *teacher, labels, where, denominator
    out = tokens if static.reduction == "none" else P()
    return _explicit.on_parts(op, local, arrays, (*specs[0], *specs[1], tokens, tokens, P()), out)


def _local(student, teacher, labels, where, denominator, options, static, token_axes):
    op, tokens_shape = static.op, student.hidden.shape[:-1]
    flat = lambda x: x.reshape(-1, x.shape[-1])
    student = student._replace(hidden=flat(student.hidden))
    if isinstance(teacher, TopK):
        teacher = TopK(*map(flat, teacher))
    else:
        teacher = teacher._replace(hidden=flat(teacher.hidden))
    choice = dataclasses.replace(_KERNELS, op=op).choose(static.implementation, *student, *teacher, options=options)
    if (reason := _mesh.needs_shard_map(*student, *teacher)) is not None:
        raise ValueError(f"{op}: {reason}")
    is_fast, tokens, entries = plan(student, teacher, options, static)
    options = dataclasses.replace(options, tokens=tokens, entries=entries)

    n, shard_size = student.hidden.shape[0], student.weight.shape[options.student.vocab_dim]
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
    if static.reduction == "mean":
        if denominator is None:
            denominator = jnp.maximum(total(counts.astype(jnp.float32)), 1.0)
        scale = scale / denominator
    hidden, weight, bias, labels, scale, *of_teacher = _mesh.align_varying(*student, own_labels, scale, *teacher)
    arrays = hidden, weight, bias, type(teacher)(*of_teacher), labels, scale
    if is_fast:
        value = _summed_loss(*arrays, options, choice)
        return jax.lax.psum(value, token_axes) if token_axes else value
    losses = _token_losses(*arrays, options, choice)
    if options.vocab_axis is not None:
        losses = jax.lax.psum(losses, options.vocab_axis)
    return losses.reshape(tokens_shape) if static.reduction == "none" else total(losses)


def _is_right(teacher: TopK, vocab_size: int) -> jax.Array:
    """(N,): whether the stored tokens differ and lie in the vocabulary."""
    used = teacher.log_probs > -jnp.inf
    ids = jnp.sort(jnp.where(used, teacher.token_ids, -1), axis=1)
    differ = jnp.all((ids[:, 1:] != ids[:, :-1]) | (ids[:, 1:] == -1), axis=1)
    inside = (teacher.token_ids >= 0) & (teacher.token_ids < vocab_size)
    return differ & jnp.all(inside | ~used, axis=1)
