"""The gated delta rule: a linear attention whose state forgets, and overwrites what a key had stored."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Integer

from liger_jax.ops import _explicit, checks, meshes
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.kernels import Choice, Implementation, Kernel, Kernels
from liger_jax.ops.layout import names, spec_of
from liger_jax.ops.place import Place, place_of
from liger_jax.ops.segment_ids import document_numbers, ids_of_rows, is_numbered
from liger_jax.pallas_kernels.devices import Capability
from liger_jax.pallas_kernels.gated_delta_rule import mosaic_tpu, triton, xla
from liger_jax.pallas_kernels.tiles import promoted

_OP = "gated_delta_rule"
_KERNELS = Kernels(_OP, {"xla": xla, "triton": triton, "mosaic_tpu": mosaic_tpu})
_HALF_KERNELS = dataclasses.replace(_KERNELS, defaults={"gpu": ("triton",), "tpu": ("mosaic_tpu",)})
_SMALLEST_GATE = -1e4  # its exp is 0, and differences of two sums are not NaN


def gated_delta_rule(
    q: Float[ArrayLike, "B T K D"],
    k: Float[ArrayLike, "B T K D"],
    v: Float[ArrayLike, "B T H E"],
    gate: Float[ArrayLike, "B T H"],
    beta: Float[ArrayLike, "B T H"],
    *,
    segment_ids: Integer[ArrayLike, "B T"] | None = None,
    state: Float[ArrayLike, "B H D E"] | None = None,
    scale: float | None = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "B T H E"], Float[Array, "B H D E"]]:
    """Reads and writes a state S (D, E) of each head, token by token.

        S ← exp(gate_t) · S
        S ← S + k_t (beta_t · (v_t − Sᵀ k_t))ᵀ
        o_t = scale · Sᵀ q_t

    It is computed in float32 or wider, in chunks of 64 tokens. The writes of a chunk are the solution of one triangular
    system (the WY representation). The arguments and, in XLA, the state before every 1,024th token are kept for the
    backward, which recomputes the rest. Time and memory are linear in T.

    Args:
        q: (B, T, K, D), any float dtype. Queries, which models normalise beforehand.
        k: (B, T, K, D), as `q`. The rule is stable for keys of norm 1 at most.
        v: (B, T, H, E), any float dtype; H is a multiple of K, and H/K consecutive heads share a head of `q` and `k`.
        gate: (B, T, H), any float dtype: the logarithm of a head's decay, at most 0; −inf erases the whole state. With
            a positive gate the state would grow.
        beta: (B, T, H), any float dtype: the fraction of the value stored for a key that is overwritten, from 0 to 1.
        segment_ids: (B, T) integers of packed rows, as in `causal_attention`: the state is 0 at the start of each
            document.
        state: (B, H, D, E), any float dtype: the state before the first token, from the same document; None for 0.
        scale: the output's factor, a Python number; None for D^−½.
        implementation: None, "xla", "triton" (NVIDIA GPUs from Ampere on) or "mosaic_tpu"; the latter two are the
            default of their devices for q, k and v in bfloat16. For these they round the operands of products to
            bfloat16. "triton" stores the state before every 64th token while it runs; its D and E are at most 256 in
            bfloat16 (128 where a GPU has little shared memory), and 64 in float32. "mosaic_tpu" stores that before
            every 128th token while the backward runs; its D and E are at most 256.

    Returns:
        The output (B, T, H, E) in v's dtype, and the state (B, H, D, E) after the last token, in float32, or in float64
        if an argument is float64. Padding at the end of a row counts as one more document with a separate state. To
        keep the state of the tokens instead, give the padding a gate and a beta of 0 and the id of their document. A
        NaN or infinite input makes its head's output NaN from that token to the end of the document, and the document's
        gradients NaN. Other documents are not affected.

    Raises:
        ValueError: `segment_ids` do not count documents, or a mesh splits T, D or E.

    Example:
        >>> one = jnp.ones((1, 3, 1, 1))
        >>> gate, beta = jnp.log(jnp.full((1, 3, 1), 0.5)), jnp.array([1.0, 0.0, 0.5]).reshape(1, 3, 1)
        >>> out, state = gated_delta_rule(one, one, one, gate, beta)
        >>> out.ravel().tolist(), state.item()
        ([1.0, 0.5, 0.625], 0.625)

    References:
        Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024 (arXiv:2412.06464).
        Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024
        (arXiv:2406.06484), section 3.
    """
    q, k, v, gate, beta, state = checks.floating(_OP, "state", q=q, k=k, v=v, gate=gate, beta=beta, state=state)
    _check_shapes(q, k, v, gate, beta, state)
    if scale is not None:
        checks.check_number(_OP, scale=scale)
        if not math.isfinite(scale):
            raise ValueError(f"{_OP}: scale={scale} must be finite; pass None for 1/√D.")
    arrays = q, k, v, gate, beta, ids_of_rows(_OP, segment_ids, v.shape[:2]), state
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    local = functools.partial(_on_one_device, scale=scale, implementation=implementation)
    if (spec := _explicit.spec_of_explicit(v)) is not None:
        batch, length, heads, width = spec
        if names((length, width)):
            raise ValueError(
                f"{_OP}: v is sharded as {spec}, but each device must have T and E whole. Move it by "
                "jax.sharding.reshard."
            )
        key_heads = spec_of(q)[2]
        if names((heads,)) != names((key_heads,)):
            raise ValueError(
                f"{_OP}: the heads of v are sharded as {heads!r} and those of q as {key_heads!r}, but must be "
                "split alike. Move them by jax.sharding.reshard."
            )
        of_heads = P(batch, None, heads)
        specs = *[P(batch, None, heads, None)] * 3, of_heads, of_heads, P(batch, None), P(batch, heads, None, None)
        out = P(batch, None, heads, None), P(batch, heads, None, None)
        return _explicit.on_shards(_OP, local, arrays, specs, out)
    return local(*meshes.align_varying(*arrays))


def _check_shapes(q, k, v, gate, beta, state) -> None:
    if q.ndim != 4 or v.ndim != 4 or q.shape[2] == 0 or v.shape[2] % q.shape[2] or q.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"{_OP}: q has shape {q.shape} and v {v.shape}, but they must be (B, T, K, D) and (B, T, H, E) with "
            "the same B and T, and H a multiple of K."
        )
    if 0 in v.shape[1:] or 0 in q.shape[1:]:
        raise ValueError(f"{_OP}: q has shape {q.shape} and v {v.shape}, but only B may be 0.")
    checks.check_shape(_OP, "k", k, q.shape, "the shape of q")
    checks.check_shape(_OP, "gate", gate, v.shape[:3], "it is (B, T, H), with v's B, T and H")
    checks.check_shape(_OP, "beta", beta, v.shape[:3], "it is (B, T, H), with v's B, T and H")
    whole = v.shape[0], v.shape[2], q.shape[3], v.shape[3]
    checks.check_shape(_OP, "state", state, whole, "it is (B, H, D, E), with v's B, H and E and q's D")


def _on_one_device(
    q, k, v, gate, beta, segment_ids, state, *, scale: float, implementation: Implementation
) -> tuple[jax.Array, jax.Array]:
    place = place_of(q, k, v, gate, beta, state)
    capability = place.capability
    choice = choose(q, k, v, gate, beta, state, place, implementation=implementation)
    (batch, length, heads, width), depth = v.shape, q.shape[3]
    wide = promoted(jnp.float32, *[x.dtype for x in (q, k, v, gate, beta, state) if x is not None])
    if batch == 0:
        return v, jnp.zeros((0, heads, depth, width), wide)
    has_state = state is not None
    if state is None:
        state = meshes.align_varying(jnp.zeros((batch, heads, depth, width), wide), v)[0]
    gate = jnp.where(gate == -jnp.inf, _SMALLEST_GATE, gate.astype(wide))  # which forgets
    if segment_ids is None:
        number, is_wrong = jnp.zeros((batch, length), jnp.int32), jnp.zeros(batch, bool)
    else:
        number, is_wrong = document_numbers(segment_ids), ~is_numbered(segment_ids)
    run = _runner(choice, scale, capability)
    results: Any = _guarded((q, k, v, gate, beta, state.astype(wide)), number, is_wrong, run, has_state)
    out, state = results
    return out.astype(v.dtype), state


def choose(
    q: Any, k: Any, v: Any, gate: Any, beta: Any, state: Any, place: Place, *, implementation: Implementation
) -> Choice:
    """The implementation that runs a case, from its arrays or their types."""
    kernels = _HALF_KERNELS if all(x.dtype == jnp.bfloat16 for x in (q, k, v)) else _KERNELS
    return kernels.choose(implementation, q, k, v, gate, beta, state, place=place, capability=place.capability)


def _runner(choice: Choice, scale: float, capability: Capability) -> Any:
    """A function of finite arguments and of the tokens' documents, or kernels that mark what they return."""
    if choice.name == "xla":
        return choice.kernel("chunked", scale=scale).run
    forward, backward = (
        choice.kernel(function, scale=scale, capability=capability) for function in ("forward", "backward")
    )
    if choice.module is triton:
        return _Marking(forward, backward)
    return functools.partial(_by_kernels, forward, backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_kernels(forward, backward, arrays, number):
    return forward.run(*forward.guarded(*arrays, number))


def _kernels_forward(forward, backward, arrays, number):
    return _by_kernels(forward, backward, arrays, number), (arrays, number)


def _kernels_backward(forward, backward, residuals, cotangents):
    arrays, number = residuals
    return backward.run(*backward.guarded(*arrays, number, *cotangents)), None


_by_kernels.defvjp(_kernels_forward, _kernels_backward)


@dataclasses.dataclass(frozen=True)
class _Marking:
    """Kernels that add marks, 0 or NaN, to what they return for tokens, and take 0 for what is not finite in the
    output's gradient: a pass of XLA over each of these arrays would cost a fiftieth of their time.
    """

    forward: Kernel
    backward: Kernel

    def results(self, finite, number, is_bad) -> tuple[jax.Array, jax.Array]:
        """The output and the last state, marked."""
        is_bad = _so_far(is_bad, number)
        out, state = self.forward.run(*self.forward.guarded(*finite, number, _mark(is_bad)))
        return out, _marked_state(state, is_bad[:, -1])

    def gradients(self, finite, number, is_bad, cotangents) -> tuple[jax.Array, ...]:
        """The gradients by the arrays, marked."""
        arrays = self.backward.guarded(*finite, number, _mark(is_bad), *cotangents)
        *gradients, dstate = self.backward.run(*arrays)
        return *gradients, _marked_state(dstate, is_bad[:, 0])


def _mark(is_bad: jax.Array) -> jax.Array:
    return jnp.where(is_bad, jnp.float32(jnp.nan), 0.0)


def _marked_state(state: jax.Array, is_bad: jax.Array) -> jax.Array:
    return jnp.where(is_bad[..., None, None], jnp.nan, state)


# --- NaN stays within its document -------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _guarded(arrays, number, is_wrong, run, has_state):
    """The output and the last state: computed with 0 for values that are not finite, and NaN from these values on."""
    is_bad, finite = _is_bad(arrays, number, is_wrong, has_state), jax.tree.map(_finite, arrays)
    if isinstance(run, _Marking):
        return run.results(finite, number, is_bad)
    return _marked(run(finite, number), is_bad, number)


def _guarded_forward(arrays, number, is_wrong, run, has_state):
    arrays, number, is_wrong = jax.tree.map(lambda primal: primal.value, (arrays, number, is_wrong))
    is_bad, finite = _is_bad(arrays, number, is_wrong, has_state), jax.tree.map(_finite, arrays)
    if isinstance(run, _Marking):
        return run.results(finite, number, is_bad), (finite, is_bad, number)
    results, vjp = jax.vjp(lambda finite: run(finite, number), finite)
    return _marked(results, is_bad, number), (vjp, is_bad, number)


def _guarded_backward(run, has_state, residuals, cotangents):
    saved, is_bad, number = residuals
    dout, dlast = cotangents
    if not isinstance(dout, SymbolicZero):
        is_bad |= ~jnp.all(jnp.isfinite(dout), axis=3)
    if not isinstance(dlast, SymbolicZero):
        is_bad |= _is_bad_state(dlast, number == number[:, -1:])
    is_bad = _anywhere(is_bad, number)
    dout, dlast = (jnp.zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x for x in cotangents)
    if isinstance(run, _Marking):
        return run.gradients(saved, number, is_bad, (dout, _finite(dlast))), None, None
    ((*gradients, dstate),) = saved((_finite(dout), _finite(dlast)))

    def marked(g):
        heads = jnp.any(is_bad.reshape(*is_bad.shape[:2], g.shape[2], -1), axis=3)
        return jnp.where(heads.reshape(*heads.shape, *[1] * (g.ndim - 3)), jnp.nan, g)

    return (*map(marked, gradients), _marked_state(dstate, is_bad[:, 0])), None, None


# Of constant zeros XLA would compute these checks while it compiles, which takes seconds.
_guarded.defvjp(_guarded_forward, _guarded_backward, symbolic_zeros=True)


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)


