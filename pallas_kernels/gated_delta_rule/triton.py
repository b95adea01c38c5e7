"""The gated delta rule in Pallas-Triton (NVIDIA, Ampere and newer).

Forward, three launches. "prepare" and "output" have a program for each chunk of each head, and "scan_states", the only
one that is sequential, a program for 32 columns of a head's state. Backward: "prepare" and "scan_states" again, so
that nothing but the arguments is kept for it, then "scan_gradients" from the last chunk to the first, and
"output_gradients" and "system_gradients", which have a program for each chunk of each head.
Rounding: of arguments in bfloat16, operands of products are rounded to bfloat16, and so are the states and what the
launches hand on; the products of the triangular inverse are TF32's. Sums, decays, the inverse and the state that the
scan carries are float32. Of other arguments everything is float32, and products are TF32's in three.
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


class _Problem:
    """Padded arrays, and how a kernel is launched on them."""

    def __init__(self, arrays, document, scale: float, capability: Capability, interpret: bool):
        q, k, v, gate, beta, state = arrays
        batch, self.length, heads, self.width = v.shape
        self.key_heads, self.depth = q.shape[2:]
        self.chunks = cdiv(self.length, CHUNK)
        self.interpret, self.scale, self.scan = interpret, scale, config.scan_launch(self.depth, capability)
        self.batch, self.heads = batch, heads
        is_half = all(x.dtype == jnp.bfloat16 for x in (q, k, v))
        self.dtype: Any = jnp.bfloat16 if is_half else jnp.float32
        self.q, self.k, self.v = self.of_tokens(q), self.of_tokens(k), self.of_tokens(v)
        # Padding continues the last document with a gate and beta of 0: the state stays.
        self.gate, self.beta = (self.padded(x.astype(jnp.float32)) for x in (gate, beta))
        self.document = self.padded(document, mode="edge")
        self.state = self.of_state(state)

    def padded(self, x, mode: str = "constant"):
        """Whole chunks of an array (B, T, …)."""
        missing = self.chunks * CHUNK - self.length
        return jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)), mode=mode) if missing else x

    def of_tokens(self, x):
        """An array (B, T, heads, width), of whole chunks and a width that the kernels take."""
        missing = config.width_of(x.shape[3]) - x.shape[3]
        x = self.padded(x.astype(self.dtype))
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else x

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
        if self.interpret:
            return Arithmetic(self.dtype, *["highest"] * 2)
        # TF32's 11 bits add less to the inverse than its rounding to bfloat16, for keys that are alike, too.
        one, three = jax.lax.DotAlgorithmPreset.TF32_TF32_F32, jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        return Arithmetic(self.dtype, None, one) if self.dtype == jnp.bfloat16 else Arithmetic(self.dtype, three, three)

    def launch(self, body, name: str, how: config.Launch, inputs, out_types, *, of_states: bool = False, **options):
        options |= dict(group=self.heads // self.key_heads, chunks=self.chunks, arithmetic=self.arithmetic)
        if of_states:
            columns = min(config.scan_columns(self.state.shape[2]), self.state.shape[3])
            programs, options = self.state.shape[3] // columns * self.heads * self.batch, options | {"columns": columns}
        else:
            programs, options = self.batch * self.chunks * self.heads, options | {"heads": self.heads}
        return pl.pallas_call(
            functools.partial(body, **options),
            grid=(programs,),
            in_specs=[_whole(x) for x in inputs],
            out_specs=[_whole(x) for x in out_types],
            out_shape=out_types,
            compiler_params=pltriton.CompilerParams(num_warps=how.num_warps, num_stages=how.num_stages),
            interpret=self.interpret,
            name=f"gated_delta_rule_{name}",
        )(*inputs)

    def prepare(self, do=None):
        """W, U, kept and end; with the output's gradient also (I + L)⁻¹ and Aᵀ do."""
        (depth, width), float32 = self.state.shape[2:], jnp.float32
        out_types = [self.own(depth), self.own(width), self.own(dtype=float32), self.own(dtype=float32)]
        inputs = [self.k, self.v, self.gate, self.beta, self.document]
        if do is not None:
            inputs, out_types = [self.q, do, *inputs], [*out_types, self.own(CHUNK), self.own(width)]
        options = dict(scale=self.scale, is_backward=do is not None)
        return self.launch(triton_kernels.prepare, "prepare", config.PREPARE, inputs, out_types, **options)

    def scan_states(self, w, u, kept, end):
        """The states before the chunks, the writes, and the last state."""
        inputs = [self.k, w, u, kept, end, self.state]
        last = out_like(self.v, self.state.shape, jnp.float32)
        out_types = [self.states(), self.own(self.state.shape[3]), last]
        body = triton_kernels.scan_states
        return self.launch(body, "scan_states", self.scan, inputs, out_types, of_states=True)


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
    *,
    scale: float,
    capability: Capability,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """q and k (B, T, K, D), v (B, T, H, E), gate and beta (B, T, H), state (B, H, D, E), all finite, and document
    (B, T), which counts from 0, the document of the state → the output in v's dtype, and the last state in float32.
    """
    p = _Problem((q, k, v, gate, beta, state), document, scale, capability, interpret)
    w, u, kept, end = p.prepare()
    states, writes, last = p.scan_states(w, u, kept, end)
    inputs = [p.q, p.k, p.gate, p.document, states, writes, kept]
    out_type = out_like(p.v, p.v.shape, v.dtype)
    options = dict(scale=scale, columns=min(config.COLUMNS, p.v.shape[3]))
    (out,) = p.launch(triton_kernels.output, "output", config.OUTPUT, inputs, [out_type], **options)
    return out[:, : p.length, :, : p.width], last[..., : p.depth, : p.width]


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    document: jax.Array,
    do: jax.Array,
    dlast: jax.Array,
    *,
    scale: float,
    capability: Capability,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """`forward`'s arguments and the gradients by its results → the gradients by q, k, v, gate, beta and state."""
    p = _Problem((q, k, v, gate, beta, state), document, scale, capability, interpret)
    do, dlast = p.of_tokens(do), p.of_state(dlast)
    w, u, kept, end, inverse, local = p.prepare(do)
    states, writes, _ = p.scan_states(w, u, kept, end)
    inputs = [p.q, p.k, w, do, local, kept, end, dlast]
    out_types = [p.states(), p.own(p.state.shape[3]), out_like(p.v, p.state.shape, jnp.float32)]
    dstates, dwrites, dstate = p.launch(
        triton_kernels.scan_gradients, "scan_gradients", p.scan, inputs, out_types, of_states=True, scale=scale
    )
    options = dict(columns=min(config.COLUMNS, p.v.shape[3]))
    of_head = out_like(p.v, (*p.v.shape[:3], p.q.shape[3]), q.dtype if p.heads == p.key_heads else jnp.float32)
    of_number = out_like(p.v, p.gate.shape, jnp.float32)
    inputs = [p.q, p.k, p.gate, p.document, do, states, writes, dstates, kept, end]
    dq, dk, dgate = p.launch(
        triton_kernels.output_gradients, "output_gradients", config.GRADIENTS, inputs, [of_head, of_head, of_number],
        scale=scale, **options,
    )  # fmt: skip
    inputs = [p.k, p.v, p.gate, p.beta, p.document, inverse, states, writes, dwrites, kept, dk, dgate]
    out_types = [of_head, out_like(p.v, p.v.shape, v.dtype), of_number, of_number]
    dk, dv, dgate, dbeta = p.launch(
        triton_kernels.system_gradients, "system_gradients", config.GRADIENTS, inputs, out_types, **options
    )
    # The heads that share a key are added up.
    dq, dk = (x.reshape(*p.q.shape[:3], -1, x.shape[3]).sum(axis=3)[..., : p.depth] for x in (dq, dk))
    padded = [dq, dk, dv[..., : p.width], dgate, dbeta]
    gradients = [x[:, : p.length].astype(y.dtype) for x, y in zip(padded, (q, k, v, gate, beta), strict=True)]
    return *gradients, dstate[..., : p.depth, : p.width].astype(state.dtype)
