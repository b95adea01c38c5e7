"""Experts on the devices of a mesh axis, beside all experts on one device."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from liger_jax.ops import moe_mlp
from liger_jax.ops.block_quantized import block_quantized
from liger_jax.ops.experts.adapted_moe_mlp import ExpertAdapter, adapted_moe_mlp
from liger_jax.ops.experts.expert_parallel import rows_at_once
from tests.ops import _oracle

D, F, RANK = 8, 4, 3
ORDER = ("gate_up", "down", "gate_up_bias", "down_bias", "gate_up_adapter", "down_adapter")


@dataclasses.dataclass(frozen=True)
class Case:
    """A mixture over devices. `chosen` names what routers choose."""

    devices: int
    k: int
    chosen: str = "any"
    own: int = 2  # experts of each device
    biases: bool = False
    adapters: bool = False
    dtype: str = "float32"

    @property
    def tokens(self):
        return 5 * self.devices

    def problem(self, rng):
        """Tokens, weights and the experts' arrays; which experts are chosen; and a cotangent."""
        count, wide = self.own * self.devices, lambda *shape: rng.standard_normal(shape) / shape[-2] ** 0.5
        among = self.k if self.chosen == "the first k" else count
        experts = np.stack([rng.permutation(among)[: self.k] for _ in range(self.tokens)])
        if self.chosen == "one expert":
            experts[:] = count - 1
        dy = rng.standard_normal((self.tokens, D))
        if self.chosen == "a wrong one":
            experts[3, -1], experts[4, 0], dy[3] = -1, count, np.nan
        arrays: list[Any] = [wide(self.tokens, D), rng.random((self.tokens, self.k))]
        arrays += [wide(count, D, 2 * F), wide(count, F, D)]
        arrays += [wide(count, 2 * F), wide(count, D)] if self.biases else [None, None]
        if self.adapters:
            arrays += [ExpertAdapter(wide(count, D, RANK), wide(count, RANK, 2 * F))]
            arrays += [ExpertAdapter(wide(count, F, RANK), wide(count, RANK, D))]
        arrays, dy = jax.tree.map(lambda x: jnp.asarray(x, self.dtype), (arrays, dy))
        return arrays, jnp.asarray(experts, jnp.int32), dy


def feed_forward(op, **options):
    """The op as a function of what `Case.problem` returns."""
    return lambda experts, x, weights, *arrays: op(
        x, weights, experts, **dict(zip(ORDER, arrays, strict=False)), activation="silu", **options
    )


def over_devices(number, devices, check_vma=False):
    mesh = jax.make_mesh((number,), ("x",), devices=devices[:number], axis_types=(AxisType.Auto,))
    own = feed_forward(adapted_moe_mlp, axis="x")
    return jax.shard_map(own, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma)


def program(function, experts):
    """The value and the gradients by all arrays."""

    @jax.jit
    def run(dy, *arrays):
        with jax.default_matmul_precision("highest"):
            y, pullback = jax.vjp(lambda *arrays: function(experts, *arrays), *arrays)
            return y, pullback(dy)

    return run


def found_and_expected(case, rng, devices, **options):
    arrays, experts, dy = case.problem(rng)
    found = program(over_devices(case.devices, devices, **options), experts)(dy, *arrays)
    op = adapted_moe_mlp if case.adapters else moe_mlp
    return found, program(feed_forward(op), experts)(dy, *arrays)


def assert_like_one_device(case, rng, devices, **options):
    found, expected = found_and_expected(case, rng, devices, **options)
    for own, true in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.isnan(own), np.isnan(true))
        bound = 20 * float(jnp.finfo(case.dtype).eps) * np.nanmax(np.abs(true))
        np.testing.assert_allclose(own, true, rtol=0, atol=bound)


