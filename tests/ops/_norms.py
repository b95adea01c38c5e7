"""What every normalisation promises, as test methods that the classes of the single ones inherit.

A class names its op, the op's float64 reference, and the function that makes its arrays for an x of some shape.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from liger_jax.pallas_kernels.norms import tiles_triton
from tests._devices import several
from tests.ops import _oracle
from tests.ops._oracle import normal


class Promises:
    """A subclass sets `op` and `reference`, and those of the other attributes that differ from the ones here."""

    op = reference = staticmethod(NotImplemented)
    options: dict = {}  # options of the op and the reference
    # Ragged in every tile, one row, width 1, one axis, three axes, several pieces in Triton, and rows whose next ones
    # do not fit in its registers.
    shapes = [(37, 19), (1, 300), (33, 1), (1, 1), (70,), (3, 5, 129), (3, 4097), (3, 8195)]
    shape = (8, 5, 70)  # where one is enough; the first axis is split over devices
    limit = 1 / 8  # how large x can be, as a share of the largest finite number
    num_rows = 1  # arrays that are shaped like x; the rest are parameters
    num_optional = 1  # arrays at the end that can be None

    def parameters(self, rng, shape, dtype):
        return normal(rng, shape[-1:], dtype=dtype)

    def arrays(self, rng, shape, dtype=jnp.float32, parameter_dtype=None):
        return normal(rng, *[shape] * self.num_rows, dtype=dtype) + self.parameters(
            rng, shape, parameter_dtype or dtype
        )

    def make(self, implementation, **options):
        """The op and its reference, as functions of the arrays that are there."""
        options = self.options | options
        reference = functools.partial(self.reference, **{k: v for k, v in options.items() if k != "casting_mode"})
        count = len(self.arrays(np.random.default_rng(0), self.shape))
        op = functools.partial(self.op, implementation=implementation, **options)
        return op, lambda *arrays: reference(*arrays, *[None] * (count - len(arrays)))

    def plain(self, *arrays, **options):
        """The plain expression that a model would use: float32, rounded once."""
        _, reference = self.make("xla", **options)
        with jax.numpy_rank_promotion("allow"):
            return reference(*(x.astype(jnp.float32) for x in arrays)).astype(arrays[0].dtype)

    def check_few(self, op, reference, arrays, rng):
        """Gradients by parameters of a few numbers: sums of many terms of order 1, which may cancel by chance."""
        few = [i for i in range(len(arrays)) if i not in self.many(arrays)]
        if not few:
            return
        cotangents = _oracle.random_cotangents(op, arrays, rng)
        results = _oracle.value_and_gradients(op, arrays, cotangents, few)
        expected = _oracle.truth(reference, arrays, cotangents, few)
        for i in range(-len(few), 0):
            allowed = _oracle.TOLERANCE * max(np.abs(expected[i]).max(), arrays[0].size ** 0.5)
            assert np.abs(results[i] - expected[i]).max() <= allowed

    def many(self, arrays):
        """The arrays of rows, and the parameters of many numbers."""
        return [i for i, x in enumerate(arrays) if i < self.num_rows or x.size >= 64]

    def check_float32(self, op, reference, arrays, rng):
        self.check_few(op, reference, arrays, rng)
        _oracle.check_float32(op, reference, arrays, rng, wrt=self.many(arrays))

    def half_or_skip(self, dtype, implementation):
        if dtype == "float16" and implementation.startswith("mosaic_tpu"):
            pytest.skip("Mosaic has no float16, and says so: test_float16_is_refused_on_tpu")

    def test_every_shape_matches_float64(self, shape, num_present, implementation, rng):
        # With a smaller eps, the gradient of a row of width 1 cancels to nothing.
        op, reference = self.make(implementation, **({"eps": 0.1} if "eps" in self.options else {}))
        arrays = self.arrays(rng, shape)
        self.check_float32(op, reference, arrays[: len(arrays) - self.num_optional + num_present], rng)

    @pytest.mark.parametrize("width", _oracle.first(1, [2304, 4097, 8195]))
    def test_more_rows_than_programs_match_float64(self, width, implementation, rng, monkeypatch):
        if not implementation.startswith("triton"):
            pytest.skip("only Triton's programs walk over rows")
        monkeypatch.setattr(tiles_triton, "MULTIPROCESSORS", 1)  # as if for a GPU this small
        op, reference = self.make(implementation)
        self.check_float32(op, reference, self.arrays(rng, (43, width)), rng)

    @pytest.mark.parametrize("dtype", _oracle.first(1, ["bfloat16", "float16"]))
    def test_half_precision_is_no_worse_than_the_plain_expression(self, dtype, implementation, rng):
        self.half_or_skip(dtype, implementation)
        op, reference = self.make(implementation)
        _oracle.check_half(op, self.plain, reference, self.arrays(rng, (30, 5, 70), dtype), rng)

    def test_float32_parameters_with_bfloat16_inputs_keep_their_gradients_dtype(self, implementation, rng):
        op, reference = self.make(implementation)
        arrays = self.arrays(rng, (30, 5, 70), jnp.bfloat16, jnp.float32)
        self.check_few(op, reference, arrays, rng)
        _oracle.check_half(op, self.plain, reference, arrays, rng, wrt=self.many(arrays))
        gradients = jax.grad(lambda *xs: jax.tree.leaves(op(*xs))[0].astype(jnp.float32).sum(), range(len(arrays)))
        assert [g.dtype for g in jax.eval_shape(gradients, *arrays)] == [x.dtype for x in arrays]

    def test_rows_of_zeros_match_float64(self, implementation, rng):
        arrays = self.arrays(rng, self.shape)
        arrays[: self.num_rows] = [x.at[::3].set(0.0) for x in arrays[: self.num_rows]]
        self.check_float32(*self.make(implementation), arrays, rng)

    def test_a_row_of_nan_changes_no_other_row(self, implementation, rng):
        """A row in the same tile may even overflow when squared; it is then summed in another way."""
        x = jnp.ones((8, 70)).at[0].set(jnp.nan).at[1, ::2].set(3e37)
        arrays = [x] * self.num_rows + self.arrays(rng, x.shape, jnp.float32)[self.num_rows :]
        op = jax.jit(self.make(implementation)[0])
        y = jax.tree.leaves(op(*arrays))[0]
        alone = jax.tree.leaves(op(*[a[1:] if a.ndim == 2 else a for a in arrays]))[0]
        assert jnp.isnan(y[0]).all()
        assert jnp.allclose(y[1:], alone, rtol=1e-5)

    @pytest.mark.parametrize("dtype", _oracle.first(2, ["float32", "bfloat16", "float16"]))
    def test_the_largest_numbers_are_normalised_and_have_finite_gradients(self, dtype, implementation, rng):
        self.half_or_skip(dtype, implementation)
        op, reference = self.make(implementation)
        arrays = self.arrays(rng, self.shape, dtype)
        largest = self.limit * float(jnp.finfo(dtype).max)
        arrays[: self.num_rows] = [x / jnp.abs(x).max() * largest for x in arrays[: self.num_rows]]
        cotangents = _oracle.random_cotangents(op, arrays, rng)
        results = _oracle.value_and_gradients(op, arrays, cotangents)
        expected = _oracle.truth(reference, arrays, cotangents)
        # Two roundings, of the normalised row and of the result.
        assert _oracle.largest_error(results[0], expected[0]) <= max(_oracle.TOLERANCE, 2 * jnp.finfo(dtype).eps)
        assert all(jnp.isfinite(x).all() for x in results)

    @pytest.mark.parametrize("dtype", _oracle.first(1, ["float32", "bfloat16"]))
    @pytest.mark.parametrize("eps", [0.0, 1e-38])
    def test_the_smallest_numbers_are_normalised_where_eps_is_zero(self, eps, dtype, implementation, rng):
        """Rows whose squares vanish in float32, beside a row whose squares do not, and one whose squares overflow."""
        if "eps" not in self.options:
            pytest.skip("it takes no root")
        op, reference = self.make(implementation, eps=eps)
        scales = jnp.array([1e-25, 1.0, 1e-14, 1e30, 1e-32])[:, None]
        arrays = self.arrays(rng, (5, 70), dtype)
        arrays[: self.num_rows] = [(x.astype(jnp.float32) * scales).astype(dtype) for x in arrays[: self.num_rows]]
        cotangents = _oracle.random_cotangents(op, arrays, rng)
        results = _oracle.value_and_gradients(op, arrays, cotangents, range(self.num_rows))
        expected = _oracle.truth(reference, arrays, cotangents, range(self.num_rows))
        for result, true in zip(results, expected, strict=True):
            for row, true_row in zip(np.asarray(result, np.float64), true, strict=True):
                assert _oracle.largest_error(row, true_row) <= max(5 * _oracle.TOLERANCE, 4 * jnp.finfo(dtype).eps)

    def test_no_rows_give_no_rows_and_zero_gradient(self, num_present, implementation, rng):
        shape = (0, *self.shape[1:])
        arrays = self.arrays(rng, shape)
        arrays = arrays[: len(arrays) - self.num_optional + num_present]
        op, _ = self.make(implementation)
        cotangents = _oracle.random_cotangents(op, arrays, rng)
        y, *others = _oracle.value_and_gradients(op, arrays, cotangents)
        assert y.shape == shape
        assert [x.shape for x in others[-len(arrays) :]] == [x.shape for x in arrays]
        assert all(not x.any() for x in others)

    def test_rows_do_not_see_each_other(self, implementation, rng):
        op = jax.jit(lambda *arrays: jax.tree.leaves(self.make(implementation)[0](*arrays))[0])
        x, *others = self.arrays(rng, (9, *self.shape[1:]))
        y = op(x.at[4].set(jnp.nan), *others)
        assert jnp.isnan(y[4]).all()
        rest = jnp.arange(9) != 4
        assert jnp.array_equal(y[rest], op(x, *others)[rest])

    def test_no_more_than_the_inputs_is_kept_for_the_backward(self, implementation, rng):
        arrays = self.arrays(rng, self.shape)
        # Several inputs of rows are added, and their sum is kept.
        per_row = 3 if implementation.startswith("triton") else 0  # its sums
        _oracle.check_residuals(self.make(implementation)[0], arrays, arrays[self.num_rows - 1 :], per_row=per_row)

    def test_vmap(self, parameters_shared, implementation, rng):
        arrays = self.arrays(rng, self.shape)
        shared = range(self.num_rows, len(arrays)) if parameters_shared else ()
        _oracle.check_vmap(self.make(implementation)[0], arrays, rng, self.many(arrays), shared)

    def test_checkpoint(self, implementation, rng):
        arrays = self.arrays(rng, self.shape)
        _oracle.check_checkpoint(self.make(implementation)[0], arrays, rng, implementation, self.many(arrays))

    def test_scan(self, implementation, rng):
        arrays = self.arrays(rng, self.shape)
        _oracle.check_scan(self.make(implementation)[0], arrays, rng, self.many(arrays))

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_shard_map_with_replicated_parameters(self, check_vma, implementation, rng):
        arrays, split = self.arrays(rng, self.shape), range(self.num_rows)
        op, reference = self.make(implementation)
        _oracle.check_shard_map(op, arrays, rng, implementation, check_vma, self.many(arrays), split)
        with several(implementation) as devices:
            mesh = jax.sharding.Mesh(devices, ("data",))
            specs = tuple(PartitionSpec("data") if i in split else PartitionSpec() for i in range(len(arrays)))
            options = {"mesh": mesh, "in_specs": specs, "out_specs": PartitionSpec("data"), "check_vma": check_vma}
            self.check_few(jax.jit(jax.shard_map(op, **options)), reference, arrays, rng)

    @pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
    def test_xla_is_partitioned_over_rows_without_communication(self, axis_type, devices, rng):
        mesh = jax.sharding.Mesh(devices, ("data",), axis_types=(axis_type,))
        arrays, rows = self.arrays(rng, self.shape), range(self.num_rows)
        op, _ = self.make("xla")
        cotangents = _oracle.random_cotangents(op, arrays, rng)
        place = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))
        placed = [place(x, "data") if i in rows else place(x) for i, x in enumerate(arrays)]
        split = jax.tree.map(lambda x: place(x, "data"), cotangents)
        run = jax.jit(lambda arrays, cotangents: _oracle.value_and_gradients(op, arrays, cotangents, rows))
        results = run(placed, split)
        assert all(x.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("data")), x.ndim) for x in results)
        assert not _oracle.collectives(run.lower(placed, split))
        _oracle.assert_same(results, run(arrays, cotangents))

    @pytest.mark.parametrize("eps", [-1.0, float("nan"), float("inf")])
    def test_a_root_of_less_than_nothing_is_refused(self, eps, rng):
        if "eps" not in self.options:
            pytest.skip("it takes no root")
        with pytest.raises(ValueError, match=f"^{self.op.__name__}: eps={eps} must be finite and ≥ 0"):
            self.op(*self.arrays(rng, self.shape), **self.options | {"eps": eps})


class LastAxisPromises(Promises):
    """What normalisations of the last axis refuse."""

    def test_scalars_and_integers_are_refused(self, unchecked_types, rng):
        arrays = self.arrays(rng, self.shape)
        rows, parameters, name = arrays[: self.num_rows], arrays[self.num_rows :], self.op.__name__
        with pytest.raises(ValueError, match=rf"^{name}: x has shape \(\), but must have at least one axis .* reshape"):
            self.op(*[jnp.ones(())] * self.num_rows, *parameters)
        with pytest.raises(TypeError, match=f"^{name}: x has dtype int32, but must be floating point; cast it"):
            self.op(rows[0].astype(int), *rows[1:], *parameters)


class KernelPromises(LastAxisPromises):
    """What normalisations with Pallas kernels refuse."""

    def call(self, width, dtype, implementation):
        arrays = self.arrays(np.random.default_rng(0), (4, width), dtype)
        return jax.eval_shape(functools.partial(self.op, implementation=implementation), *arrays)

    def test_float16_is_refused_on_tpu(self, platform):
        name = "mosaic_tpu" if platform == "tpu" else "mosaic_tpu:interpret"
        with pytest.raises(ValueError, match=r"supports float32 and bfloat16, and x is float16; use 'xla'\."):
            self.call(8, jnp.float16, name)

    @pytest.mark.parametrize(
        "name, message",
        [
            ("triton:interpret", r"a row of 65537 elements exceeds 65536, what one program holds; use 'xla'\."),
            ("mosaic_tpu:interpret", r"16 rows of 65537 elements exceed VMEM; use 'xla'\."),
        ],
    )
    def test_rows_too_long_for_a_kernel_are_refused(self, name, message):
        with pytest.raises(ValueError, match=message):
            self.call(65537, jnp.float32, name)
