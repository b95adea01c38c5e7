"""Losses that are separable by token, of a linear layer's log-probabilities, without ever holding the logits."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Integer

from liger_jax._tree import tree_dataclass
from liger_jax.ops import _explicit, _vocab_shards, checks, loss_terms, meshes
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.eager import made_once
from liger_jax.ops.kernels import Implementation
from liger_jax.ops.layout import are_seen
from liger_jax.ops.linear._shards import shards_of
from liger_jax.ops.linear._statistics import problem_on_device, statistics_of_tokens
from liger_jax.ops.linear._sum import RowLoss, linear_sum
from liger_jax.ops.linear.plan import choose_mode
from liger_jax.ops.linear.split_head import SplitHead, taken_apart, whole_weight
from liger_jax.pallas_kernels.cross_entropy import formulas
from liger_jax.pallas_kernels.cross_entropy.formulas import Cotangents, Statistics
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import LinearOptions

OP = "fused_linear_token_loss"


@tree_dataclass
class TokenLosses:
    """The terms of a token loss, without gradient; `...` is the labels' shape. A token that does not count has 0.

    Attributes:
        losses: (...) float32, what `loss_fn` returned.
        log_probs: (...) float32, the log-probability of the label.
        entropy: (...) float32, the entropy in nats; None without `entropy=True`.
    """

    losses: jax.Array
    log_probs: jax.Array
    entropy: jax.Array | None


def fused_linear_token_loss(
    loss_fn: Callable[..., Any],
    hidden: Float[ArrayLike, "*tokens D"],
    weight: Float[ArrayLike, "_ _"] | SplitHead,
    labels: Integer[ArrayLike, "*tokens"],
    per_token: tuple[Any, ...] = (),
    *,
    denominator: Any,
    entropy: bool = False,
    bias: Float[ArrayLike, " V"] | None = None,
    weight_layout: str = "vd",
    where: Bool[ArrayLike, "*tokens"] | None = None,
    ignore_index: int | None = -100,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    vocab_axis: str | None = None,
    mode: str = "auto",
    chunk_size: int | None = None,
    memory_budget_bytes: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, TokenLosses]:
    """Sums any loss of a token's log-probability over the tokens, with no logits in memory.

    With ℓ = log p_y and H = −Σ_v p_v·log p_v, as in `fused_linear_log_probs`, the loss is

        Σ loss_fn(ℓ, *per_token) / denominator          or, with entropy=True,
        Σ loss_fn(ℓ, H, *per_token) / denominator

    over the tokens that count. `loss_fn` may be any differentiable JAX function of one token's numbers, and may close
    over traced values. It is traced for scalars, and mapped over tokens. All arrays that it reads get gradients:
    `per_token`, arrays that it closes over, and `denominator`.

    The modes are those of `fused_linear_cross_entropy`. "fast" computes a chunk's logits, ℓ, the derivative of
    `loss_fn` and the gradients together: 3 products of 2·N·D·V operations. "lean" computes the logits twice: 4
    products. Hopper's kernels do not compute entropies in mode "fast", so "auto" is "lean" there with `entropy=True`.
    Arguments that are not listed here are also those of `fused_linear_cross_entropy`; `vocab_axis` needs mode "lean".

    Args:
        loss_fn: takes scalars: ℓ, H if `entropy=True`, both float32, and one number of each of `per_token`; returns a
            scalar.
        labels: (...), integers in [0, V), or `ignore_index`. Any other label makes the loss and its token's gradients
            NaN under jit.
        per_token: a tuple of arrays that broadcast to (...), such as old log-probabilities, advantages and weights.
            Values at tokens that do not count have no effect, and gradient 0.
        denominator: a number or a () array, already summed over all devices and micro-batches.
        entropy: whether `loss_fn` takes the entropy.
        temperature: the logits are divided by it, a finite Python number > 0.

    Returns:
        (loss, `TokenLosses`): a () float32, and its terms for each token, for `has_aux=True`.

    Raises:
        ValueError: as from `fused_linear_cross_entropy`, or `loss_fn` does not return one float for one token.

    Example:
        >>> hidden, weight, labels = jnp.eye(2, 4), jnp.ones((8, 4)), jnp.array([3, 5])
        >>> weighted = lambda log_prob, advantage: -advantage * log_prob
        >>> loss, tokens = fused_linear_token_loss(
        ...     weighted, hidden, weight, labels, (jnp.array([1.0, 0.5]),), denominator=2
        ... )
        >>> print(loss.round(4), tokens.losses.round(4))
        1.5596 [2.0794 1.0397]

    References:
        Hsu et al., "Liger Kernel", 2024 (arXiv:2410.10989), for gradients in the forward; Wijmans et al., "Cut Your
        Losses in Large-Vocabulary Language Models", 2024 (arXiv:2411.09009), for the lean mode.
    """
    weight, split = taken_apart(weight)
    hidden, weight, bias, vocab_size = checks.linear_head(OP, hidden, weight, bias, weight_layout, split=split)
    checks.check_mode(OP, mode, chunk_size, memory_budget_bytes)
    checks.check_flag(OP, entropy=entropy)
    if not callable(loss_fn):
        raise TypeError(f"{OP}: loss_fn is a {type(loss_fn).__name__}, but must be a function of one token.")
    loss_terms.check_temperature(OP, temperature)
    loss_terms.check_logit_options(OP, logit_scale, logit_softcap)
    scale = logit_scale / temperature
    loss_options = loss_terms.LossOptions(OP, ignore_index, 0.0, 0.0, scale, logit_softcap, reduction="sum")
    labels, where = loss_terms.as_arrays(OP, labels, where=where)
    loss_terms.check_tokens(OP, labels, where, None, None, hidden.shape[:-1], vocab_size)
    per_token = tuple(broadcast_to_tokens(OP, as_tuple(OP, per_token), labels.shape))
    if vocab_axis is not None:
        same = dict(hidden=hidden, labels=labels, where=where)
        same |= {f"per_token[{i}]": x for i, x in enumerate(per_token)}
        _vocab_shards.check_axis(OP, vocab_axis, dict(weight=weight, bias=bias), same)
    # One device's results do not vary over the shards of the vocabulary.
    varying = meshes.varying_axes(hidden, weight, bias, labels, where, *per_token) - {vocab_axis}
    function, closed_over = hoisted(OP, loss_fn, 1 + entropy, per_token, varying)
    constants = _as_denominator(denominator), *closed_over
    if vocab_axis is not None:
        same = {f"value {i} that loss_fn closes over": x for i, x in enumerate(closed_over)}
        same |= {"denominator": constants[0]}
        _vocab_shards.check_axis(OP, vocab_axis, {}, same)
    token_loss = _token_loss(function, entropy)

    logit_options = dataclasses.replace(loss_options.logit_options(metrics=False), entropy=entropy)
    static = dict(
        options=loss_options,
        linear=LinearOptions(logit_options, weight_layout, checks.current_precision(OP, precision), mode, 0),
        token_loss=token_loss,
        chunk_size=chunk_size,
        memory_budget_bytes=memory_budget_bytes,
        implementation=implementation,
    )
    arrays = hidden, weight, labels, bias, where, per_token, constants
    if vocab_axis is not None or split is not None:
        return _local(*arrays, vocab_axis=vocab_axis, split=split, **static)
    loss_terms.check_label_range(OP, labels, where, ignore_index, vocab_size)
    return (_on_shards if are_seen(hidden, weight) else _local)(*arrays, **static)


# --- the function of one token ----------------------------------------------------------------------------------------


def as_tuple(op: str, per_token: Any) -> tuple[jax.Array, ...]:
    """The arrays that a loss reads beside the log-probability."""
    if not isinstance(per_token, tuple):
        raise TypeError(f"{op}: per_token is a {type(per_token).__name__}, but must be a tuple of arrays: (x,).")
    as_float32 = lambda x: jnp.asarray(x, jnp.float32) if isinstance(x, float) else x
    return tuple(checks.as_array(op, f"per_token[{i}]", as_float32(x)) for i, x in enumerate(per_token))


def broadcast_to_tokens(op: str, arrays: tuple[jax.Array, ...], shape: tuple[int, ...]) -> list[jax.Array]:
    """The arrays in the tokens' shape."""
    for i, x in enumerate(arrays):
        fits = x.ndim <= len(shape) and all(a in (1, b) for a, b in zip(x.shape[::-1], shape[::-1], strict=False))
        if not fits:
            raise ValueError(
                f"{op}: per_token[{i}] has shape {x.shape}, but must broadcast to the labels' shape {shape}; one "
                "number for each sequence is x[:, None]."
            )
    # By a reshape first, because rank promotion may be an error.
    return [jnp.broadcast_to(x.reshape((1,) * (len(shape) - x.ndim) + x.shape), shape) for x in arrays]


