"""What apply_rope and apply_mrope promise."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax import apply_mrope, apply_rope, rope_table
from tests.ops import _oracle
from tests.ops._oracle import normal
from tests.ops.references import plain as reference

KERNELS = ("xla",)
BY_HEADS = (0, 1)  # cos and sin are constants


class Shape(NamedTuple):
    """The sizes of q (B, T, Q, H), k (B, T, K, H), cos and sin (table_batch, T, R)."""

    B: int
    T: int
    Q: int
    K: int
    H: int
    R: int
    table_batch: int


SHAPES = [
    Shape(2, 33, 12, 4, 16, 16, 1),
    Shape(3, 7, 6, 1, 10, 10, 3),  # nothing a power of two, a table for each sequence
    Shape(2, 5, 3, 3, 20, 12, 1),  # partial
    Shape(2, 5, 2, 5, 7, 2, 2),  # partial, an odd head width, more keys than queries
    Shape(1, 1, 1, 1, 2, 2, 1),  # one row
    Shape(1, 3, 2, 1, 1, 0, 1),  # width 1
    Shape(2, 3, 1, 1, 5, 0, 1),  # nothing rotated
    Shape(2, 64, 3, 1, 16, 16, 2),
]
ONE = SHAPES[2]  # where one is enough
shapes = pytest.mark.parametrize("shape", _oracle.first(3, SHAPES), ids=str)
layouts = pytest.mark.parametrize("layout", ["half", "interleaved"])


def make_arrays(rng, shape, dtype=jnp.float32):
    """q, k, cos and sin; the tables are no rotation's, so that their halves are told apart."""
    table = (shape.table_batch, shape.T, shape.R)
    heads = normal(rng, (shape.B, shape.T, shape.Q, shape.H), (shape.B, shape.T, shape.K, shape.H), dtype=dtype)
    return [*heads, *normal(rng, table, table)]


def rotary_tables(shape):
    return rope_table(jnp.arange(shape.T)[None], shape.R)


def make(implementation, layout="half", op=apply_rope, **options):
    return functools.partial(op, layout=layout, implementation=implementation, **options)


def oracle(layout):
    return functools.partial(reference.apply_rope, layout=layout)


def plain(q, k, cos, sin, layout="half"):
    """The plain expression that a model would use, in float32, rounded once."""
    widen = lambda x: x.astype(jnp.float32)
    rotated = reference.apply_rope(widen(q), widen(k), widen(cos), widen(sin), layout)
    return rotated[0].astype(q.dtype), rotated[1].astype(k.dtype)


@layouts
@shapes
def test_every_shape_matches_float64(shape, layout, implementation, rng):
    _oracle.check_float32(make(implementation, layout), oracle(layout), make_arrays(rng, shape), rng, wrt=BY_HEADS)


@layouts
@pytest.mark.parametrize("dtype", _oracle.first(1, ["bfloat16", "float16"]))
def test_half_precision_is_no_worse_than_the_plain_expression(dtype, layout, implementation, rng):
    arrays = make_arrays(rng, Shape(2, 65, 4, 2, 24, 16, 1), dtype)
    theirs = functools.partial(plain, layout=layout)
    _oracle.check_half(make(implementation, layout), theirs, oracle(layout), arrays, rng, wrt=BY_HEADS)


def test_interleaved_pairs_are_halves_of_sorted_columns(rng):
    """This turns Meta's checkpoints into Hugging Face's."""
    shape = Shape(2, 9, 3, 1, 16, 16, 1)
    q, k, *_ = make_arrays(rng, shape)
    order = jnp.concatenate([jnp.arange(0, 16, 2), jnp.arange(1, 16, 2)])
    rotated = jax.jit(apply_rope, static_argnames="layout")
    interleaved = rotated(q, k, *rotary_tables(shape), layout="interleaved")
    halves = rotated(q[..., order], k[..., order], *rotary_tables(shape))
    assert all(jnp.array_equal(x[..., order], y) for x, y in zip(interleaved, halves, strict=True))


