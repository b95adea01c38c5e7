"""What is compiled ahead of time: each kernel at one real model's shape, forward and backward.

A case is a function of arrays, the arrays' types, and the kernels that the compiled program must name. Only
`BOTH` runs on GPU and TPU targets alike; the fused loss is compiled for every TPU at four models' shapes.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from liger_jax import (
    causal_attention,
    cross_entropy,
    fused_add_rms_norm,
    fused_linear_cross_entropy,
    fused_linear_log_probs,
    gated_delta_rule,
    gated_mlp,
    geglu,
    grouped_matmul,
    layer_norm,
    moe_mlp,
    rms_norm,
    swiglu,
)
from liger_jax.ops.adapted_linear import adapted_linear
from liger_jax.ops.decode_attention import decode_attention

BF16, F32, INT = jnp.bfloat16, jnp.float32, jnp.int32
FLCE = ("fused_linear_cross_entropy_statistics", "fused_linear_cross_entropy_logit_gradients")


@dataclasses.dataclass(frozen=True)
class Case:
    """`function(kernel)` makes the function for a kernel's name; `full` cases run in `make test-full` only."""

    name: str
    function: Callable[[str], Callable]
    arguments: tuple
    kernels: tuple[str, ...]
    full: bool = False


def with_gradient(op, argnums):
    """Kernel name → the op's outputs and its gradients, so that no kernel is dead code."""

    def function(kernel):
        def run(*args):
            out, backward = jax.vjp(
                lambda *xs: op(*xs, *args[len(argnums) :], implementation=kernel), *args[: len(argnums)]
            )
            return out, backward(jax.tree.map(jnp.ones_like, out))

        return run

    return function


def head(**options):
    return lambda h, w, y, implementation: fused_linear_cross_entropy(h, w, y, implementation=implementation, **options)


def head_with_everything(h, w, bias, c, y, implementation):
    return fused_linear_cross_entropy(
        h, w, y, bias=bias, class_weights=jax.lax.stop_gradient(c), label_smoothing=0.1, z_loss=1e-4, logit_scale=0.5,
        logit_softcap=30.0, reduction="none", implementation=implementation,
    )  # fmt: skip


def log_probs_and_entropies(h, w, y, implementation, **options):
    found = fused_linear_log_probs(h, w, y, entropy=True, implementation=implementation, **options)
    return found.log_probs, found.entropy, found.log_sum_of_squares


def mapped(op):
    return lambda x, *rest, implementation: jax.vmap(lambda x: op(x, *rest, implementation=implementation))(x)


def linear_types(n, d, v):
    return ((n, d), BF16), ((v, d), BF16), ((n,), INT)


LLAMA_8B_HEAD = (((8192, 4096), BF16), ((128256, 4096), BF16), ((8192,), INT))
QWEN_HEAD = (((4096, 896), F32), ((151936, 896), F32), ((4096,), INT))
NORM = ("rms_norm_forward", "rms_norm_backward")
WIDTHS = (896, 2048, 2304, 3584, 4096, 5120, 8192, 18432)
NORMS = {
    "rms_norm": (rms_norm, 1, 1),
    "fused_add_rms_norm": (fused_add_rms_norm, 2, 1),
    "layer_norm": (layer_norm, 1, 2),
}


def norms(width, full, dtype=BF16, of_columns=None, prefix=""):
    """Every normalisation with kernels, of 16,384 rows; scales have their own dtype where it is given."""
    for name, (op, rows, columns) in NORMS.items():
        arguments = (((16384, width), dtype),) * rows + (((width,), of_columns or dtype),) * columns
        function = with_gradient(op, range(rows + columns))
        kernels = (f"{name}_forward", f"{name}_backward")
        one_is_enough = name != "rms_norm"  # by default: they share the pass over rows
        yield Case(f"{prefix}{name}_{width}_{dtype.__name__}", function, arguments, kernels, full or one_is_enough)