def hoisted(
    op: str,
    loss_fn: Callable[..., Any],
    num_numbers: int,
    per_token: tuple[jax.Array, ...],
    varying: frozenset[Any] = frozenset(),
) -> tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]:
    """`loss_fn` as a function of one token's scalars and of the values that it closes over, and these values.

    `jax.closure_convert` would leave integers where they are.
    """
    dtypes = [jnp.float32] * num_numbers + [x.dtype for x in per_token]
    traced = _traced(loss_fn, dtypes, varying)
    of_closed_over = meshes.varying_axes(*traced.consts)
    if not of_closed_over <= varying:  # then every token's numbers vary as these values do
        traced = _traced(loss_fn, dtypes, varying | of_closed_over)
    types = [(x.shape, str(x.dtype)) for x in traced.out_avals]
    if len(types) != 1 or types[0][0] != () or not jnp.issubdtype(traced.out_avals[0].dtype, jnp.floating):
        raise ValueError(
            f"{op}: loss_fn returns {types} for the numbers of one token, but must return one float of shape (). Pass "
            "arrays that have a number for each token as per_token."
        )
    # The function must not hold `traced`: its constants may be tracers or large arrays, and JAX may keep the function.
    return _evaluated(traced.jaxpr, len(dtypes)), tuple(jnp.asarray(x) for x in traced.consts)