@layouts
def test_rotation_multiplies_complex_pairs_by_the_phase(layout, implementation, rng):
    q, k, *_ = make_arrays(rng, shape := Shape(1, 5, 2, 1, 6, 6, 1))
    phases = np.exp(1j * np.arange(5)[:, None] * 10000.0 ** (-np.arange(3) / 3))[None, :, None, :]
    rotated = make(implementation, layout)(q, k, *rotary_tables(shape))
    first, second = (slice(0, 3), slice(3, 6)) if layout == "half" else (slice(0, 6, 2), slice(1, 6, 2))
    for x, y in zip((q, k), rotated, strict=True):
        turned = (np.float64(x[..., first]) + 1j * np.float64(x[..., second])) * phases
        assert _oracle.largest_error(y[..., first], turned.real) < 1e-6
        assert _oracle.largest_error(y[..., second], turned.imag) < 1e-6


@pytest.mark.parametrize("dtype", _oracle.first(1, ["bfloat16", "float16"]))
def test_values_near_the_limit_of_the_dtype_stay_finite(dtype, implementation, rng):
    """Halves of the largest number rotated by 45° give 0.71 of it, and no product on the way overflows."""
    largest = jnp.finfo(dtype).max / 2
    q = jnp.full((1, 3, 2, 8), largest, dtype)
    tables = [jnp.full((1, 3, 8), 0.5**0.5)] * 2
    results = _oracle.value_and_gradients(make(implementation), [q, q, *tables], (q, q), BY_HEADS)
    assert all(jnp.isfinite(x.astype(jnp.float32)).all() for x in results)
    assert _oracle.largest_error(results[0][..., 4:], np.full((1, 3, 2, 4), float(largest) * 2**0.5)) < 0.01


def test_half_precision_tables_are_taken_as_they_are(implementation, rng):
    q, k, cos, sin = make_arrays(rng, ONE, jnp.bfloat16)
    cos, sin = cos.astype(jnp.bfloat16), sin.astype(jnp.bfloat16)
    results = make(implementation)(q, k, cos, sin)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, results, plain(q, k, cos, sin)))


def test_queries_and_keys_keep_their_own_dtypes(implementation, rng):
    q, k, cos, sin = make_arrays(rng, ONE)
    arrays = [q.astype(jnp.bfloat16), k, cos, sin]
    _oracle.check_half(make(implementation), plain, reference.apply_rope, arrays, rng, wrt=BY_HEADS)
    q_out, k_out, dq, dk = _oracle.value_and_gradients(make(implementation), arrays, (q, k), BY_HEADS)
    assert [x.dtype for x in (q_out, k_out, dq, dk)] == [jnp.bfloat16, jnp.float32] * 2


@layouts
def test_gradient_is_the_inverse_rotation(layout, implementation, rng):
    shape = Shape(2, 33, 4, 2, 16, 16, 1)
    q, k, *_ = make_arrays(rng, shape)
    op = make(implementation, layout)
    _, pullback = jax.vjp(lambda q, k: op(q, k, *rotary_tables(shape)), q, k)
    back = pullback(op(q, k, *rotary_tables(shape)))
    assert _oracle.largest_error(back[0], q) < 1e-6
    assert _oracle.largest_error(back[1], k) < 1e-6


def test_score_depends_on_the_distance_only(implementation, rng):
    shape = Shape(1, 20, 1, 1, 16, 16, 1)
    q, k = normal(rng, (16,), (16,))
    rows = jnp.zeros((1, 20, 1, 16))
    q_out, k_out = make(implementation)(rows + q[None, None, None], rows + k[None, None, None], *rotary_tables(shape))
    scores = q_out[0, :, 0] @ k_out[0, :, 0].T
    for distance in (0, 3, -5):
        diagonal = np.diagonal(scores, distance)
        assert np.ptp(diagonal) < 1e-4 * np.abs(scores).max()
    assert abs(scores[0, 3] - scores[3, 0]) > 1e-3  # and so the sense of the rotation counts