BOTH = [
    *norms(4096, full=False),
    *(case for width in WIDTHS if width != 4096 for case in norms(width, full=True)),
    *norms(18432, full=True, dtype=F32),
    Case("rms_norm_without_scale", with_gradient(rms_norm, (0,)), (((4096, 896), F32),), NORM, full=True),
    Case("rms_norm_mixed", with_gradient(rms_norm, (0, 1)), (((4096, 18432), BF16), ((18432,), F32)), NORM, full=True),
    Case(
        "rms_norm_vmap",
        with_gradient(mapped(rms_norm), (0, 1)),
        (((8, 512, 896), BF16), ((896,), BF16)),
        NORM,
        full=True,
    ),
    Case(
        "cross_entropy",
        with_gradient(cross_entropy, (0,)),
        (((4096, 128256), BF16), ((4096,), INT)),
        ("cross_entropy_statistics",),
    ),
    Case("fused_linear_cross_entropy_float32", with_gradient(head(), (0, 1)), QWEN_HEAD, FLCE, full=True),
    Case(
        "fused_linear_cross_entropy_dv",
        with_gradient(head(weight_layout="dv"), (0, 1)),
        (((8192, 2304), BF16), ((2304, 256000), BF16), ((8192,), INT)),
        FLCE,
        full=True,
    ),
    Case(
        "fused_linear_log_probs_llama_8b",
        with_gradient(log_probs_and_entropies, (0, 1)),
        LLAMA_8B_HEAD,
        FLCE,
        full=True,
    ),
    Case(
        "fused_linear_cross_entropy_all_options",
        with_gradient(head_with_everything, (0, 1, 2)),
        (((4096, 900), BF16), ((32003, 900), BF16), ((32003,), BF16), ((32003,), F32), ((4096,), INT)),
        FLCE,
        full=True,
    ),
]

lean = with_gradient(head(mode="lean"), (0, 1))
LINEAR = [
    Case("fused_linear_cross_entropy", lean, LLAMA_8B_HEAD, FLCE),
    Case(
        "fused_linear_log_probs",
        with_gradient(log_probs_and_entropies, (0, 1)),
        linear_types(2048, 896, 32000),
        FLCE,
        full=True,  # its kernels are those of the loss
    ),
]

GATES = (((16384, 14336), BF16), ((16384, 14336), BF16))
MLP = (((4, 2048, 2048), BF16), ((2048, 8192), BF16), ((2048, 8192), BF16), ((8192, 2048), BF16))

GLU = ("glu_forward", "glu_backward")

GPU_ONLY = [
    *LINEAR,
    Case("swiglu", with_gradient(swiglu, (0, 1)), GATES, GLU),
    Case("geglu", with_gradient(geglu, (0, 1)), GATES, GLU),
    Case("swiglu_side_by_side", with_gradient(swiglu, (0,)), (((16384, 2 * 14336), BF16),), GLU),
    Case("geglu_side_by_side_odd", with_gradient(geglu, (0,)), (((4095, 2 * 333), F32),), GLU, full=True),
    Case("gated_mlp", with_gradient(gated_mlp, (0, 1, 2, 3)), MLP, ("glu_forward", "glu_gradients_and_product")),
]


LLAMA_70B_HEAD = linear_types(16384, 8192, 128256)
OTHER_HEADS = {
    "gemma_2b": linear_types(8192, 2304, 256000),
    "qwen_half_b": linear_types(4096, 896, 151936),
    "llama_70b": LLAMA_70B_HEAD,
}


def default_head(_):
    """As a user calls it: the platform's implementation, and the mode that is planned."""
    return with_gradient(head(), (0, 1))(None)


def forward(op):
    return lambda kernel: lambda *args: op(*args, implementation=kernel)


TPU_ONLY = [
    Case("fused_linear_cross_entropy_small", lean, linear_types(512, 256, 4096), FLCE),
    *[dataclasses.replace(case, full=True) for case in LINEAR],  # some 40 s each
    Case("forward", forward(head()), LLAMA_8B_HEAD, FLCE[:1], full=True),
    Case("fast", with_gradient(head(mode="fast"), (0, 1)), LLAMA_8B_HEAD, FLCE[:1], full=True),
    Case(
        "llama_70b_all_options",
        with_gradient(head_with_everything, (0, 1, 2)),
        (*LLAMA_70B_HEAD[:2], ((128256,), BF16), ((128256,), F32), LLAMA_70B_HEAD[2]),
        FLCE,
        full=True,
    ),
    *[Case(name, with_gradient(head(), (0, 1)), types, FLCE, full=True) for name, types in OTHER_HEADS.items()],
    *[
        Case(f"{name}_default", default_head, types, (), full=True)
        for name, types in {"llama_8b": LLAMA_8B_HEAD, **OTHER_HEADS}.items()
    ],
]

ATTENTION = tuple(f"causal_attention_{part}" for part in ("forward", "query_gradient", "key_gradients"))
ATTENTION_IN_ONE_PASS = tuple(f"causal_attention_{part}" for part in ("forward", "gradients"))