@made_once
def _evaluated(jaxpr: Any, num_arguments: int) -> Callable[..., jax.Array]:
    """A jaxpr as a function of its arguments and constants. JAX traces the same function to the same jaxpr."""

    def function(*arguments):
        own, closed_over = arguments[:num_arguments], arguments[num_arguments:]
        # A loss that is a constant is a Python number here.
        return jnp.asarray(eval_jaxpr(jaxpr, closed_over, *own)[0], jnp.float32)

    return function


def _traced(loss_fn: Callable[..., Any], dtypes: list[Any], varying: frozenset[Any]) -> Any:
    """The jaxpr of `loss_fn`, for scalars of these dtypes that vary over these manual mesh axes."""
    here = jax.sharding.get_abstract_mesh()
    # The constants that `loss_fn` makes are cast to vary as its arguments do, for which JAX must know the mesh. An op
    # on Explicit axes runs it on a device's shard of the mesh, and so it must be on no mesh there.
    is_shard = bool(here.manual_axes) and not here.explicit_axes
    with jax.sharding.use_abstract_mesh(here if is_shard else jax.sharding.AbstractMesh((), ())):
        scalars = [jax.ShapeDtypeStruct((), dtype) for dtype in dtypes]
        if varying:  # inside shard_map, where the types of scalars say so
            scalars = [meshes.cast(jnp.zeros((), dtype), varying) for dtype in dtypes]
        return jax.make_jaxpr(loss_fn)(*scalars)


class _TokenLoss:
    """The losses of rows, from terms (factor, per_token) and constants (denominator, *closed over).

    A row's factor is 1, or NaN where its label is out of range, or 0 where it does not count.
    """

    def __init__(self, function: Callable[..., jax.Array], entropy: bool) -> None:
        self.function, self.entropy = function, entropy
        self.row_loss = RowLoss(self._losses, self._cotangents, is_shared=False)

    def numbers(self, statistics: Statistics) -> tuple[Any, ...]:
        """The function's first arguments: log-probabilities, and entropies if it takes them."""
        log_probs = statistics.target_logit - statistics.log_normalizer
        return (log_probs, statistics.entropy) if self.entropy else (log_probs,)

    def unscaled(self, numbers: tuple[jax.Array, ...], terms: Any, constants: Any) -> jax.Array:
        """The tokens' losses (N,) before the division."""
        factor, per_token = terms
        if not factor.size:
            return factor
        counts, first = factor != 0, jnp.argmax(factor != 0)

        def where_it_counts(x):
            # Other tokens may hold what the function has no finite derivative at, and 0 · inf is NaN. They take the
            # place of one that counts, or 1 if none does.
            own = jax.lax.stop_gradient(x[first])
            return jnp.where(counts, x, jnp.where(counts[first], own, jnp.ones((), x.dtype)))

        tokens = [where_it_counts(x) for x in (*numbers, *per_token)]
        closed_over = constants[1:]
        axes = (0,) * len(tokens) + (None,) * len(closed_over)
        losses = jax.vmap(self.function, in_axes=axes, axis_size=factor.size)(*tokens, *closed_over)
        return jnp.where(counts, factor * losses, 0.0)

    def _losses(self, statistics: Statistics, terms: Any, constants: Any) -> jax.Array:
        return self.unscaled(self.numbers(statistics), terms, constants) / constants[0]

    def _cotangents(self, statistics: Statistics, terms: Any, constants: Any) -> Cotangents:
        total = lambda numbers: jnp.sum(self.unscaled(numbers, terms, constants) / constants[0])
        g, *of_entropy = jax.grad(total)(self.numbers(statistics))
        cotangents = Cotangents(log_normalizer=-g, target_logit=g, logit_sum=None)
        if self.entropy:
            assert statistics.entropy is not None  # the kernel was asked for it
            cotangents = formulas.with_entropy(cotangents, statistics.entropy, of_entropy[0])
        return cotangents


