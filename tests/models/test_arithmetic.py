"""Small functions of the models: sizes, names, rows and keys."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from liger_jax.models import LlamaConfig
from liger_jax.models.core import arguments, cache, config_fields, layer_stack, row_tokens
from liger_jax.models.core.parallel import mesh_axes, vocabulary_shards
from liger_jax.models.core.query_scale import query_scale
from liger_jax.models.hugging_face import adapter_targets, mxfp4, nf4, weights
from liger_jax.ops import layout
from liger_jax.ops.experts import expert_parallel

CONFIG = LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1)


def test_a_cache_grows_in_slots_and_rows():
    empty = cache.empty_cache(CONFIG, 2, 3, jnp.float32)
    assert cache.lengthened(empty, 5).positions.tolist() == [[-1] * 5] * 2
    assert cache.repeated(empty, 4).keys.shape == (1, 8, 3, 1, 8)
    marked = dataclasses.replace(empty, positions=jnp.arange(6, dtype=jnp.int32).reshape(2, 3))
    assert cache.of_rows(marked, jnp.array([1])).positions.tolist() == [[3, 4, 5]]
    assert cache.repeated(marked, 2).positions[:, 0].tolist() == [0, 0, 3, 3]


def test_names_say_which_modules_have_an_adapter():
    q_proj = "model.layers.0.self_attn.q_proj"
    assert not adapter_targets.Targets(["q_proj"], layers=[1]).adapts(q_proj)
    assert adapter_targets.Targets(["q_proj"], layers=[0]).adapts(q_proj)
    assert adapter_targets.names_parameter(["experts.down_proj"], "model.layers.0.mlp.experts.down_proj")
    assert not adapter_targets.names_parameter(["experts.up_proj"], "model.layers.0.mlp.experts.down_proj")
    assert adapter_targets.split(None) == (True, ())
    assert adapter_targets.split([*adapter_targets.LAYER, "lm_head"]) == (True, ["lm_head"])
    assert adapter_targets.split(["q_proj"]) == (False, ["q_proj"])
    ranks = {"0.q_proj": 8, "0.k_proj": 4, "1.q_proj": 8, "1.k_proj": 4, "0.o_proj": 8}
    assert adapter_targets.patterns_of(ranks) == (8, {"k_proj": 4})
    assert adapter_targets.problem_of_expression(r".*\.layers\.\d+\.(q|v)_proj") is None
    assert "may take too long" in (adapter_targets.problem_of_expression("(a+)+b") or "")
    assert adapter_targets.value_of({"k_proj": 4}, "model.layers.0.self_attn.k_proj", 8) == 4


def test_config_json_says_how_weights_are_quantised():
    assert mxfp4.is_mxfp4({"quantization_config": {"quant_method": "mxfp4"}}) and not mxfp4.is_mxfp4({})
    int8 = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    assert "must be its nf4 or absent" in (nf4.problem(int8) or "")
    assert weights.interleaved(4).tolist() == [0, 2, 1, 3]


def test_wrong_fields_of_a_config_are_named():
    sizes = dataclasses.make_dataclass("Sizes", [("vocab_size", int), ("head_dim", int | None)])
    wrong = config_fields.problems(sizes, {"vocab_size": True, "head_dim": None})
    assert wrong == ["vocab_size=True (bool) must be an int from 1 to 2147483647"]


def test_sizes_of_shards_patterns_and_parts():
    assert [mesh_axes.nearest_divisor(*of) for of in ((32, 3), (12, 5))] == [2, 4]
    assert vocabulary_shards.padded(jnp.ones((5, 2)), 4).sum(axis=1).tolist() == [2.0] * 5 + [0.0] * 3
    assert layout.partition(("data", "fsdp"), None, ()) == P(("data", "fsdp"))
    assert [expert_parallel.rows_at_once(*of) for of in ((1024, 4), (100, 4), (10, 2))] == [384, 40, 8]
    assert [layer_stack.pattern_length(kinds) for kinds in ("aabaabaa", "aab", "aaaa")] == [3, 3, 1]


def test_queries_are_scaled_beyond_the_length_in_training():
    scale = np.asarray(query_scale(jnp.array([[0, 3, 4, 12]]), 0.5, 4))[0, :, 0]
    np.testing.assert_allclose(scale.ravel(), 1 + 0.5 * np.log([1, 1, 2, 4]), rtol=1e-6)


def test_keys_masks_and_segments_of_rows():
    key = arguments.as_key("generate", jax.random.PRNGKey(0))
    assert jax.random.key_data(key).tolist() == jax.random.key_data(jax.random.key(0)).tolist()
    hidden = np.iinfo(np.int32).max
    assert np.asarray(row_tokens.attention_segments(None, jnp.array([[0, 1, 1]]))).tolist() == [[hidden, 1, 1]]
    assert np.asarray(row_tokens.tokens_of(jnp.array([[1, 2, 0]]), None)).tolist() == [[True, True, False]]
