"""Layers with inputs of their own, keys of earlier layers, and wider heads whose values are their keys: formulas."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from liger_jax.models import Gemma4ForCausalLM, Gemma4TextConfig

B, T, D, P, V = 2, 5, 12, 4, 17
FULL, SLIDING = "full_attention", "sliding_attention"


def made(**fields):
    config = Gemma4TextConfig(
        vocab_size=V, hidden_size=D, intermediate_size=10, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, global_head_dim=6, layer_types=(FULL, FULL), initializer_range=0.4,
        hidden_size_per_layer_input=P, vocab_size_per_layer_input=V, **fields,
    )  # fmt: skip
    model: Any = Gemma4ForCausalLM(config, rngs=nnx.Rngs(0)).model
    norms = [model.layers[0].self_attn.k_norm, model.layers[1].self_attn.q_norm, model.per_layer_projection_norm]
    for norm in (*norms, model.layers[1].post_per_layer_input_norm):
        norm.scale[...] = norm.scale[...] * jnp.linspace(0.5, 2, norm.scale.shape[0])
    return model


def of(parameter):
    return np.asarray(parameter[...], np.float64)


def normed(x, scale=1.0):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_inputs_of_layers_are_their_formula(rng):
    model, x, ids = made(), rng.normal(size=(B, T, D)), rng.integers(0, V, (B, T))
    stream = nnx.jit(lambda model, x, ids: model.stream(x, ids))(model, jnp.asarray(x, jnp.float32), jnp.asarray(ids))
    projected = (x @ of(model.per_layer_model_projection.kernel) / np.sqrt(D)).reshape(B, T, 2, P)
    rows = of(model.embed_tokens_per_layer)[ids].reshape(B, T, 2, P)
    inputs = (normed(projected, of(model.per_layer_projection_norm.scale)) + np.sqrt(P) * rows) / np.sqrt(2)
    close(np.stack(stream.own_inputs, axis=2), inputs)
    layer, h = model.layers[1], rng.normal(size=(B, T, D))
    add = nnx.jit(lambda layer, h, own: layer.add_input(h, (own,), layer.mlp.gated))
    found = add(layer, jnp.asarray(h, jnp.float32), stream.own_inputs[1])
    gate = h @ of(layer.per_layer_input_gate.kernel)
    gelu = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    added = (gelu * inputs[:, :, 1]) @ of(layer.per_layer_projection.kernel)
    close(found, h + normed(added, of(layer.post_per_layer_input_norm.scale)))


def test_a_layer_attends_to_an_earlier_layer_s_keys_which_are_its_values_too(rng):
    """Without rotations. The values are the keys before their norm, with a norm without a scale."""
    model = made(num_kv_shared_layers=1, attention_k_eq_v=True, num_global_key_value_heads=1)
    owner, taker = (layer.self_attn for layer in model.layers)
    assert owner.v_proj is None and not hasattr(taker, "k_proj")
    x, y = rng.normal(size=(2, B, T, D))

    @nnx.jit
    def run(owner, taker, x, y):
        _, keys = owner.with_keys(x, None, None, None, None)
        return taker.with_keys(y, None, None, None, None, given=keys)[0]

    k = x @ of(owner.k_proj.kernel)  # one head of 6 columns
    q = normed((y @ of(taker.q_proj.kernel)).reshape(B, T, 4, 6), of(taker.q_norm.scale))
    scores = np.einsum("bihd,bjd->bhij", q, normed(k, of(owner.k_norm.scale)))
    weights = np.exp(scores - scores.max(-1, keepdims=True)) * np.tri(T)
    out = np.einsum("bhij,bjd->bihd", weights / weights.sum(-1, keepdims=True), normed(k)).reshape(B, T, -1)
    close(run(owner, taker, *(jnp.asarray(a, jnp.float32) for a in (x, y))), out @ of(taker.o_proj.kernel))


@pytest.mark.parametrize("doubles", [True, False])
def test_kinds_of_attention_say_whose_keys_and_how_wide(doubles):
    config = Gemma4TextConfig(
        num_hidden_layers=6, num_kv_shared_layers=2, layer_types=(SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL),
        use_double_wide_mlp=doubles, intermediate_size=10, num_key_value_heads=2, head_dim=4, global_head_dim=6,
        sliding_window=3,
    )  # fmt: skip
    kinds = [config.attention_of(i) for i in range(6)]
    stored, shared = (tuple(f"{kind}_{end}" for kind in (FULL, SLIDING)) for end in ("stored", "shared"))
    assert kinds == [SLIDING, stored[0], SLIDING, stored[1], shared[1], shared[0]]
    of_kinds = [config.of_layers(kind) for kind in kinds]
    assert [each.takes_keys_of for each in of_kinds] == [None, None, None, None, 3, 1]
    assert [each.feed_forward_width for each in of_kinds] == [10] * 4 + [20 if doubles else 10] * 2
    assert [each.head_dim for each in of_kinds] == [4, 6, 4, 4, 4, 6]
    assert [config.window_of(kind) for kind in kinds] == [3, None, 3, 3, 3, None]
    assert config.cached == (4, 1, 12) and config.takes_keys_of is None
