"""The plan of the fused loss: what it chooses, and that the op follows it."""

import dataclasses
import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from liger_jax import fused_linear_cross_entropy, plan_fused_linear_cross_entropy
from liger_jax.ops.linear.plan import PRODUCTS_OF_LEAN, Problem, choose_mode, logits_bytes, make_plan, products
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Needs, kept_entries
from tests.ops._oracle import first

H200 = AbstractDevice("NVIDIA H200", 132, "gpu")
B200 = AbstractDevice("NVIDIA B200", 148, "gpu")
A100 = AbstractDevice("NVIDIA A100-SXM4-80GB", 108, "gpu")
V6E = AbstractDevice("TPU v6 lite", 1, "tpu")
LLAMA, GEMMA_2, GEMMA_3 = (8192, 4096, 128256), (8192, 2304, 256000), (8192, 1152, 262144)
GIB = 2**30


def test_hopper_and_tpus_get_their_own_kernels_and_others_xla():
    assert plan_fused_linear_cross_entropy(*LLAMA, device=H200).implementation == "mosaic_gpu"
    for other in (A100, B200):
        assert plan_fused_linear_cross_entropy(*LLAMA, device=other).implementation == "xla"
    assert plan_fused_linear_cross_entropy(*LLAMA, device=V6E).implementation == "mosaic_tpu"
    assert plan_fused_linear_cross_entropy(*LLAMA, dtype=jnp.float32, device=H200).implementation == "xla"


@pytest.mark.parametrize("v", first(2, [50257, 3, 49155, 16032, 151646]))
@pytest.mark.parametrize("layout", ["vd", "dv"])
@pytest.mark.parametrize("mode", ["auto", "fast", "lean"])
def test_hopper_takes_any_vocabulary_and_any_width(v, layout, mode):
    for d in (4096, 100):
        plan = plan_fused_linear_cross_entropy(8192, d, v, weight_layout=layout, mode=mode, device=H200)
        assert plan.implementation == "mosaic_gpu"


def test_fast_where_it_fits_and_lean_where_it_does_not():
    plan = lambda gib: plan_fused_linear_cross_entropy(*LLAMA, device=H200, memory_budget_bytes=int(gib * GIB))
    assert (plan(4).mode, plan(4).chunk_size) == ("fast", 8192)
    assert plan(1.5).mode == "fast" and plan(1.5).chunk_size < 8192
    assert plan(4).kept is None and plan(0.5).kept is not None
    assert plan(0.19).mode == "lean"
    for gib in (4, 1.5, 0.5, 0.19):
        assert plan(gib).extra_bytes <= gib * GIB


@pytest.mark.parametrize("shape", [LLAMA, GEMMA_2, GEMMA_3, (8192, 576, 49152), (16384, 8192, 128256)])
def test_a_larger_budget_never_costs_more_products(shape):
    """Chunks of tokens and shares of kept exponentials are on one falling curve, from lean mode to one chunk."""
    n, d, v = shape
    problem = Problem(n, d, v, 2, 2, "gpu", "mosaic_gpu")
    costs = []
    for mib in np.geomspace(128, 2**13, 60):
        budget = int(mib * 2**20)
        try:
            plan = make_plan(dataclasses.replace(problem, hard_budget_bytes=budget))
        except ValueError:
            continue
        assert plan.extra_bytes <= budget
        costs.append(products(problem, plan))
    assert costs == sorted(costs, reverse=True)
    assert costs[0] <= PRODUCTS_OF_LEAN and costs[-1] < 3.15


@pytest.mark.parametrize(
    "shape, mib, chunk_size, more",
    [
        (LLAMA, 201, None, 0.680), (LLAMA, 400, None, 0.574), (LLAMA, 670, None, 0.436), (LLAMA, 1024, None, 0.265),
        (GEMMA_2, 160, None, 0.921), (GEMMA_2, 1024, None, 0.681),
        (GEMMA_3, 173, None, 1.043), (GEMMA_3, 801, None, 0.901),
        (LLAMA, None, 1024, 0.437), (LLAMA, None, 512, 1.107), (GEMMA_2, None, 1792, 0.211),
    ],
)  # fmt: skip
def test_counted_products_are_those_of_an_h200(shape, mib, chunk_size, more):
    """What a plan took more than one chunk did, in products: benchmarks/results/loss_h200.md, means of two cards."""
    n, d, v = shape
    problem = Problem(n, d, v, 2, 2, "gpu", "mosaic_gpu", "fast")
    budget = None if mib is None else mib * 2**20
    plan = make_plan(dataclasses.replace(problem, hard_budget_bytes=budget, chunk_size=chunk_size))
    assert (plan.kept is None) == (mib is None)
    assert abs(products(problem, plan) - products(problem, make_plan(problem)) - more) < 0.07