def decode(kernel):
    return functools.partial(decode_attention, window=512, softcap=50.0, implementation=kernel)


def decode_types(batch, kv_heads, group, width, slots, layers):
    """The layers' whole cache, which has more than 2³² bytes with 1,025 slots for 64 rows of an 8B model."""
    cache = (layers, batch, slots, kv_heads, width), BF16
    return ((batch, kv_heads * group, width), BF16), cache, cache, ((batch, slots), INT), ((), INT), ((), INT)


def attention_types(batch, length, query_heads, kv_heads, width):
    q, k = ((batch, length, heads, width) for heads in (query_heads, kv_heads))
    return (q, BF16), (k, BF16), (k, BF16), ((batch, length), INT)


def packed_attention(**options):
    return with_gradient(functools.partial(causal_attention, **options), (0, 1, 2))


GPU_ONLY += [
    Case("decode_attention", decode, decode_types(4, 8, 4, 64, 1023, 16), ("decode_attention",)),
    Case("decode_attention_128", decode, decode_types(64, 8, 4, 128, 1025, 32), ("decode_attention",), full=True),
    Case("decode_attention_80", decode, decode_types(8, 4, 1, 80, 2000, 2), ("decode_attention",), full=True),
    Case("decode_attention_256", decode, decode_types(64, 4, 2, 256, 1023, 2), ("decode_attention",), full=True),
    Case("attention", packed_attention(), attention_types(8, 2047, 32, 8, 64), ATTENTION),
    Case("attention_128", packed_attention(window=1024), attention_types(2, 8192, 32, 8, 128), ATTENTION, full=True),
    Case("attention_256", packed_attention(softcap=50.0), attention_types(2, 8192, 8, 4, 256), ATTENTION, full=True),
]

DELTA_RULE = tuple(
    f"gated_delta_rule_{name}"
    for name in (
        *("prepare", "scan_states", "output"),
        *("local_gradients", "scan_gradients", "pair_gradients", "key_gradients"),
    )
)


def delta_rule_types(batch, length, key_heads, heads, width, dtype=BF16):
    keys = (batch, length, key_heads, width), dtype
    return keys, keys, ((batch, length, heads, width), dtype), *[((batch, length, heads), F32)] * 2


GPU_ONLY += [
    *(
        Case(
            f"gated_delta_rule_{width}",
            with_gradient(gated_delta_rule, range(5)),
            delta_rule_types(*sizes, width),
            DELTA_RULE,
            full=width != 32,  # wider heads and longer rows compile for half a minute
        )
        for sizes, width in (
            ((1, 1023, 2, 4), 32),
            *(((1, 8191, 16, 32), width) for width in (64, 128)),
            ((2, 2048, 4, 4), 192),
        )
    ),
]

GROUPED = ("grouped_matmul_product", "grouped_matmul_weight_gradient")
EXPERTS = (((65536, 2048), BF16), ((128, 2048, 1536), BF16), ((128,), INT))
MIXTURE = (
    ((8192, 2048), BF16),
    ((8192, 8), F32),
    ((128, 2048, 1536), BF16),
    ((128, 768, 2048), BF16),
    ((8192, 8), INT),
)


def experts(x, weights, gate_up, down, chosen, implementation):
    return moe_mlp(x, weights, chosen, gate_up, down, activation="silu", implementation=implementation)


TPU_ONLY += [
    Case("grouped_matmul", with_gradient(grouped_matmul, (0, 1)), EXPERTS, GROUPED),
    Case("moe_mlp", with_gradient(experts, (0, 1, 2, 3)), MIXTURE, GROUPED, full=True),
    *(
        Case(
            f"gated_delta_rule_{heads}_{width}_{dtype.__name__}",
            with_gradient(gated_delta_rule, range(5)),
            delta_rule_types(1, 1000, 2, heads, width, dtype),
            tuple(f"gated_delta_rule_{name}" for name in ("forward", "states", "gradients")),
            full=True,
        )
        for heads, width, dtype in ((4, 128, BF16), (2, 96, F32), (8, 256, BF16))
    ),
]

