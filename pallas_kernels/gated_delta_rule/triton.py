"""The gated delta rule in Pallas-Triton (NVIDIA, Ampere and newer).

Forward, three launches. "prepare" makes the inverse of each chunk's system, "scan_states", the only one that is
sequential, has a program for 32 columns of a head's state, and "output" one for each chunk of a head of keys. Backward:
"prepare" and "scan_states" again, so that nothing but the arguments is kept for it, "local_gradients",
"scan_gradients" from the last chunk to the first, and "pair_gradients" and "key_gradients", for each chunk of a head of
keys, which add up the heads of values that share it.
Rounding: of arguments in bfloat16, operands of products are rounded to bfloat16, and so are the states and what the
launches hand on, and those of the triangular inverse to float16. Sums, decays and the state that the scan carries are
float32. Of other arguments everything is float32, and products are TF32's in three.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _triton as pltriton
from liger_jax.pallas_kernels.devices import Capability
from liger_jax.pallas_kernels.gated_delta_rule import config, triton_kernels
from liger_jax.pallas_kernels.gated_delta_rule.config import CHUNK
from liger_jax.pallas_kernels.gated_delta_rule.config import unsupported as unsupported
from liger_jax.pallas_kernels.gated_delta_rule.triton_kernels import Arithmetic
from liger_jax.pallas_kernels.tiles import cdiv, out_like

_ERASES = -128.0  # exp of a gate of so much is 0 in float32


class _Problem:
    """Padded arrays, and how a kernel is launched on them."""

    def __init__(self, arrays, document, mark, scale: float, capability: Capability, interpret: bool):
        q, k, v, gate, beta, state = arrays
        batch, self.length, heads, self.width = v.shape
        self.key_heads, self.depth = q.shape[2:]
        self.chunks = cdiv(self.length, CHUNK)
        self.interpret, self.scale, self.capability = interpret, scale, capability
        self.batch, self.heads = batch, heads
        is_half = all(x.dtype == jnp.bfloat16 for x in (q, k, v))
        self.dtype: Any = jnp.bfloat16 if is_half else jnp.float32
        self.q, self.k, self.v = self.of_tokens(q), self.of_tokens(k), self.of_tokens(v)
        self.state = self.of_state(state)
        self.begins = jnp.diff(document, axis=1, prepend=0) != 0  # a document other than the state's
        gate = jnp.where(self.begins[..., None], _ERASES, jnp.maximum(gate.astype(jnp.float32), _ERASES))
        # Padding has a gate and beta of 0: the state stays.
        self.gate, self.beta = (self.of_heads(x.astype(jnp.float32)) for x in (gate, beta))
        self.mark = self.padded(mark)  # XLA would fuse a transposition with passes over v, which are then slow

    def padded(self, x):
        """Whole chunks of an array (B, T, …)."""
        missing = self.chunks * CHUNK - self.length
        return jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2))) if missing else x

    def of_tokens(self, x):
        """An array (B, T, heads, width), of whole chunks and a width that the kernels take."""
        missing = config.width_of(x.shape[3]) - x.shape[3]
        x = self.padded(x.astype(self.dtype))
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else x

    def of_heads(self, x):
        """(B, H, T) of an array (B, T, H)."""
        return jnp.swapaxes(self.padded(x), 1, 2)

    def of_state(self, x):
        sizes = [(0, config.width_of(size) - size) for size in x.shape[2:]]
        return jnp.pad(x.astype(jnp.float32), ((0, 0), (0, 0), *sizes))

    def own(self, *widths: int, dtype=None):
        """The type of an array (B, H, T, …) that launches hand on."""
        return out_like(self.v, (self.batch, self.heads, self.chunks * CHUNK, *widths), dtype or self.dtype)

    def states(self):
        return out_like(self.v, (self.batch, self.heads, self.chunks, *self.state.shape[2:]), self.dtype)

    @property
    def arithmetic(self) -> Arithmetic:
        if self.dtype == jnp.bfloat16:
            # Float16's 11 bits add less to the inverse than its rounding to bfloat16, for keys that are alike, too. Its
            # entries are at most 1 for keys of norm 1.
            return Arithmetic(self.dtype, jnp.float16)
        precision = "highest" if self.interpret else jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        return Arithmetic(self.dtype, jnp.float32, precision)

    def launch(self, body, how: config.Launch, inputs, out_types, **options):
        """For each chunk of a head of keys, or for `how.columns` of each head's state."""
        options |= dict(group=self.heads // self.key_heads, chunks=self.chunks, arithmetic=self.arithmetic)
        if body in (triton_kernels.scan_states, triton_kernels.scan_gradients):
            columns = min(how.columns, self.state.shape[3])
            programs, options = self.state.shape[3] // columns * self.heads * self.batch, options | {"columns": columns}
        else:
            heads = dict(heads=self.heads) if body is triton_kernels.prepare else dict(key_heads=self.key_heads)
            programs, options = self.batch * self.chunks * next(iter(heads.values())), options | heads
            if how.columns:
                options["columns"] = min(how.columns, self.v.shape[3])
        return pl.pallas_call(
            functools.partial(body, **options),
            grid=(programs,),
            in_specs=[_whole(x) for x in inputs],
            out_specs=[_whole(x) for x in out_types],
            out_shape=out_types,
            compiler_params=pltriton.CompilerParams(num_warps=how.num_warps, num_stages=how.num_stages),
            interpret=self.interpret,
            name=f"gated_delta_rule_{body.__name__}",
        )(*inputs)

    def states_and_writes(self):
        """The inverses of the systems, the states before the chunks, the writes, and the last state."""
        inputs, out_types = [self.k, self.gate, self.beta], [self.own(CHUNK)] + [self.own(dtype=jnp.float32)] * 4
        inverse, *sums = self.launch(triton_kernels.prepare, config.PREPARE, inputs, out_types)
        self.high, self.low, self.kept, self.end = sums
        inputs = [self.k, self.v, inverse, self.beta, self.kept, self.end, self.state]
        last = out_like(self.v, self.state.shape, jnp.float32)
        out_types = [self.states(), self.own(self.state.shape[3]), last]
        how = config.scan_launch(self.depth, self.capability, is_backward=False)
        return inverse, *self.launch(triton_kernels.scan_states, how, inputs, out_types)


def _whole(x: Any) -> pl.BlockSpec:
    """An array as one block."""
    return pl.BlockSpec(tuple(x.shape), lambda *_: (0,) * len(x.shape))


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    document: jax.Array,
    mark: jax.Array,
    *,
    scale: float,
    capability: Capability,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """q and k (B, T, K, D), v (B, T, H, E), gate and beta (B, T, H), state (B, H, D, E), document (B, T), which counts
    from 0, the document of the state, and mark (B, T, H), which is added to the output → the output in v's dtype, and
    the last state in float32. All but mark are finite.
    """
    p = _Problem((q, k, v, gate, beta, state), document, mark, scale, capability, interpret)
    _, states, writes, last = p.states_and_writes()
    inputs = [p.q, p.k, p.high, p.low, p.kept, p.mark, states, writes]
    out_type = out_like(p.v, p.v.shape, v.dtype)
    (out,) = p.launch(triton_kernels.output, config.OUTPUT, inputs, [out_type], scale=scale)
    return out[:, : p.length, :, : p.width], last[..., : p.depth, : p.width]


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    document: jax.Array,
    mark: jax.Array,
    do: jax.Array,
    dlast: jax.Array,
    *,
    scale: float,
    capability: Capability,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """`forward`'s arguments and the gradients by its results → the gradients by q, k, v, gate, beta and state. `mark`
    is added to all but the state's, and what is not finite in do is taken as 0.
    """
    # Without the barrier a program of both directions would share launches, and keep what they hand on in between.
    q, k, v, do = jax.lax.optimization_barrier((q, k, v, do))
    p = _Problem((q, k, v, gate, beta, state), document, mark, scale, capability, interpret)
    do, dlast = p.of_tokens(do), p.of_state(dlast)
    inverse, states, writes, _ = p.states_and_writes()
    inputs, out_types = [p.q, p.k, p.high, p.low, do], [p.own(p.v.shape[3])]
    (local,) = p.launch(triton_kernels.local_gradients, config.OUTPUT, inputs, out_types, scale=scale)
    inputs = [p.q, p.k, inverse, do, local, p.beta, p.kept, p.end, dlast]
    out_types = [p.states(), p.own(p.v.shape[3]), out_like(p.v, p.state.shape, jnp.float32)]
    how = config.scan_launch(p.depth, capability, is_backward=True)
    dstates, dy, dstate = p.launch(triton_kernels.scan_gradients, how, inputs, out_types, scale=scale)
    dq, dk, dv = (out_like(p.v, x.shape, y.dtype) for x, y in zip((p.q, p.k, p.v), (q, k, v), strict=True))
    number = p.own(dtype=jnp.float32)
    pairs = out_like(p.v, (p.batch, p.key_heads, p.chunks * CHUNK, CHUNK), p.dtype)
    inputs = [p.q, p.k, p.v, p.high, p.low, p.beta, p.mark, do, writes, dy]
    dv, dseen, dsystem, *of_pairs = p.launch(
        triton_kernels.pair_gradients, config.PAIR_GRADIENTS, inputs, [dv, pairs, pairs, number, number], scale=scale
    )
    inputs = [p.q, p.k, p.beta, p.kept, p.end, p.mark, do, states, writes, dstates, dy, dseen, dsystem]
    dq, dk, *of_states = p.launch(
        triton_kernels.key_gradients, config.KEY_GRADIENTS, inputs, [dq, dk, number, number, number], scale=scale
    )
    parts = of_pairs[0], *of_states[:2], of_pairs[1], of_states[2]
    dgate, dbeta = (jnp.swapaxes(sum(x), 1, 2)[:, : p.length] for x in (parts[:3], parts[3:]))
    dgate, dbeta = jnp.where(p.begins[..., None], 0.0, dgate) + mark, dbeta + mark
    dq, dk, dv = (x[:, : p.length, :, : y.shape[3]] for x, y in zip((dq, dk, dv), (q, k, v), strict=True))
    return dq, dk, dv, dgate.astype(gate.dtype), dbeta.astype(beta.dtype), dstate[..., : p.depth, : p.width]