def test_llamas_head_keeps_half_of_its_exponentials_in_the_gradients_place():
    plan = plan_fused_linear_cross_entropy(*LLAMA, device=H200, memory_budget_bytes=201 * 2**20)
    assert plan.kept is not None and plan.kept.total > LLAMA[2] / 2


def test_no_row_of_the_gradient_is_written_before_the_block_there_is_read(rng):
    for _ in range(200):
        n, d, v = int(rng.integers(1, 9000)), 128 * int(rng.integers(1, 65)), 8 * int(rng.integers(1, 40_000))
        kept = kept_entries(n, d, v, int(rng.integers(1, v + 1)))
        if kept is None:
            continue
        padded = -(-n // 128) * 128
        first_row = kept.first_row(padded, v)
        assert kept.total <= v and first_row >= 0
        for i in range(kept.blocks + 1):  # the rows of `first` and of i blocks are written when i blocks have been read
            assert kept.first + i * d <= first_row + i * padded


def test_a_small_device_takes_no_more_than_its_share():
    plan = plan_fused_linear_cross_entropy(*LLAMA, device=A100, device_memory_bytes=16 * GIB)
    assert plan.mode == "lean"
    assert plan_fused_linear_cross_entropy(*LLAMA, device=A100, device_memory_bytes=80 * GIB).mode == "fast"
    some = plan_fused_linear_cross_entropy(8192, 2048, 128256, device=A100, device_memory_bytes=12 * GIB)
    assert some.mode == "fast" and some.extra_bytes <= 12 * GIB // 8
    assert some.chunk_size < plan_fused_linear_cross_entropy(8192, 2048, 128256, device=A100).chunk_size


def test_a_share_is_a_wish_and_a_budget_is_not():
    lean = plan_fused_linear_cross_entropy(*LLAMA, device=A100, mode="lean")
    assert plan_fused_linear_cross_entropy(*LLAMA, device=A100, device_memory_bytes=1) == lean
    with pytest.raises(ValueError, match="memory_budget_bytes=1 is too small"):
        plan_fused_linear_cross_entropy(*LLAMA, device=A100, memory_budget_bytes=1)


def test_a_soft_budget_gives_way_and_a_hard_one_does_not():
    problem = Problem(*LLAMA, itemsize=2, weight_itemsize=2, platform="gpu")
    within = lambda **budgets: make_plan(dataclasses.replace(problem, **budgets))
    lean = within(mode="lean")
    assert within(soft_budget_bytes=1) == lean
    assert within(soft_budget_bytes=2 * lean.extra_bytes) == within(hard_budget_bytes=2 * lean.extra_bytes)
    assert within(soft_budget_bytes=1, hard_budget_bytes=2**40) == within()
    with pytest.raises(ValueError, match="memory_budget_bytes=1 is too small"):
        within(soft_budget_bytes=2**40, hard_budget_bytes=1)


@pytest.mark.parametrize(
    "kernels, mode", [("xla", "fast"), ("mosaic_gpu", "fast"), ("mosaic_gpu", "auto"), ("triton", "lean")]
)
def test_an_error_names_the_bytes_that_suffice(kernels, mode):
    problem = Problem(130, 4096, 128256, 2, 4, "gpu", kernels, mode, hard_budget_bytes=2**20)
    with pytest.raises(ValueError, match="is too small") as error:
        make_plan(problem)
    (needed,) = re.findall(r"needs (\d+) bytes", str(error.value))
    assert make_plan(dataclasses.replace(problem, hard_budget_bytes=int(needed))).extra_bytes <= int(needed)


@pytest.mark.parametrize("kernels", ["xla", "mosaic_gpu"])
@pytest.mark.parametrize("soft_gib", [1, 3])
def test_the_mode_does_not_depend_on_which_gradients_are_asked_for(kernels, soft_gib):
    """The op has to take one of two functions before JAX says what is differentiated."""
    problem = Problem(*LLAMA, 2, 4, "gpu", kernels, soft_budget_bytes=soft_gib * GIB)
    asked = [Needs(hidden, weight, bias=False) for hidden in (True, False) for weight in (True, False)]
    assert {make_plan(problem, needs).mode for needs in asked} == {choose_mode(problem)}


@pytest.mark.parametrize("wrt", [(), (0,), (1,), (0, 1)], ids=str)
def test_a_budget_that_holds_all_gradients_holds_fewer(wrt):
    """A float32 weight's copy is in its gradient's place, which is not there where the head is frozen."""
    n, d, v = 1, 896, 32000
    budget = plan_fused_linear_cross_entropy(n, d, v, weight_dtype=jnp.float32, device=H200).extra_bytes
    loss = lambda h, w, y: fused_linear_cross_entropy(h, w, y, memory_budget_bytes=budget)
    function = jax.grad(loss, wrt) if wrt else loss
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=H200)):
        jax.eval_shape(
            function,
            jax.ShapeDtypeStruct((n, d), jnp.bfloat16),
            jax.ShapeDtypeStruct((v, d), jnp.float32),
            jax.ShapeDtypeStruct((n,), jnp.int32),
        )


