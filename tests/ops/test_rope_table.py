"""What rope_table promises, against the published formulas written again in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax import DynamicRope, LinearRope, Llama3Rope, LongRope, ProportionalRope, YarnRope, rope_table
from tests.ops._oracle import collectives

# The angle is a float32 product of a float32 frequency: two roundings. The rest is cosine's, sine's and a scale's.
ANGLE_ERROR, TABLE_ERROR = 1.1 * 2**-23, 3e-7


def llama3_frequency(f, factor, low_freq_factor, high_freq_factor, original_max_position_embeddings):
    """By wavelength, in three branches, as Meta writes it."""
    wavelength = 2 * math.pi / f
    if wavelength < original_max_position_embeddings / high_freq_factor:
        return f
    if wavelength > original_max_position_embeddings / low_freq_factor:
        return f / factor
    smooth = original_max_position_embeddings / wavelength - low_freq_factor
    smooth /= high_freq_factor - low_freq_factor
    return (1 - smooth) * f / factor + smooth * f


def yarn_frequencies(width, theta, factor, original, beta_fast=32, beta_slow=1, truncate=True):
    """Interpolated and extrapolated frequencies, weighted by the paper's ramp over the columns."""
    extrapolated = [theta ** (-2 * i / width) for i in range(width // 2)]
    edges = [
        width * math.log(original / (2 * math.pi * beta)) / (2 * math.log(theta)) for beta in (beta_fast, beta_slow)
    ]
    if truncate:
        edges = [math.floor(edges[0]), math.ceil(edges[1])]
    low, high = max(edges[0], 0), min(edges[1], width - 1)
    if low == high:
        high += 0.001
    ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(width // 2)]
    return [f / factor * r + f * (1 - r) for f, r in zip(extrapolated, ramp, strict=True)]


def expected(positions, width, theta, scaling):
    """cos and sin in float64."""
    frequencies, scale = [theta ** (-2 * i / width) for i in range(width // 2)], 1.0
    if isinstance(scaling, LinearRope):
        frequencies = [f / scaling.factor for f in frequencies]
    if isinstance(scaling, DynamicRope):
        original, length = scaling.original_max_position_embeddings, positions.max() + 1
        growth = scaling.factor * max(length, original) / original - (scaling.factor - 1)
        theta = theta * growth ** (width / (width - 2))
        frequencies = [theta ** (-2 * i / width) for i in range(width // 2)]
    if isinstance(scaling, Llama3Rope):
        fields = scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor
        original = scaling.original_max_position_embeddings
        frequencies = [llama3_frequency(f, *fields, original) for f in frequencies]
    if isinstance(scaling, YarnRope):
        original, betas = scaling.original_max_position_embeddings, (scaling.beta_fast, scaling.beta_slow)
        frequencies = yarn_frequencies(width, theta, scaling.factor, original, *betas, scaling.truncate)
        scale = 0.1 * math.log(scaling.factor) + 1
        if scaling.attention_factor is not None:
            scale = scaling.attention_factor
        elif scaling.mscale and scaling.mscale_all_dim:
            scale = (0.1 * scaling.mscale * math.log(scaling.factor) + 1) / (
                0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1
            )
    angles = np.asarray(positions, np.float64)[..., None] * np.concatenate([frequencies, frequencies])
    return angles, scale * np.cos(angles), scale * np.sin(angles), scale


def assert_tables(tables, positions, width, theta, scaling, angle_error=ANGLE_ERROR):
    angles, *truth, scale = expected(positions, width, theta, scaling)
    for table, true in zip(tables, truth, strict=True):
        assert table.dtype == jnp.float32 and table.shape == true.shape
        error = np.abs(np.float64(table) - true)
        assert np.all(error <= scale * (angle_error * angles + TABLE_ERROR)), error.max()


SCALINGS = [
    None,
    LinearRope(factor=4.0),
    DynamicRope(factor=2.0, original_max_position_embeddings=512),
    DynamicRope(factor=2.0, original_max_position_embeddings=100_000),  # longer than the sequence: no change
    Llama3Rope(factor=8.0),
    Llama3Rope(factor=32.0, low_freq_factor=1.5, high_freq_factor=3.0, original_max_position_embeddings=1024),
    YarnRope(factor=4.0, original_max_position_embeddings=2048),
    YarnRope(factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=1.0),
    YarnRope(factor=32.0, original_max_position_embeddings=4096, truncate=False, attention_factor=0.9),
    YarnRope(factor=8.0, original_max_position_embeddings=64, beta_fast=4.0, beta_slow=3.9),
]


by_name = lambda scaling: type(scaling).__name__


@pytest.mark.parametrize("theta, width", [(10000.0, 64), (500000.0, 128), (1e6, 10)])
@pytest.mark.parametrize("scaling", SCALINGS, ids=by_name)
def test_tables_match_the_published_formulas(scaling, theta, width, rng):
    positions = np.sort(rng.integers(0, 8192, (2, 300)))
    # Dynamic frequencies come out of float32 logarithms and exponentials.
    angle_error = 10 * ANGLE_ERROR if isinstance(scaling, DynamicRope) else ANGLE_ERROR
    tables = rope_table(jnp.asarray(positions), width, theta=theta, scaling=scaling)
    assert_tables(tables, positions, width, theta, scaling, angle_error)


@pytest.mark.parametrize("scaling", SCALINGS[1:3] + SCALINGS[5:], ids=by_name)
def test_scaling_changes_the_tables(scaling):
    positions = jnp.arange(2048)[None]
    plain, scaled = rope_table(positions, 64), rope_table(positions, 64, scaling=scaling)
    assert max(float(jnp.max(jnp.abs(x - y))) for x, y in zip(plain, scaled, strict=True)) > 0.1


def test_positions_may_have_any_leading_axes(rng):
    positions = rng.integers(0, 100, (3, 2, 7))
    for shape in ((7,), (2, 7), (3, 2, 7)):
        some = positions.reshape(-1, 7)[: math.prod(shape[:-1])].reshape(shape)
        assert_tables(rope_table(jnp.asarray(some), 8), some, 8, 10000.0, None)


@pytest.mark.parametrize("scaling", SCALINGS[:3], ids=by_name)
def test_jit_gives_the_same_tables(scaling, rng):
    positions = jnp.asarray(rng.integers(0, 2000, (2, 9)))
    make = lambda positions: rope_table(positions, 16, scaling=scaling)
    for x, y in zip(make(positions), jax.jit(make)(positions), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-3)  # the last bit of an angle of 2,000
    assert [x.shape for x in make(positions[:, :0])] == [(2, 0, 16)] * 2


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
@pytest.mark.parametrize("scaling", [None, SCALINGS[6]], ids=by_name)
def test_tables_are_sharded_as_their_positions(scaling, axis_type, devices):
    mesh = jax.sharding.Mesh(devices, ("data",), axis_types=(axis_type,))
    over_data = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    positions = jax.device_put(jnp.arange(40).reshape(8, 5), over_data)
    run = jax.jit(lambda positions: rope_table(positions, 16, scaling=scaling))
    assert all(table.sharding.is_equivalent_to(over_data, 3) for table in run(positions))
    assert not collectives(run.lower(positions))


@pytest.mark.parametrize("length, divisors", [(16, (1.0, 2.0)), (17, (3.0, 5.0))])
def test_longrope_divides_by_its_other_factors_beyond_the_length_in_training(length, divisors):
    scaling = LongRope((1.0, 2.0), (3.0, 5.0), factor=4.0, original_max_position_embeddings=16)
    positions = np.arange(length, dtype=np.int32)[None]
    angles = positions[..., None] * np.tile(np.array([1.0, 100.0**-0.5]) / divisors, 2)
    scale = math.sqrt(1 + math.log(4) / math.log(16))
    tables = jax.jit(lambda positions: rope_table(positions, 4, theta=100.0, scaling=scaling))(positions)
    for table, true in zip(tables, (np.cos(angles), np.sin(angles)), strict=True):
        np.testing.assert_allclose(table, scale * true, atol=1e-5)


@pytest.mark.parametrize(["share", "turning"], [(0.25, 2), (0.3, 2), (1.0, 8), (0.0, 0)])
def test_a_share_of_the_pairs_turns_as_in_a_whole_head_and_the_others_do_not(share, turning):
    positions = np.arange(9)[None]
    frequencies = np.where(np.arange(8) < turning, 100.0 ** (-np.arange(8) / 8) / 2.0, 0.0)
    angles = positions[..., None] * np.tile(frequencies, 2)
    tables = rope_table(jnp.asarray(positions), 16, theta=100.0, scaling=ProportionalRope(share, factor=2.0))
    for table, true in zip(tables, (np.cos(angles), np.sin(angles)), strict=True):
        np.testing.assert_allclose(table, true, atol=1e-5)


@pytest.mark.parametrize(
    "rope_type, scaling",
    [
        ("default", None),
        ("linear", LinearRope(factor=4.0)),
        ("dynamic", DynamicRope(factor=2.0, original_max_position_embeddings=512)),
        ("llama3", Llama3Rope(factor=8.0)),
        ("yarn", YarnRope(factor=4.0, original_max_position_embeddings=2048)),
        ("yarn", YarnRope(factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=1.0)),
        ("longrope", LongRope((1.0,) * 32, (1.5,) * 16 + (4.0,) * 16, 4.0, original_max_position_embeddings=1023)),
        ("longrope", LongRope((1.0,) * 32, (1.5,) * 32, 4.0, 1024, attention_factor=1.5)),
    ],
)
@pytest.mark.filterwarnings("ignore")  # its own, of its dependencies
def test_tables_are_those_of_transformers(rope_type, scaling):
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    fields = {name: value for name, value in (vars(scaling) if scaling else {}).items() if value is not None}
    fields = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    parameters = {"rope_type": rope_type, "rope_theta": 10000.0, **fields}
    config = llama.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=fields.get("original_max_position_embeddings", 2048),
        rope_theta=10000.0,
        rope_scaling=parameters,
    )
    positions = np.arange(1024)[None]
    theirs = llama.LlamaRotaryEmbedding(config)(torch.ones(1), torch.from_numpy(positions))
    # Their frequencies are rounded more than once.
    for ours, table in zip(rope_table(jnp.asarray(positions), 64, scaling=scaling), theirs, strict=True):
        np.testing.assert_allclose(ours, table.numpy(), atol=1024 * 4 * ANGLE_ERROR)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(width=7), ValueError, "width=7 must be even and at least 0"),
        (dict(width=-2), ValueError, "width=-2 must be even and at least 0"),
        (dict(width=2, scaling=DynamicRope(2.0, 512)), ValueError, "width=2 must be even and at least 4"),
        (
            dict(width=8, scaling=LongRope((1.0,), (1.0,), 2.0, 8)),
            ValueError,
            "scaling has 1 factors, but must have width/2=4",
        ),
        (dict(width=8, theta=1.0), ValueError, "theta=1.0 must be more than 1"),
        (dict(width=8, theta=jnp.ones(())), TypeError, "theta is a ArrayImpl, but must be a Python number"),
        (dict(width=8, scaling={"factor": 2.0}), TypeError, "scaling is a dict, but must be None, LinearRope, Dynamic"),
    ],
)
def test_wrong_arguments_say_what_to_do(arguments, error, message, unchecked_types):
    with pytest.raises(error, match=f"^rope_table: {message}"):
        rope_table(jnp.arange(3)[None], **arguments)


@pytest.mark.parametrize(
    "scaling, message",
    [
        (lambda: LinearRope(0.5), "LinearRope: factor=0.5 must be at least 1"),
        (lambda: DynamicRope(2.0, 0), "DynamicRope: original_max_position_embeddings=0 must be at least 1"),
        (lambda: Llama3Rope(8.0, 4.0, 4.0), "Llama3Rope: high_freq_factor=4.0 must be more than low_freq_factor=4.0"),
        (lambda: YarnRope(float("nan"), 64), "YarnRope: factor=nan must be at least 1"),
        (lambda: LongRope((1.0,), (1.0, 2.0), 2.0, 8), "LongRope: short_factor has 1 numbers and long_factor 2"),
        (
            lambda: LongRope((0.0,), (1.0,), 2.0, 8),
            "LongRope: short_factor, long_factor and factor must be more than 0",
        ),
        (lambda: ProportionalRope(1.5), "ProportionalRope: partial_rotary_factor=1.5 must be at most 1"),
        (lambda: ProportionalRope(-0.5), "ProportionalRope: partial_rotary_factor=-0.5 must be at least 0"),
        (lambda: LongRope((1.0,), (1.0,), 2.0, 1), "LongRope: original_max_position_embeddings=1 must be at least 2"),
        (lambda: YarnRope(2.0, 64, beta_fast=1.0), "YarnRope: beta_fast=1.0 must be more than beta_slow=1.0"),
    ],
)
def test_wrong_scalings_are_refused(scaling, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        scaling()
