"""A model on a mesh beside the same model on one device: loss, what it returns and every gradient agree."""

import dataclasses
import functools
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh

from liger_jax.models import (
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    KernelOptions,
    Layout,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from liger_jax.ops import YarnRope

SIZES = dict(
    vocab_size=24, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
ODD = dict(vocab_size=23, num_attention_heads=4, num_key_value_heads=1, logit_scale=0.3)
MIXED = ("sliding_attention", "full_attention")
GRANITE = dict(embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.22)
WINDOWED = dict(num_hidden_layers=3, head_dim=4, sliding_window=5)
GEMMA_4 = dict(
    num_hidden_layers=4, layer_types=2 * MIXED, num_kv_shared_layers=2, use_double_wide_mlp=True, head_dim=4,
    global_head_dim=8, sliding_window=5, hidden_size_per_layer_input=4, vocab_size_per_layer_input=24,
)  # fmt: skip
UNLIKE_LAYERS = ("gemma4",)  # families whose layers differ, which a tensor axis does not split
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral": (MistralForCausalLM, MistralConfig, dict(sliding_window=5)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, dict(tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, dict(head_dim=4)),
    "olmo3": (Olmo3ForCausalLM, Olmo3Config, dict(sliding_window=5, layer_types=MIXED)),
    "exaone4": (Exaone4ForCausalLM, Exaone4Config, dict(sliding_window=5, layer_types=MIXED)),
    "hunyuan": (HunYuanDenseV1ForCausalLM, HunYuanDenseV1Config, {}),
    "glm4": (Glm4ForCausalLM, Glm4Config, dict(head_dim=4)),
    "ministral3": (Ministral3ForCausalLM, Ministral3Config, dict(head_dim=4, rope_scaling=YarnRope(4.0, 4))),
    "granite": (GraniteForCausalLM, GraniteConfig, GRANITE),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config, dict(no_rope_layers=(1, 0))),
    "gemma": (GemmaForCausalLM, GemmaConfig, dict(head_dim=4, num_key_value_heads=1)),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, WINDOWED),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, WINDOWED | dict(sliding_window_pattern=2)),
    "gemma4": (Gemma4ForCausalLM, Gemma4TextConfig, GEMMA_4),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {}),
    "phi3": (Phi3ForCausalLM, Phi3Config, dict(sliding_window=5, partial_rotary_factor=0.5, head_dim=4)),
}


def layout_of(split: Mapping[str, int]) -> Layout:
    """The layout of a mesh that has these axes, and fsdp."""
    named = {name: name for name in ("tensor", "sequence") if name in split}
    return Layout(batch=("data", "fsdp") if "data" in split else ("fsdp",), **named)


def mesh_of(split: Mapping[str, int], devices: Sequence, axis_type: AxisType = AxisType.Auto) -> Mesh:
    """A mesh of so many devices along each axis, the others along fsdp; of too few, all along the last axis."""
    if math.prod(split.values()) > len(devices):
        split = dict.fromkeys(split, 1) | {[*split][-1]: len(devices)}
    sizes = {"fsdp": len(devices) // math.prod(split.values()), **split}
    names = layout_of(split).axes
    shape = tuple(sizes[name] for name in names)
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names), devices=devices)


# --- what a model is called for: (model, batch) → (loss, what else it returns) ----------------------------------------


def loss_of(model, batch):
    out = model(**batch, return_metrics=True)
    return out.loss, out.metrics


def _arguments(batch):
    return {name: x for name, x in batch.items() if name != "loss_weights"}, batch["loss_weights"]


def log_probs_of(model, batch):
    arrays, weights = _arguments(batch)
    found = model.log_probs(**arrays, selected_token_ids=[3, 1], entropy=True, temperature=0.7)
    of_selected = jnp.sum(jnp.where((weights != 0)[..., None], jnp.sin(found.selected_log_probs), 0.0))  # no padding's
    return jnp.sum(weights * (found.log_probs + 0.1 * found.entropy)) + of_selected, found


def token_loss_of(model, batch):
    arrays, weights = _arguments(batch)
    pulled = lambda log_prob, entropy, weight: -weight * jnp.exp(log_prob) - 0.1 * entropy
    return model.token_loss(pulled, **arrays, per_token=(weights,), denominator=3.0, entropy=True)


def logits_of(model, batch):
    out = model(**batch, return_logits=True)
    is_token = (batch["loss_weights"] != 0)[..., None]  # not padding
    return out.loss + jnp.sum(out.logits**2, where=is_token) / 100, out.logits


def last_logits_of(model, batch):
    arrays, _ = _arguments(batch)
    out = model(**arrays, return_logits=True, logits_to_keep=5)
    return out.loss + jnp.sum(out.logits**2) / 100, out.logits


# --- the comparison ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Problem:
    """A model, and what it is called for; `config` has a config's fields as pairs."""

    family: str
    config: tuple = ()
    length: int = 13
    prepare: Callable[[Any], Any] = lambda model: model
    call: Callable[[Any, Any], Any] = loss_of
    trained: type = nnx.Param
    scan_layers: bool = True

    def seeded(self) -> np.random.Generator:
        """Numbers of its own in each run."""
        name = f"{self.family} {self.config} {self.length}"
        return np.random.default_rng([int(os.environ["TEST_SEED"]), zlib.crc32(name.encode())])