def test_cotangents_unknown_in_the_forward_mean_lean():
    assert plan_fused_linear_cross_entropy(*LLAMA, reduction="none", device=H200).mode == "lean"
    with pytest.raises(ValueError, match="the cotangent of each token's loss is unknown"):
        plan_fused_linear_cross_entropy(*LLAMA, reduction="none", mode="fast", device=H200)


def test_a_frozen_head_needs_no_accumulator():
    both = plan_fused_linear_cross_entropy(65536, 4096, 128256, device=H200)
    frozen = plan_fused_linear_cross_entropy(65536, 4096, 128256, differentiated=("hidden",), device=H200)
    assert frozen.extra_bytes < both.extra_bytes - 2 * 128256 * 4096


def test_memory_is_flat_in_tokens():
    extra = [plan_fused_linear_cross_entropy(n, 4096, 128256, device=H200).extra_bytes for n in (16384, 65536, 2**20)]
    assert max(extra) < 1.1 * min(extra)


@pytest.mark.parametrize("budget", [None, 2 * GIB, 3 * GIB // 2])
def test_chunks_leave_few_of_hoppers_cores_idle(budget):
    """dX of a chunk takes whole rounds of its 128 × 256 tiles over 132 cores."""
    plan = plan_fused_linear_cross_entropy(*LLAMA, mode="fast", device=H200, memory_budget_bytes=budget)
    whole, rest = divmod(8192, plan.chunk_size)
    tiles = lambda tokens: -(-tokens // 128) * 4096 // 256
    rounds = sum(-(-tiles(tokens) // 132) for tokens in [plan.chunk_size] * whole + [rest])
    assert tiles(8192) / 132 / rounds > 0.9


@pytest.mark.parametrize("n", [1, 100, 8191, 8193, 100_000])
def test_chunks_are_even(n):
    plan = plan_fused_linear_cross_entropy(n, 4096, 128256, mode="fast", device=A100)
    chunks = -(-n // plan.chunk_size)
    assert chunks * plan.chunk_size - n < 128 * chunks


@pytest.mark.parametrize("v", [5000, 128256, 1_000_003])
def test_a_slice_is_the_largest_of_equal_parts_that_fits(v):
    plan = lambda **options: plan_fused_linear_cross_entropy(4096, 1024, v, mode="lean", device=A100, **options)
    largest, least = plan(), plan(chunk_size=512)
    for part in range(1, 8):
        budget = (part * largest.extra_bytes + (8 - part) * least.extra_bytes) // 8
        found = plan(memory_budget_bytes=budget)
        parts = -(-v // found.chunk_size)
        next_larger = -(-v // (parts - 1)) + 127
        assert found.extra_bytes <= budget < plan(chunk_size=next_larger // 128 * 128).extra_bytes


@pytest.mark.parametrize("device", [H200, A100, V6E], ids=str)
def test_a_plan_for_billions_takes_a_moment(device):
    start = time.process_time()
    for n, d, v in ((8192, 64, 10**9), (10**9, 4096, 512), (10**9, 10**6, 10**9)):
        plan_fused_linear_cross_entropy(n, d, v, device=device, device_memory_bytes=16 * GIB)
    assert time.process_time() - start < 1


def test_wrong_arguments_are_refused(unchecked_types):
    with pytest.raises(ValueError, match="n=0 must be at least 1"):
        plan_fused_linear_cross_entropy(0, 4096, 128256)
    with pytest.raises(ValueError, match="logit_softcap=inf must be finite and > 0; pass None to cap nothing"):
        plan_fused_linear_cross_entropy(*LLAMA, logit_softcap=float("inf"))
    with pytest.raises(ValueError, match="logit_scale=nan must be finite"):
        plan_fused_linear_cross_entropy(*LLAMA, logit_scale=float("nan"))
    with pytest.raises(ValueError, match="differentiated='bias' is unknown"):
        plan_fused_linear_cross_entropy(*LLAMA, differentiated=("bias",))
    with pytest.raises(ValueError, match="memory_budget_bytes=1000 is too small"):
        plan_fused_linear_cross_entropy(*LLAMA, memory_budget_bytes=1000)
    for other in (A100, B200):
        with pytest.raises(ValueError, match=rf"its instructions are Hopper's .*, and a {other.device_kind} has none"):
            plan_fused_linear_cross_entropy(*LLAMA, implementation="mosaic_gpu", device=other)
    with pytest.raises(ValueError, match="where logits cannot be recovered"):
        plan_fused_linear_cross_entropy(
            *LLAMA, mode="fast", logit_softcap=50.0, implementation="mosaic_gpu", device=H200
        )


def test_the_op_follows_the_plan(platform):
    """As many chunks as planned: the products of one chunk in a loop's body."""
    n, d, v = 1000, 64, 512
    plan = plan_fused_linear_cross_entropy(n, d, v, dtype=jnp.float32, mode="fast", implementation="xla")
    loss = lambda h, w: fused_linear_cross_entropy(h, w, jnp.zeros(n, jnp.int32), mode="fast", implementation="xla")
    text = jax.jit(jax.grad(loss, (0, 1))).lower(jnp.zeros((n, d)), jnp.zeros((v, d))).as_text()
    assert f"{plan.chunk_size}x{v}xf32" in text


# --- the lean mode, and what "auto" may choose ------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["xla", "triton", "mosaic_gpu", "mosaic_tpu"])
def test_what_grows_with_a_lean_slice_is_a_quarter_of_the_logits_or_a_few_tiles(kernels, rng):
    device = V6E if kernels == "mosaic_tpu" else H200
    for _ in range(60):
        n, d, v = (int(2 ** rng.uniform(*powers)) for powers in ((0, 17), (4, 13), (4, 18)))
        plan = functools.partial(
            plan_fused_linear_cross_entropy, n, d, v, mode="lean", implementation=kernels, device=device
        )
        found, least = plan(), plan(chunk_size=1024 if kernels == "mosaic_tpu" else 512)
        assert found.slice_bytes <= max(2 * n * v // 4, least.slice_bytes), (n, d, v, found)
        assert found.extra_bytes >= found.slice_bytes


def test_lean_takes_a_quarter_of_small_logits():
    for device in (A100, AbstractDevice("cpu", 1, "cpu")):
        plan = plan_fused_linear_cross_entropy(2048, 128, 16411, mode="lean", device=device)
        assert plan.slice_bytes <= 2 * 2048 * 16411 // 4
        assert plan.extra_bytes <= 20 * 2**20  # where a slice of 128 MiB took 258


@pytest.mark.parametrize(
    "kernels, platform_of_plan",
    [("xla", "cpu"), ("xla", "gpu"), ("xla", "tpu"), ("mosaic_gpu", "gpu"), ("mosaic_tpu", "tpu")],
)
@pytest.mark.parametrize("times", [10, pytest.param(400, marks=pytest.mark.full)])
def test_auto_plans_no_more_than_logits_or_the_least_of_both_modes(kernels, platform_of_plan, times, rng):
    """Logits are the unfused step's, in float32, and their gradient.

    Where "fast" and "lean" both plan more, auto plans no more than the smaller of them.
    """
    for _ in range(times):
        n, d, v = (int(2 ** rng.uniform(*powers)) for powers in ((0, 17), (4, 13), (4, 18)))
        itemsize = 2 if kernels == "mosaic_gpu" else int(rng.choice([2, 4]))
        problem = Problem(n, d, v, itemsize, int(rng.choice([2, 4])), platform_of_plan, kernels)
        problem = dataclasses.replace(problem, vocab_dim=int(rng.integers(2)))
        plan, logits = make_plan(problem), logits_bytes(problem)
        modes = [make_plan(dataclasses.replace(problem, mode=mode)) for mode in ("fast", "lean")]
        assert plan.extra_bytes <= max(logits, min(found.extra_bytes for found in modes)), (problem, plan)


def test_the_compiled_lean_loss_takes_what_is_planned_at_random_sizes(platform, rng):
    """Within an eighth and 256 KiB of XLA's lean mode on a CPU; tests/aot has Hopper's."""
    if platform != "cpu":
        pytest.skip("the bound is a CPU's")
    for _ in range(3):
        n, d, v = (int(2 ** rng.uniform(*powers)) for powers in ((8, 11), (5, 9), (12, 16)))
        plan = plan_fused_linear_cross_entropy(n, d, v, dtype=jnp.float32, mode="lean", implementation="xla")
        loss = lambda h, w, y: fused_linear_cross_entropy(h, w, y, mode="lean", implementation="xla")
        types = [jax.ShapeDtypeStruct(*x) for x in (((n, d), jnp.float32), ((v, d), jnp.float32), ((n,), jnp.int32))]
        step = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*types).compile()
        extra = step.memory_analysis().temp_size_in_bytes
        assert abs(extra - plan.extra_bytes) <= plan.extra_bytes / 8 + 2**18, (n, d, v, plan, extra)