_token_loss = made_once(_TokenLoss)


def _as_denominator(denominator: Any) -> jax.Array:
    denominator = checks.as_real(OP, "denominator", denominator)
    checks.check_shape(OP, "denominator", denominator, (), "one number for all tokens")
    return denominator.astype(jnp.float32)


# --- the computation of one device, and of many -----------------------------------------------------------------------


def _on_shards(hidden, weight, labels, bias, where, per_token, constants, *, options, **static):
    """The loss of tokens on an Explicit mesh: each device computes its own tokens' loss."""
    shards = shards_of(OP, hidden, weight, static["linear"].vocab_dim)
    own = dataclasses.replace(options, token_axes=shards.token_axes)

    def local(hidden, weight, labels, bias, where, *rest):
        per_token_here, constants_here = rest[: len(per_token)], rest[len(per_token) :]
        return _local(
            hidden, weight, labels, bias, where, per_token_here, constants_here,
            options=own, vocab_axis=shards.vocab_axis, split=shards.split, **static,
        )  # fmt: skip

    specs = shards.hidden, shards.weight, shards.tokens, shards.vocabulary, shards.tokens
    specs = *specs, *(shards.tokens for _ in per_token), *(P() for _ in constants)
    arrays = hidden, weight, labels, bias, where, *per_token, *constants
    return _explicit.on_shards(OP, local, arrays, specs, (P(), shards.tokens))


def _local(
    hidden, weight, labels, bias, where, per_token, constants, *,
    options, linear, token_loss, vocab_axis=None, split=None, **limits: Any,
):  # fmt: skip
    shape = labels.shape
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    where = None if where is None else where.reshape(-1)
    problem = problem_on_device(
        OP, hidden, weight, labels, bias,
        options=linear, reduction=options.reduction, vocab_axis=vocab_axis, split=split, **limits,
    )  # fmt: skip
    terms, kernel_labels = _vocab_shards.token_terms(labels, where, None, None, options, problem.v, vocab_axis)
    factor, per_token = terms.coefficients.target, [x.reshape(-1) for x in per_token]
    constants = loss_terms.denominator(constants[0], jnp.any(terms.counts)), *constants[1:]
    if choose_mode(problem) == "fast":
        weight = whole_weight(weight, split, hidden)
        arrays = hidden, weight, bias, kernel_labels, factor, *per_token
        h, w, b, y, factor, *per_token = meshes.align_varying(*arrays, *constants)[: len(arrays)]
        of_rows = factor, tuple(per_token)
        loss, statistics = linear_sum(
            h, w, b, of_rows, None, constants, y, problem=problem, options=linear, row_loss=token_loss.row_loss
        )
    else:
        arrays, static = (hidden, weight, bias, None, kernel_labels), dict(options=linear, vocab_axis=vocab_axis)
        statistics = statistics_of_tokens(*arrays, counts=terms.counts, problem=problem, **static)
        fields = [*statistics, factor, *per_token]
        fields = meshes.align_varying(*fields, *constants)[: len(fields)]
        statistics, (factor, *per_token) = Statistics(*fields[: len(statistics)]), fields[len(statistics) :]
        of_rows = factor, tuple(per_token)
        loss = jnp.sum(token_loss.row_loss.losses(statistics, of_rows, constants))
    loss = jax.lax.psum(loss, options.token_axes) if options.token_axes else loss

    numbers, of_rows, constants = jax.lax.stop_gradient((token_loss.numbers(statistics), of_rows, constants))
    losses = token_loss.unscaled(numbers, of_rows, constants)
    log_probs, *entropies = (jnp.where(terms.counts, x, 0.0).reshape(shape) for x in numbers)
    log_probs = terms.coefficients.target.reshape(shape) * log_probs
    entropies = entropies[0] if entropies else None
    return loss, TokenLosses(losses=losses.reshape(shape), log_probs=log_probs, entropy=entropies)