@pytest.mark.parametrize("shape", _oracle.first(1, [SHAPES[3], SHAPES[2]]), ids=str)
def test_columns_behind_the_rotary_ones_pass_through(shape, implementation, rng):
    arrays = make_arrays(rng, shape, jnp.bfloat16)
    cotangents = _oracle.random_cotangents(make(implementation), arrays, rng)
    q_out, k_out, dq, dk = _oracle.value_and_gradients(make(implementation), arrays, cotangents, BY_HEADS)
    for result, source in zip((q_out, k_out, dq, dk), (*arrays[:2], *cotangents), strict=True):
        assert jnp.array_equal(result[..., shape.R :].astype(jnp.float32), source[..., shape.R :].astype(jnp.float32))


@layouts
def test_only_the_tables_are_kept_for_the_backward(layout, implementation, rng):
    arrays = make_arrays(rng, ONE)
    _oracle.check_residuals(make(implementation, layout), arrays, kept=arrays[2:], wrt=BY_HEADS)


def test_an_output_that_nothing_depends_on_gives_zero_gradient(implementation, rng):
    q, k, cos, sin = make_arrays(rng, ONE)
    dq, dk = jax.grad(lambda q, k: make(implementation)(q, k, cos, sin)[0].sum(), (0, 1))(q, k)
    assert dq.any() and not dk.any()


@pytest.mark.parametrize(
    "wrapped", _oracle.first(2, [jax.jit, jax.checkpoint, lambda f: f]), ids=["jit", "checkpoint", "plain"]
)
@pytest.mark.parametrize("name", ["cos", "sin"])
def test_differentiating_the_tables_is_an_error(name, wrapped, implementation, rng):
    q, k, *tables = make_arrays(rng, ONE)
    op = wrapped(lambda cos, sin: make(implementation)(q, k, cos, sin)[1].sum())
    with pytest.raises(TypeError, match=rf"^apply_rope: {name} is a constant.*stop_gradient\({name}\)"):
        jax.grad(op, ("cos", "sin").index(name))(*tables)


def test_no_tokens_give_no_tokens(implementation, rng):
    arrays = make_arrays(rng, Shape(2, 0, 4, 2, 16, 16, 1))
    results = _oracle.value_and_gradients(make(implementation), arrays, tuple(arrays[:2]), BY_HEADS)
    assert [x.shape for x in results] == [x.shape for x in arrays[:2]] * 2


@layouts
@pytest.mark.parametrize("shared", [(), (2, 3)], ids=["all mapped", "tables shared"])
def test_vmap(shared, layout, implementation, rng):
    _oracle.check_vmap(make(implementation, layout), make_arrays(rng, SHAPES[1]), rng, wrt=BY_HEADS, shared=shared)


def test_checkpoint(implementation, rng):
    _oracle.check_checkpoint(make(implementation), make_arrays(rng, ONE), rng, implementation, wrt=BY_HEADS)


def test_scan(implementation, rng):
    _oracle.check_scan(make(implementation), make_arrays(rng, ONE), rng, wrt=BY_HEADS)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("table_batch", [1, 4], ids=["replicated table", "split table"])
def test_shard_map(table_batch, check_vma, implementation, rng):
    arrays = make_arrays(rng, Shape(4, 9, 4, 2, 16, 16, table_batch))
    split = BY_HEADS if table_batch == 1 else range(4)
    _oracle.check_shard_map(make(implementation), arrays, rng, implementation, check_vma, wrt=BY_HEADS, split=split)


@layouts
@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
def test_xla_is_partitioned_without_communication(axis_type, layout, rng):
    arrays = make_arrays(rng, Shape(4, 9, 4, 2, 16, 16, 1))
    _oracle.check_partitioned(make("xla", layout), arrays, rng, axis_type, wrt=BY_HEADS, split=BY_HEADS)


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
def test_mrope_in_xla_is_partitioned_without_communication(axis_type, rng):
    arrays = make_mrope_arrays(rng, Shape(4, 9, 4, 2, 16, 16, 1))
    op = make("xla", op=apply_mrope, sections=(2, 3, 3))
    _oracle.check_partitioned(op, arrays, rng, axis_type, wrt=BY_HEADS, split=BY_HEADS)


