"""What depends on positions, and not on distances alone: queries that grow, and norms after the rotation."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from liger_jax.models import HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM, Ministral3Config, Ministral3ForCausalLM
from liger_jax.models.core.query_scale import query_scale
from liger_jax.ops import YarnRope

SIZES = dict(
    vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, initializer_range=0.4,
)  # fmt: skip


def test_queries_grow_with_the_logarithm_of_their_position_in_lengths_of_training(rng):
    positions = rng.integers(0, 2**24, (3, 50)).astype(np.int32)
    positions[0, :3] = 0, 16383, 16384  # the first two are within the length in training
    truth = 1 + 0.1 * np.log(1 + np.floor(positions / 16384.0))
    found = np.asarray(query_scale(jnp.asarray(positions), 0.1, 16384), np.float64)
    np.testing.assert_allclose(found, truth[..., None], rtol=3e-7)
    assert found[0, :2].tolist() == [[1.0], [1.0]] and found[0, 2, 0] > 1.06


def hunyuan():
    model = HunYuanDenseV1ForCausalLM(HunYuanDenseV1Config(**SIZES), rngs=nnx.Rngs(0))
    for norm in (model.model.layers.self_attn.query_layernorm, model.model.layers.self_attn.key_layernorm):
        norm.scale[...] = norm.scale[...] * jnp.linspace(0.2, 2, 8)  # by which a score depends on more than a distance
    return model


def ministral_3():
    config = Ministral3Config(**SIZES, rope_scaling=YarnRope(4.0, 3), llama_4_scaling_beta=0.8)
    return Ministral3ForCausalLM(config, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("make", [hunyuan, ministral_3])
def test_positions_of_packed_documents_begin_at_0_in_each(make, rng):
    model, tokens = make(), jnp.asarray(rng.integers(0, 31, (1, 12)), jnp.int32)
    ids = jnp.array([[1] * 4 + [2] * 8])
    found, alone = model(tokens, segment_ids=ids).logits[0, 4:], model(tokens[:, 4:]).logits[0]
    np.testing.assert_allclose(found, alone, atol=1e-5)
    counted = model(tokens, segment_ids=ids, positions=jnp.arange(12)[None]).logits[0, 4:]
    assert np.abs(counted - alone).max() > 1e-2