def _is_bad(arrays, number, is_wrong, has_state) -> jax.Array:
    """Where an argument is not finite, or a row has wrong ids; (B, T, H)."""
    *of_tokens, state = arrays
    is_bad = jnp.broadcast_to(is_wrong[:, None, None], (*number.shape, state.shape[1]))
    if has_state:
        is_bad |= _is_bad_state(state, number == 0)
    for x in of_tokens:
        rows = ~jnp.all(jnp.isfinite(x), axis=3) if x.ndim == 4 else ~jnp.isfinite(x)
        is_bad |= jnp.repeat(rows, state.shape[1] // rows.shape[2], axis=2)
    return is_bad


def _is_bad_state(state: jax.Array, is_its: jax.Array) -> jax.Array:
    """Where a token (B, T) is in the document of a state that is not finite; (B, T, H)."""
    return ~jnp.all(jnp.isfinite(state), axis=(2, 3))[:, None] & is_its[..., None]


def _so_far(is_bad: jax.Array, number: jax.Array) -> jax.Array:
    """Whether a token, or one before it in its document, is bad; (B, T, H). Documents' numbers ascend."""
    return jax.lax.cummax(jnp.where(is_bad, number[..., None], -1), axis=1) == number[..., None]


def _anywhere(is_bad: jax.Array, number: jax.Array) -> jax.Array:
    """Whether a token of its document is bad; (B, T, H)."""
    number_of_next = jax.lax.cummin(jnp.where(is_bad, number[..., None], is_bad.shape[1]), axis=1, reverse=True)
    return _so_far(is_bad, number) | (number_of_next == number[..., None])


def _marked(results, is_bad, number) -> tuple[jax.Array, jax.Array]:
    out, state = results
    is_bad = _so_far(is_bad, number)
    return jnp.where(is_bad[..., None], jnp.nan, out), _marked_state(state, is_bad[:, -1])