@pytest.mark.parametrize("op, sections", [(apply_rope, {}), (apply_mrope, {"sections": (1, 1, 0)})])
def test_there_is_no_other_kernel(op, sections):
    q, tables = jnp.ones((1, 1, 2, 4)), jnp.ones((3, 1, 1, 4) if sections else (1, 1, 4))
    message = rf"^{op.__name__}: implementation='triton' is unknown; this op has \('xla',\)"
    with pytest.raises(ValueError, match=message):
        op(q, q, tables, tables, implementation="triton", **sections)


# --- apply_mrope ------------------------------------------------------------------------------------------------------


def make_mrope_arrays(rng, shape, dtype=jnp.float32):
    """q, k, cos and sin, three tables in each."""
    q, k, *_ = make_arrays(rng, shape, dtype)
    table = (3, shape.table_batch, shape.T, shape.R)
    return [q, k, *normal(rng, table, table)]


SECTIONS = {"qwen2-vl": (2, 3, 3), "one empty": (5, 0, 3), "one table": (8, 0, 0)}
sections = pytest.mark.parametrize("sections", _oracle.first(1, list(SECTIONS.values())), ids=SECTIONS)


@sections
@layouts
@pytest.mark.parametrize("table_batch", [1, 2])
def test_mrope_matches_float64(table_batch, layout, sections, implementation, rng):
    arrays = make_mrope_arrays(rng, Shape(2, 9, 4, 2, 20, 16, table_batch))
    op = make(implementation, layout, apply_mrope, sections=sections)
    expected = functools.partial(reference.apply_mrope, sections=sections, layout=layout)
    _oracle.check_float32(op, expected, arrays, rng, wrt=BY_HEADS)


def test_mrope_of_equal_positions_is_rope(implementation, rng):
    """A text token's three positions are equal."""
    q, k, *_ = make_arrays(rng, shape := Shape(2, 9, 4, 2, 16, 16, 1))
    tables = rope_table(jnp.broadcast_to(jnp.arange(9), (3, 1, 9)), shape.R)
    threefold = apply_mrope(q, k, *tables, sections=(2, 3, 3), implementation=implementation)
    single = apply_rope(q, k, *rotary_tables(shape), implementation=implementation)
    assert all(jnp.array_equal(x, y) for x, y in zip(threefold, single, strict=True))


def test_mrope_keeps_only_the_tables_that_it_was_given(implementation, rng):
    """All layers share the tables. A table made from them inside a layer would be one more array for each layer."""
    arrays = make_mrope_arrays(rng, Shape(2, 9, 4, 2, 16, 16, 2))
    op = make(implementation, op=apply_mrope, sections=(2, 3, 3))
    _oracle.check_residuals(op, arrays, kept=arrays[2:], wrt=BY_HEADS)


@pytest.mark.parametrize("check_vma", [True, False])
def test_mrope_in_shard_map(check_vma, implementation, rng):
    arrays = make_mrope_arrays(rng, Shape(4, 9, 4, 2, 16, 16, 1))
    op = make(implementation, op=apply_mrope, sections=(2, 3, 3))
    _oracle.check_shard_map(op, arrays, rng, implementation, check_vma, wrt=BY_HEADS, split=BY_HEADS)


