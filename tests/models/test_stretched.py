"""Rows beyond a model's positions: refused, or reached by the rotary embedding that somebody asked for."""

import dataclasses

import numpy as np
import pytest

from liger_jax.models import LlamaConfig, stretched
from liger_jax.ops import DynamicRope, LinearRope, Llama3Rope, LongRope, YarnRope, rope_table

CONFIG = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=100)


def test_own_positions_need_nothing():
    assert stretched(CONFIG, 100) is CONFIG
    assert stretched(CONFIG, 7, "yarn") is CONFIG


def test_longer_rows_are_refused_with_the_ways_to_ask_for_them():
    with pytest.raises(
        ValueError, match=r"length=101 is more than the 100 positions .*='linear' or 'dynamic' or 'yarn'"
    ):
        stretched(CONFIG, 101)
    with pytest.raises(ValueError, match=r"rope_scaling='ntk' must be one of"):
        stretched(CONFIG, 101, "ntk")
    with pytest.raises(ValueError, match="more than 16777216, up to which"):
        stretched(CONFIG, 2**24 + 1, "yarn")


@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        ("linear", LinearRope(factor=3.0)),
        ("dynamic", DynamicRope(factor=3.0, original_max_position_embeddings=100)),
        ("yarn", YarnRope(factor=3.0, original_max_position_embeddings=100)),
        ("llama3", Llama3Rope(factor=3.0, original_max_position_embeddings=100)),
    ],
)
def test_the_factor_is_the_least_whole_number_that_reaches_the_length(name, scaling):
    for length in (201, 300):
        found = stretched(CONFIG, length, name)
        assert found.rope_scaling == scaling
        assert found.longest_sequence == 300


def test_a_scaling_grows_and_stays_of_its_kind():
    yarn = dataclasses.replace(CONFIG, rope_scaling=YarnRope(factor=4.0, original_max_position_embeddings=100))
    found = stretched(yarn, 401, "yarn")
    assert found.rope_scaling == YarnRope(factor=8.0, original_max_position_embeddings=100)
    with pytest.raises(ValueError, match="'linear' does not fit the model's YarnRope.*'yarn'"):
        stretched(yarn, 401, "linear")


def test_llama_3_1_reaches_what_its_factor_alone_does_not():
    own = Llama3Rope(factor=8.0, original_max_position_embeddings=8192)
    config = dataclasses.replace(CONFIG, max_position_embeddings=131072, rope_scaling=own)
    found = stretched(config, 262_144, "llama3")
    assert (found.rope_scaling.factor, found.longest_sequence) == (16.0, 262_144)
    slow, slower = (
        rope_table(np.array([[1000]]), 8, theta=5e5, scaling=c.rope_scaling)[1][0, 0, 3] for c in (config, found)
    )
    np.testing.assert_allclose(slower, slow / 2, rtol=1e-4)  # the slowest pair turns half as fast


def test_a_longrope_has_no_larger_factor():
    factors = (1.0,) * 4
    longrope = LongRope(factors, factors, factor=2.0, original_max_position_embeddings=50)
    with pytest.raises(ValueError, match="Pass at most 100"):
        stretched(dataclasses.replace(CONFIG, rope_scaling=longrope), 101)