CASES = [
    Case(2, 2, "a wrong one"),
    Case(2, 2, "the first k"),  # all rows go to the first device
    *(Case(devices, k) for devices in (2, 4) for k in (1, 2)),
    *(Case(devices, 8, own=8 // devices) for devices in (2, 4)),  # every token goes to all experts
    Case(2, 2, own=1),  # one expert a device, and every token goes to both
    Case(2, 1, "one expert", own=8),  # 15 experts are empty
    Case(2, 8, own=8),
    Case(4, 8, own=4),
    Case(4, 2, "the first k"),
    Case(4, 2, "one expert"),  # twice for each token
    Case(4, 2, "a wrong one", biases=True),
    Case(4, 2, "the first k", adapters=True),
]


@pytest.mark.parametrize("case", _oracle.first(2, CASES), ids=str)
def test_values_and_gradients_are_those_of_one_device(case, rng, devices):
    assert_like_one_device(case, rng, devices)


@pytest.mark.full
@pytest.mark.parametrize("case", [Case(4, 2, "the first k", biases=True), Case(4, 2, adapters=True)], ids=str)
def test_they_are_where_jax_checks_what_varies(case, rng, devices):
    assert_like_one_device(case, rng, devices, check_vma=True)


@pytest.mark.full
@pytest.mark.parametrize("case", [Case(2, 2), Case(4, 8, own=4), Case(4, 2, "the first k", biases=True)], ids=str)
def test_they_are_in_float64(case, rng, devices):
    with jax.enable_x64(True):
        assert_like_one_device(dataclasses.replace(case, dtype="float64"), rng, devices)


@pytest.mark.full
@pytest.mark.parametrize("case", [Case(4, 8, own=4), Case(4, 2, "the first k")], ids=str)
def test_results_and_gradients_in_bfloat16_are_about_as_exact_as_one_device_s(case, rng, devices):
    half = dataclasses.replace(case, dtype="bfloat16")
    arrays, experts, dy = half.problem(rng)
    wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    found = program(over_devices(case.devices, devices), experts)(dy, *arrays)
    alone = program(feed_forward(moe_mlp), experts)(dy, *arrays)
    exact = program(feed_forward(moe_mlp), experts)(wide(dy), *wide(arrays))
    for own, other, true in zip(*map(jax.tree.leaves, wide((found, alone))), jax.tree.leaves(exact), strict=True):
        of = lambda x, true=true: float(jnp.sqrt(jnp.mean((x - true) ** 2)))
        assert of(own) <= 1.5 * of(other)


@pytest.mark.full
def test_quantised_experts_and_their_adapters_are_those_of_one_device(rng, devices):
    case = Case(4, 2, "the first k", adapters=True)
    (x, weights, *dense, _, _, of_gate_up, of_down), experts, dy = case.problem(rng)
    quantised = [block_quantized(array, "nf4", block_size=2) for array in dense]

    def of(function):
        whole = lambda *trained: function(experts, *trained[:2], *quantised, None, None, *trained[2:])
        return jax.jit(lambda dy, *trained: jax.vjp(whole, *trained)[1](dy))(dy, x, weights, of_gate_up, of_down)

    found, expected = of(over_devices(4, devices)), of(feed_forward(adapted_moe_mlp))
    for own, true in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(own, true, rtol=0, atol=1e-5 * np.abs(true).max())


def test_tokens_are_sent_once_and_rows_are_no_more_than_half_more_than_a_share(rng, devices):
    """The backward gathers the tokens again, and the gradients of their sums; its own sums are scattered, too."""
    number = len(devices)
    case = Case(number, 4, own=16 // number)
    arrays, experts, dy = case.problem(rng)
    forward = lambda *arrays: over_devices(number, devices)(experts, *arrays)
    backward = lambda dy, *arrays: jax.vjp(forward, *arrays)[1](dy)
    for function, operands, expected in ((forward, arrays, (1, 1)), (backward, (dy, *arrays), (2, 1))):
        lowered = jax.jit(function).lower(*operands)
        lines, text = _oracle.collectives(lowered), lowered.compile().as_text() or ""
        made = lambda kind, rows, lines=lines: sum(
            bool(re.search(rf"= .*f32\[{rows},{D}\].* {kind}(-start)?\(", line)) for line in lines
        )
        assert (made("all-gather", case.tokens), made("reduce-scatter", case.tokens // number)) == expected
        assert not [line for line in lines if not re.search(r" (all-gather|reduce-scatter)(-start|-done)?\(", line)]
        rows = {int(n) for n in re.findall(rf"f32\[(\d+),(?:{D}|{F}|{2 * F})\]", text)}
        assert max(rows) == rows_at_once(case.tokens * case.k, number) < case.tokens * case.k