def test_mrope_under_vmap(implementation, rng):
    op = make(implementation, op=apply_mrope, sections=(1, 2, 2))
    _oracle.check_vmap(op, make_mrope_arrays(rng, SHAPES[1]), rng, wrt=BY_HEADS)


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_differentiating_the_tables_of_mrope_is_an_error(name, rng):
    q, k, *tables = make_mrope_arrays(rng, Shape(2, 9, 4, 2, 16, 16, 1))
    op = lambda cos, sin: apply_mrope(q, k, cos, sin, sections=(2, 3, 3))[1].sum()
    with pytest.raises(TypeError, match=rf"^apply_mrope: {name} is a constant.*stop_gradient\({name}\)"):
        jax.grad(op, ("cos", "sin").index(name))(*tables)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"cos": (1, 5, 16)}, r"cos has shape \(1, 5, 16\), but must be \(3, 1, T, R\) or \(3, B, T, R\)"),
        ({"cos": (2, 1, 5, 16)}, r"cos has shape \(2, 1, 5, 16\), but must be \(3, 1, T, R\) or \(3, B, T, R\)"),
        ({"sin": (3, 1, 5, 8)}, r"sin has shape \(3, 1, 5, 8\), but must have shape \(3, 1, 5, 16\): the shape of cos"),
        ({"sections": (2, 3, 4)}, r"sections=\(2, 3, 4\) must be three numbers of pairs, R/2=8 in sum; pass the conf"),
        ({"sections": (4, 4)}, r"sections=\(4, 4\) must be three numbers"),
        ({"sections": (9, -1, 0)}, r"sections=\(9, -1, 0\) must be three numbers"),
        ({"q": (2, 6, 4, 16)}, r"q has shape \(2, 6, 4, 16\) and k \(2, 5, 2, 16\), but they must be"),
    ],
)
def test_wrong_arguments_of_mrope_say_what_to_do(wrong, message, unchecked_types):
    good = {"q": (2, 5, 4, 16), "k": (2, 5, 2, 16), "cos": (3, 1, 5, 16), "sin": (3, 1, 5, 16), "sections": (2, 3, 3)}
    arguments = {**good, **wrong}
    sections = arguments.pop("sections")
    with pytest.raises(ValueError, match=f"^apply_mrope: {message}"):
        apply_mrope(*(jnp.ones(shape) for shape in arguments.values()), sections=sections)


# --- wrong arguments --------------------------------------------------------------------------------------------------

GOOD = {"q": (2, 5, 4, 16), "k": (2, 5, 2, 16), "cos": (1, 5, 16), "sin": (1, 5, 16)}


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"q": (5, 4, 16)}, r"q has shape \(5, 4, 16\) and k \(2, 5, 2, 16\), but they must be \(B, T, Q, H\) and"),
        ({"k": (2, 2, 5, 16)}, r"q has shape .* with the same B, T and H; transpose heads and positions if"),
        ({"k": (2, 5, 2, 8)}, r"q has shape .* with the same B, T and H"),
        ({"cos": (5, 16)}, r"cos has shape \(5, 16\), but must be \(1, 5, R\) or \(2, 5, R\).*index the table"),
        ({"cos": (3, 5, 16)}, r"cos has shape \(3, 5, 16\), but must be \(1, 5, R\) or \(2, 5, R\)"),
        ({"cos": (1, 8, 16)}, r"cos has shape \(1, 8, 16\), but must be \(1, 5, R\) or \(2, 5, R\)"),
        ({"cos": (1, 5, 7)}, r"cos has width R=7, but R must be even and at most H=16"),
        ({"cos": (1, 5, 18)}, r"cos has width R=18, but R must be even and at most H=16.*concatenated with itself"),
        ({"sin": (1, 5, 8)}, r"sin has shape \(1, 5, 8\), but must have shape \(1, 5, 16\): the shape of cos"),
    ],
)
def test_wrong_shapes_say_what_to_do(wrong, message, unchecked_types):
    with pytest.raises(ValueError, match=f"^apply_rope: {message}"):
        apply_rope(*(jnp.ones(shape) for shape in {**GOOD, **wrong}.values()))


@pytest.mark.parametrize("name", GOOD)
def test_integers_are_refused(name, unchecked_types):
    arrays = (jnp.ones(shape, int if argument == name else float) for argument, shape in GOOD.items())
    with pytest.raises(TypeError, match=f"^apply_rope: {name} has dtype int32, but must be floating point; cast it"):
        apply_rope(*arrays)


def test_unknown_layouts_are_refused():
    q, tables = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 1, 4))
    with pytest.raises(
        ValueError, match=r"^apply_rope: layout='neox' is unknown; pass one of \('half', 'interleaved'\)"
    ):
        apply_rope(q, q, tables, tables, layout="neox")