@functools.cache
def on_one_device(problem: Problem):
    """Trained parameters, the others, a batch, ((loss, aux), gradients), and by how much roundings move these."""
    rng = problem.seeded()
    run, params, frozen = _value_and_grad(problem, KernelOptions())
    params, frozen = filled(params, rng), filled(frozen, rng)
    batch = batch_of(rng, problem.length, _config(problem).vocab_size)
    run = jax.jit(run)
    expected = _wide(run(params, frozen, batch))
    beside = _wide(run(*(jax.tree.map(functools.partial(_rounded, rng), x) for x in (params, frozen)), batch))
    rounding = max(map(_error, jax.tree.leaves(beside), jax.tree.leaves(expected)))
    return params, frozen, batch, expected, rounding


def _wide(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def _rounded(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """Each float32 number's neighbour, above or below."""
    towards = np.where(rng.random(x.shape) < 0.5, -np.inf, np.inf).astype(np.float32)
    return np.nextafter(x, towards) if x.dtype == np.float32 else x


def _error(x: np.ndarray, truth: np.ndarray) -> float:
    return float(np.max(np.abs(x - truth)) / max(np.max(np.abs(truth)), 1e-30))


def _config(problem: Problem):
    _, config_class, fields = FAMILIES[problem.family]
    return config_class(**SIZES | fields | dict(problem.config))


def _value_and_grad(problem: Problem, kernels: KernelOptions, **options):
    """The function of (trained, frozen, batch), and the types of both."""
    model_class, config = FAMILIES[problem.family][0], _config(problem)
    options |= dict(kernels=kernels, scan_layers=problem.scan_layers)
    make = lambda: problem.prepare(model_class(config, rngs=nnx.Rngs(0), **options))
    graph, params, frozen = nnx.split(nnx.eval_shape(make), problem.trained, ...)
    run = lambda params, frozen, batch: problem.call(nnx.merge(graph, params, frozen), batch)
    return jax.value_and_grad(run, has_aux=True), params, frozen


def filled(state, rng: np.random.Generator):
    """The state's types as arrays of random numbers; codes of any value, and scales of norms near 1."""

    def of_leaf(keys, x):
        if jnp.issubdtype(x.dtype, jnp.floating):
            near = 1.0 if "['scale']" in jax.tree_util.keystr(keys) else 0.0  # a norm's
            return (near + 0.3 * rng.standard_normal(x.shape)).astype(x.dtype)
        return rng.integers(jnp.iinfo(x.dtype).min, jnp.iinfo(x.dtype).max, x.shape).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(of_leaf, state)


def batch_of(rng: np.random.Generator, length: int, vocab_size: int) -> dict[str, np.ndarray]:
    """Tokens, labels of which some do not count, weights, and the ids of packed rows."""
    shape = 4, length
    tokens = rng.integers(0, vocab_size, shape)
    segments = 1 + np.cumsum(rng.random(shape) < 0.15, axis=1)
    labels = np.where(rng.random(shape) < 0.3, -100, tokens)
    as_int32 = lambda x: x.astype(np.int32)
    return dict(input_ids=as_int32(tokens), labels=as_int32(labels),
                loss_weights=rng.random(shape).astype(np.float32), segment_ids=as_int32(segments))  # fmt: skip


def assert_like_one_device(
    problem: Problem,
    split: Mapping[str, int],
    devices: Sequence,
    axis_type: AxisType = AxisType.Auto,
    *,
    kernels: Mapping[str, Any] | None = None,
    **options,
) -> tuple[str, int]:
    """On the mesh, with these options, the problem has the result of one device without them.

    Returns the compiled program's text, and the length of rows on the mesh.
    """
    params, frozen, batch, expected, rounding = on_one_device(problem)
    layout, mesh = layout_of(split), mesh_of(split, devices, axis_type)
    run, *_ = _value_and_grad(problem, KernelOptions(layout=layout, **(kernels or {})), **options)
    numbers = np.tile(1 + np.arange(problem.length, dtype=np.int32), (4, 1))  # of positions; 0 becomes padding's
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, layout.shardings(x, mesh)) for x in (params, frozen)]
        on_mesh = layout.place(batch | dict(numbers=numbers))
        numbers = np.asarray(on_mesh.pop("numbers"))[0]
        compiled = jax.jit(run).lower(*placed, on_mesh).compile()
        (loss, aux), grads = _wide(compiled(*placed, on_mesh))
    in_order = np.flatnonzero(numbers)[np.argsort(numbers[numbers > 0])]
    of_positions = lambda x: x.shape[:2] == (4, len(numbers))
    aux = jax.tree.map(lambda x: x[:, in_order] if of_positions(x) else x, aux)
    # Random parameters may be ill-conditioned: one draw of 60 moves Gemma 3's gradients by 7e-5.
    bound = max(1e-5 if problem.family == "llama" and problem.trained is nnx.Param else 2e-5, 6 * rounding)
    for (path, x), truth in zip(
        jax.tree.leaves_with_path(((loss, aux), grads)), jax.tree.leaves(expected), strict=True
    ):
        assert x.shape == truth.shape
        assert _error(x, truth) < bound, (jax.tree_util.keystr(path), _error(x, truth), bound)
    return compiled.as_text() or "", len(numbers)