HOPPER_KERNELS = (*FLCE, "fused_linear_cross_entropy_hidden_gradient", "fused_linear_cross_entropy_weight_gradient")
LLAMA_8B_MIXED_HEAD = (((8192, 4096), BF16), ((128256, 4096), F32), ((8192,), INT))
# The bytes that 16-bit halves of dW and the logits of 2,048 tokens take.
BOUND = 2 * 128256 * 4096 + 4096 * 128256
HOPPER_ONLY = [
    *norms(18432, full=False, prefix="hopper_"),
    *(case for width in (*WIDTHS[1:-1], 16384) for case in norms(width, full=True, prefix="hopper_")),
    *norms(8192, full=True, dtype=F32, prefix="hopper_"),
    *norms(4096, full=False, of_columns=F32, prefix="hopper_mixed_"),
    *(
        case
        for width in (*WIDTHS[1:-1], 16384)
        if width != 4096
        for case in norms(width, True, BF16, F32, "hopper_mixed_")
        if (width, case.kernels[0]) != (16384, "fused_add_rms_norm_forward")  # two rows and scales exceed shared memory
    ),
    Case("hopper_attention", packed_attention(), attention_types(8, 2048, 32, 8, 64), ATTENTION),
    *(
        Case(
            f"hopper_attention_{width}_in_one_pass",
            packed_attention(),
            attention_types(2, 8192, 32, 8, width)[:3],
            ATTENTION_IN_ONE_PASS,
            full=width == 64,
        )
        for width in (128, 64)
        if jax.__version_info__ >= (0, 11)
    ),
    Case("hopper_attention_128", packed_attention(), attention_types(2, 8192, 32, 8, 128), ATTENTION, full=True),
    Case(
        "hopper_attention_256",
        packed_attention(window=4096, softcap=50.0),
        attention_types(2, 8192, 8, 4, 256),
        ATTENTION,
        full=True,
    ),
    Case(
        "hopper_gated_mlp",
        with_gradient(gated_mlp, (0, 1, 2, 3)),
        MLP,
        ("gated_mlp_up", "gated_mlp_gradients", "gated_mlp_input_gradient"),
    ),
    Case(
        "hopper_adapted_linear",
        with_gradient(adapted_linear, (0, 1, 2, 3)),
        (((8192, 4096), BF16), ((4096, 14336), BF16), ((4096, 16), F32), ((16, 14336), F32)),
        ("adapted_linear",),
    ),
    Case("hopper_grouped_matmul", with_gradient(grouped_matmul, (0, 1)), EXPERTS, GROUPED),
    Case("hopper_moe_mlp", with_gradient(experts, (0, 1, 2, 3)), MIXTURE, GROUPED, full=True),
    Case("hopper_fast", with_gradient(head(mode="fast"), (0, 1)), LLAMA_8B_HEAD, FLCE, full=True),  # see bounded
    Case(
        "hopper_log_probs",
        with_gradient(log_probs_and_entropies, (0, 1)),
        linear_types(2048, 896, 32000),
        HOPPER_KERNELS,
        full=True,
    ),
    Case(
        "hopper_log_probs_llama_8b",
        with_gradient(log_probs_and_entropies, (0, 1)),
        LLAMA_8B_HEAD,
        HOPPER_KERNELS,
        full=True,
    ),
    Case("hopper_lean", with_gradient(head(mode="lean"), (0, 1)), LLAMA_8B_HEAD, HOPPER_KERNELS),
    Case(
        "hopper_bounded",
        with_gradient(head(mode="fast", chunk_size=3072), (0, 1)),
        LLAMA_8B_HEAD,
        (*FLCE, HOPPER_KERNELS[-1]),
    ),
    Case(
        "hopper_kept",
        with_gradient(head(memory_budget_bytes=2**29), (0, 1)),
        LLAMA_8B_HEAD,
        (*FLCE, HOPPER_KERNELS[-1]),
        full=True,  # the kernels and the memory of a budget are those of "bounded"
    ),
    Case(
        "hopper_mixed",
        with_gradient(head(mode="fast", chunk_size=2048), (0, 1)),
        LLAMA_8B_MIXED_HEAD,
        (*FLCE, HOPPER_KERNELS[-1]),
        full=True,
    ),
    Case(
        "hopper_dv",
        with_gradient(head(weight_layout="dv"), (0, 1)),
        (((4096, 896), BF16), ((896, 151936), BF16), ((4096,), INT)),
        FLCE,
        full=True,
    ),
    Case(
        "hopper_all_options",
        with_gradient(head_with_everything, (0, 1, 2)),
        (((4096, 896), BF16), ((32008, 896), BF16), ((32008,), BF16), ((32008,), F32), ((4096,), INT)),
        HOPPER_KERNELS,
        full=True,
    ),
]
