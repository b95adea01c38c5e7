"""Key-value cache and generation: what the model computes without a cache, and Hugging Face's tokens."""

import dataclasses
import functools
import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from liger_jax import causal_attention
from liger_jax.models import (
    AutoModelForCausalLM,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    KernelOptions,
    KVCache,
    Layout,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    generate,
    stream,
)
from liger_jax.models.core.cache import cached_attention
from liger_jax.models.generation.sampling import draw
from liger_jax.models.llama.modeling import LlamaLayer
from tests.models import _hugging_face as hugging_face
from tests.models._llama import CONFIG, make_model, random_tokens
from tests.models.test_parity import live
from tests.ops._oracle import first, normal

# Prompts of 8: without padding, padded on the left, on the right, and wherever it may be.
MASK = np.array([[1] * 8, [0] * 3 + [1] * 5, [1] * 5 + [0] * 3, [0, 1, 1, 0, 0, 1, 1, 0]], bool)
WINDOW = MistralConfig(**{**dataclasses.asdict(CONFIG), "sliding_window": 3})


@nnx.jit
def logits_of(model, tokens):
    """By the forward without a cache."""
    return model(tokens).logits


def assert_likeliest(model, prompts, mask, new_tokens):
    """Each new token has the largest logit in a forward over all tokens before it, without padding."""
    texts = [np.concatenate([row[keep], new]) for row, keep, new in zip(prompts, mask, new_tokens, strict=True)]
    length = max(map(len, texts))
    rows = np.stack([np.pad(text, (0, length - len(text))) for text in texts])
    logits = np.asarray(logits_of(model, jnp.asarray(rows, jnp.int32)))
    for row, text, new in zip(logits, texts, new_tokens, strict=True):
        scores = row[len(text) - len(new) - 1 : len(text) - 1]
        chosen = np.take_along_axis(scores, new[:, None], axis=1)[:, 0]
        # A tie of float32's rounding may go either way.
        assert np.all(chosen >= scores.max(axis=1) - 1e-4 * np.abs(scores).max(axis=1)), (chosen, scores.max(axis=1))


# --- tokens -----------------------------------------------------------------------------------------------------------

# A pattern of layers with one left over, and windows shorter than the text, come first.
FAMILIES = ("gemma2", *(case for case in hugging_face.COMMITTED if case != "gemma2"))


@pytest.mark.parametrize("case", first(1, FAMILIES))
def test_greedy_tokens_of_committed_checkpoints_are_hugging_face_s(case):
    folder, expected = hugging_face.committed(case)
    prompts = jnp.asarray(expected.tokens[:, : hugging_face.PROMPT.shape[1]], jnp.int32)
    model = AutoModelForCausalLM.from_pretrained(folder)
    out = model.generate(prompts, attention_mask=jnp.asarray(hugging_face.PROMPT), max_new_tokens=12, eos_token_id=())
    np.testing.assert_array_equal(out, np.concatenate([prompts, expected.greedy], axis=1))


@pytest.mark.usefixtures("unchecked_types")
def test_prompts_may_be_numpy_s_of_any_integer_dtype(rng):
    model, prompts = make_model(), np.asarray(random_tokens(rng, length=3))
    expected = generate(model, jnp.asarray(prompts), max_new_tokens=4)
    mask = np.ones(prompts.shape, np.int64)
    for dtype in (np.uint8, np.int64):
        out = generate(model, prompts.astype(dtype), attention_mask=mask, max_new_tokens=4)
        np.testing.assert_array_equal(out, expected)
        assert out.dtype == jnp.int32


@live
@pytest.mark.parametrize("case", first(2, tuple(hugging_face.CASES)))
def test_greedy_tokens_of_fresh_checkpoints_are_hugging_face_s(case, tmp_path, rng):
    expected = hugging_face.make(case, tmp_path, seed=int(rng.integers(2**31)))
    prompts, mask = (jnp.asarray(x, jnp.int32) for x in (expected.tokens[:, :8], hugging_face.PROMPT))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    out = generate(model, prompts, attention_mask=mask, max_new_tokens=12, eos_token_id=())
    np.testing.assert_array_equal(out[:, 8:], expected.greedy)


@live
@pytest.mark.parametrize("in_file", ["generation_config.json", "config.json"])
def test_hugging_face_stops_what_we_save_where_it_and_we_stop_the_original(in_file, tmp_path, rng):
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    expected = hugging_face.make("llama", tmp_path / "theirs", seed=int(rng.integers(2**31)))
    stops = sorted({int(expected.greedy[0, 3]), int(expected.greedy[1, 7])})
    pad = next(token for token in range(29) if token not in expected.greedy)
    for name in ("config.json", "generation_config.json"):  # the latter counts more
        values = json.loads((tmp_path / "theirs" / name).read_text())
        values |= {"eos_token_id": stops if name == in_file else 28, "pad_token_id": pad}
        (tmp_path / "theirs" / name).write_text(json.dumps(values))
    if in_file == "config.json":
        (tmp_path / "theirs" / "generation_config.json").unlink()
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    chat = "{% for m in messages %}{{ m.content }} b{% endfor %}"
    options = dict(tokenizer_object=words, eos_token="b", chat_template=chat)
    transformers.PreTrainedTokenizerFast(**options).save_pretrained(tmp_path / "theirs")

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours", max_shard_bytes=4000, tokenizer_from=tmp_path / "theirs")
    prompts, masks = expected.tokens[:, :8], hugging_face.PROMPT
    options = dict(attention_mask=jnp.asarray(masks), max_new_tokens=12, pad_token_id=pad)
    found = [generate(model, jnp.asarray(prompts, jnp.int32), **options)]
    for name in ("theirs", "ours"):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        arguments = dict(input_ids=torch.from_numpy(prompts), attention_mask=torch.from_numpy(masks))
        out = theirs.generate(**arguments, max_new_tokens=12, do_sample=False).numpy()
        # A column that is padding in every row is not returned.
        found.append(np.pad(out, ((0, 0), (0, 20 - out.shape[1])), constant_values=pad))
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert tokenizer.apply_chat_template([{"content": "a a"}], return_dict=False) == [0, 0, 1]
        assert tokenizer.eos_token == "b"
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])
    assert not np.array_equal(found[0][:, 8:], expected.greedy)


@pytest.mark.parametrize("scan_layers", first(1, [True, False]), ids=["scan", "unrolled"])
# In Phi-3's a forward over a whole text turns its first tokens otherwise than they were when they were made.
@pytest.mark.parametrize(
    "case", first(1, ("gemma3", *(c for c in hugging_face.COMMITTED if c not in ("gemma3", "phi3"))))
)
def test_each_greedy_token_is_the_full_forward_s_likeliest(case, scan_layers, rng):
    """After padding of any id on any side."""
    model = AutoModelForCausalLM.from_pretrained(hugging_face.GOLDEN / case, scan_layers=scan_layers)
    prompts = np.where(MASK, rng.integers(0, 29, MASK.shape), -7)
    options = dict(max_new_tokens=10, attention_mask=jnp.asarray(MASK), eos_token_id=())
    out = generate(model, jnp.asarray(prompts, jnp.int32), **options)
    np.testing.assert_array_equal(out[:, :8], prompts)
    assert_likeliest(model, prompts, MASK, np.asarray(out[:, 8:]))


@pytest.mark.full
@pytest.mark.parametrize("scan_layers", [True, False], ids=["scan", "unrolled"])
@pytest.mark.parametrize("family", [Gemma2ForCausalLM, Gemma3ForCausalLM])
def test_patterns_of_layers_with_some_left_over_generate_the_likeliest_tokens(family, scan_layers, rng):
    sizes = {**dataclasses.asdict(CONFIG), "head_dim": 6, "sliding_window": 4, "num_hidden_layers": 7}
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    config = family.config_type(**sizes, layer_types=tuple(kinds[kind] for kind in "ssfssfs"))
    model = family(config, scan_layers=scan_layers, rngs=nnx.Rngs(0))
    prompts = rng.integers(0, CONFIG.vocab_size, MASK.shape)
    out = generate(model, jnp.asarray(prompts, jnp.int32), max_new_tokens=10, attention_mask=jnp.asarray(MASK))
    assert_likeliest(model, prompts, MASK, np.asarray(out[:, 8:]))


# --- the program ------------------------------------------------------------------------------------------------------


class CountingLayer(LlamaLayer):
    """Counts how often a function is traced, and how often it runs."""

    traced, ran = 0, 0

    def __call__(self, x, *attention_inputs):
        CountingLayer.traced += 1
        jax.debug.callback(CountingLayer.run)
        return super().__call__(x, *attention_inputs)

    @staticmethod
    def run():
        CountingLayer.ran += 1


class CountingModel(LlamaForCausalLM):
    layer = CountingLayer


def test_a_second_call_compiles_nothing_and_no_token_does(rng):
    model, prompts = CountingModel(CONFIG, rngs=nnx.Rngs(0)), random_tokens(rng, length=4)
    before = CountingLayer.traced
    sampled = dict(eos_token_id=1, temperature=0.5, top_p=0.5, key=jax.random.key(0))
    tokens = generate(model, prompts, max_new_tokens=9, **sampled)
    assert CountingLayer.traced - before == 2  # the prompt's and the next token's, with one scanned layer each
    other = dict(eos_token_id=2, pad_token_id=3, temperature=0.9, top_p=0.8, key=jax.random.key(1))
    others = generate(CountingModel(CONFIG, rngs=nnx.Rngs(1)), prompts[::-1], max_new_tokens=9, **other)
    assert CountingLayer.traced - before == 2
    assert not np.array_equal(tokens, others)


def test_rows_end_with_eos_and_the_work_with_the_last_row(rng):
    model, prompts = CountingModel(CONFIG, rngs=nnx.Rngs(0)), random_tokens(rng, length=4)
    free = np.asarray(generate(model, prompts, max_new_tokens=9))[:, 4:]
    stops = [int(free[0, 2]), int(free[1, 5])]
    ends = [next(i for i, token in enumerate(row) if token in stops) for row in free]
    for fill, options in ((60, {"pad_token_id": 60}), (stops[0], {})):
        jax.effects_barrier()
        before = CountingLayer.ran
        out = np.asarray(generate(model, prompts, max_new_tokens=9, eos_token_id=stops, **options))[:, 4:]
        jax.effects_barrier()
        # The first token comes from the run over the prompt.
        assert CountingLayer.ran - before == CONFIG.num_hidden_layers * (max(ends) + 1)
        for row, full, end in zip(out, free, ends, strict=True):
            np.testing.assert_array_equal(row, [*full[: end + 1], *[fill] * (8 - end)])


def test_no_logits_of_the_prompt_s_other_tokens_exist():
    model, vocab_size = make_model(), CONFIG.vocab_size
    program = str(jax.make_jaxpr(lambda ids: generate(model, ids, max_new_tokens=3))(jnp.zeros((2, 7), jnp.int32)))
    assert f"f32[2,1,{vocab_size}]" in program and f",7,{vocab_size}]" not in program


# --- the cache --------------------------------------------------------------------------------------------------------


@nnx.jit
def call(model, tokens, mask, cache):
    out = model(tokens, attention_mask=mask, cache=cache)
    return out.logits, out.cache


@pytest.mark.parametrize("scan_layers", first(1, [True, False]), ids=["scan", "unrolled"])
def test_a_text_in_pieces_with_padding_anywhere_has_the_full_forward_s_logits(scan_layers, rng):
    model = MistralForCausalLM(WINDOW, scan_layers=scan_layers, rngs=nnx.Rngs(0))
    tokens, mask = random_tokens(rng, length=12), rng.random((2, 12)) < 0.7
    cache, found = model.init_cache(2, 14), []
    for start in range(0, 12, 4):
        piece = slice(start, start + 4)
        logits, cache = call(model, tokens[:, piece], jnp.asarray(mask[:, piece]), cache)
        found.append(logits)
    order = np.argsort(~mask, axis=1, stable=True)  # tokens to the front
    expected = logits_of(model, jnp.take_along_axis(tokens, order, axis=1))
    found = np.concatenate(found, axis=1)
    for row, keep, want in zip(found, mask, expected, strict=True):
        np.testing.assert_allclose(row[keep], want[: keep.sum()], rtol=0, atol=2e-5 * np.abs(want).max())
    assert int(cache.length) == 12
    np.testing.assert_array_equal(cache.positions[:, 12:], -1)
    np.testing.assert_array_equal(cache.positions[:, :12], np.where(mask, mask.cumsum(1) - 1, -1))


def test_loss_and_positions_are_as_without_a_cache(rng):
    model, tokens = make_model(), random_tokens(rng)
    options = dict(labels=tokens, positions=2 * jnp.arange(12)[None])
    with_cache, without = nnx.jit(
        lambda model: (model(tokens, cache=model.init_cache(2, 12), **options), model(tokens, **options))
    )(model)
    assert with_cache.logits is None and without.cache is None
    np.testing.assert_allclose(with_cache.loss, without.loss, rtol=1e-5)


@pytest.mark.parametrize("options", [dict(window=5, softcap=2.0, scale=0.3), {}], ids=["window", "plain"])
def test_attention_with_a_cache_is_causal_attention(options, monkeypatch, rng):
    """More queries than one chunk has attend to a cache with room left."""
    monkeypatch.setattr("liger_jax.models.core.cache.CHUNK", 8)
    q, k, v = normal(rng, (2, 21, 4, 8), (2, 21, 2, 8), (2, 21, 2, 8))
    order = jnp.broadcast_to(jnp.arange(21), (2, 21))
    longer = lambda x: jnp.pad(x, ((0, 0), (0, 4), (0, 0), (0, 0)), constant_values=9.0)
    keys = jnp.pad(order, ((0, 0), (0, 4)), constant_values=-1)
    found = jax.jit(functools.partial(cached_attention, **options))(q, longer(k), longer(v), order, keys)
    np.testing.assert_allclose(found, causal_attention(q, k, v, **options), rtol=0, atol=2e-5)


@pytest.mark.parametrize("length, is_the_op_s", [(12, True), (1, False)])
def test_a_prompt_is_attended_to_as_in_training_and_a_token_by_the_cache(length, is_the_op_s):
    model = make_model(dtype=jnp.bfloat16)
    tokens, mask = jnp.zeros((2, length), jnp.int32), jnp.ones((2, length), bool)
    device = AbstractDevice("NVIDIA H200", None, "gpu")  # its attention kernel has a name
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=device)):
        run = lambda tokens, mask: model(tokens, attention_mask=mask, cache=model.init_cache(2, 15)).logits
        jaxpr = str(jax.make_jaxpr(run)(tokens, mask))
    assert ("causal_attention_forward" in jaxpr) == is_the_op_s
    assert ("name=decode_attention" in jaxpr) == (not is_the_op_s)


@pytest.mark.full
@pytest.mark.parametrize("attention", [None, "triton:interpret"])
def test_devices_that_split_the_rows_attend_to_their_own_caches(attention, devices, rng):
    layout = Layout(batch=("fsdp",))
    options = dict(dtype=jnp.bfloat16, scan_layers=False)
    prompts = random_tokens(rng, batch=2 * len(devices), length=5)
    choice = dict(max_new_tokens=6, eos_token_id=())
    config = dataclasses.replace(CONFIG, vocab_size=64)
    expected = make_model(config, kernels=KernelOptions(attention=attention), **options).generate(prompts, **choice)
    mesh = jax.make_mesh((len(devices),), ("fsdp",), axis_types=(AxisType.Auto,), devices=devices)
    with jax.set_mesh(mesh):
        model = make_model(config, kernels=KernelOptions(layout=layout, attention=attention), **options)
        nnx.update(model, jax.device_put(nnx.state(model), layout.shardings(model, mesh)))
        found = model.generate(layout.place(prompts), **choice)
    assert len(found.sharding.device_set) == len(devices)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.full
def test_devices_that_do_not_divide_the_rows_generate_them(rng):
    devices = jax.devices()[:2]
    if len(devices) < 2:
        pytest.skip("needs two devices")
    layout, prompts = Layout(batch=("fsdp",)), random_tokens(rng, batch=3, length=5)
    config = dataclasses.replace(CONFIG, vocab_size=64, num_hidden_layers=1)
    sampled = dict(max_new_tokens=4, eos_token_id=(), temperature=1.0, key=jax.random.key(0))
    several = dict(num_return_sequences=2, return_log_probs=True)
    expected, expected_log_probs = make_model(config).generate(prompts, **sampled, **several)
    streamed = np.stack([*stream(make_model(config), prompts[:1], **sampled)], axis=1)
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,), devices=devices)
    with jax.set_mesh(mesh):
        model = make_model(config, kernels=KernelOptions(layout=layout))
        nnx.update(model, jax.device_put(nnx.state(model), layout.shardings(model, mesh)))
        found, log_probs = model.generate(prompts, **sampled, **several)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_allclose(log_probs, expected_log_probs, atol=1e-5)
        np.testing.assert_array_equal(np.stack([*stream(model, prompts[:1], **sampled)], axis=1), streamed)


def test_a_call_with_rows_that_the_devices_do_not_divide_is_refused(rng):
    config, model = dataclasses.replace(CONFIG, vocab_size=64), KernelOptions(layout=Layout(batch=("fsdp",)))
    model = nnx.eval_shape(lambda: make_model(config, kernels=model))
    with jax.sharding.use_abstract_mesh(AbstractMesh((2,), ("fsdp",), (AxisType.Auto,))):
        with pytest.raises(
            ValueError, match="^input_ids has 3 rows, which the 2 devices along fsdp do not divide. Pass "
        ):
            model(random_tokens(rng, batch=3, length=5))


@pytest.mark.parametrize("window, has_both", [(None, False), (3, True)])
def test_a_new_cache_is_attended_to_only_where_padding_in_a_window_may_count(window, has_both):
    """Else the program has the prompt's own attention alone."""
    config = dataclasses.replace(WINDOW, sliding_window=window)
    plain = KernelOptions(attention="xla", implementation="xla")  # kernels have branches of their own
    model = MistralForCausalLM(config, kernels=plain, scan_layers=False, rngs=nnx.Rngs(0))
    tokens, mask = jnp.zeros((2, 12), jnp.int32), jnp.ones((2, 12), bool)
    run = lambda tokens, mask: model(tokens, attention_mask=mask, cache=model.init_cache(2, 15)).logits
    assert (" cond[" in str(jax.make_jaxpr(run)(tokens, mask))) == has_both
    later = lambda tokens, cache: model(tokens, cache=cache).logits
    assert " cond[" in str(jax.make_jaxpr(later)(tokens, model.init_cache(2, 15))), "an argument may be full"


def test_a_cache_has_the_computation_s_dtype_or_another():
    model = make_model(dtype=jnp.bfloat16)
    assert model.init_cache(2, 12).values.dtype == jnp.bfloat16
    tokens, cache = jnp.zeros((2, 12), jnp.int32), model.init_cache(2, 15, jnp.float32)
    longer = jax.eval_shape(lambda: model(tokens, cache=cache).cache)
    assert isinstance(longer, KVCache)
    assert {x.dtype for x in (longer.keys, longer.values)} == {jnp.dtype("float32")}
    assert longer.keys.shape == longer.values.shape == (2, 2, 15, 2, 8)


# --- random tokens ----------------------------------------------------------------------------------------------------

DRAWS = 20_000


def keys_of(rng):
    return jax.random.split(jax.random.key(int(rng.integers(2**31))), DRAWS)


def assert_drawn_from(tokens, probabilities):
    """Frequencies are within 5 standard deviations, and a token of probability 0 never comes."""
    found = np.bincount(tokens, minlength=len(probabilities)) / len(tokens)
    spread = np.sqrt(probabilities * (1 - probabilities) / len(tokens))
    assert np.all(np.abs(found - probabilities) <= 5 * spread), (found, probabilities)


def nucleus(logits, temperature, top_p):
    """Probabilities, one token at a time: the likeliest until they reach top_p."""
    p = np.exp((logits - logits.max()) / temperature)
    p, kept = p / p.sum(), np.zeros_like(p)
    for token in np.argsort(-p, kind="stable"):
        if kept.sum() >= top_p:
            break
        kept[token] = p[token]
    return kept / kept.sum()


@pytest.mark.parametrize(
    ["p", "top_p", "expected"],
    [
        ([0.1, 0.4, 0.2, 0.3], 0.65, [0, 4 / 7, 0, 3 / 7]),
        ([0.1, 0.4, 0.2, 0.3], 0.75, [0, 4 / 9, 2 / 9, 3 / 9]),
        ([0.1, 0.4, 0.2, 0.3], 0.01, [0, 1, 0, 0]),
        ([0.1, 0.4, 0.2, 0.3], None, [0.1, 0.4, 0.2, 0.3]),
        ([0.25] * 4, 0.5, [0.25] * 4),  # tokens as likely as the last one, too
    ],
)
def test_tokens_are_drawn_from_the_fewest_likeliest_that_reach_top_p(p, top_p, expected, rng):
    keys, temperature = keys_of(rng), 0.5
    logits = jnp.broadcast_to(temperature * jnp.log(jnp.asarray(p)), (DRAWS, 4))
    top_p = None if top_p is None else jnp.float32(top_p)
    assert_drawn_from(draw(keys, logits, jnp.float32(temperature), top_p), np.asarray(expected))


def test_tokens_are_drawn_from_the_nucleus_of_random_logits(rng):
    logits, top_p = rng.normal(0, 2, 61).astype(np.float32), float(rng.uniform(0.3, 0.95))
    keys, temperature = keys_of(rng), float(rng.uniform(0.5, 1.5))
    rows = jnp.broadcast_to(jnp.asarray(logits), (DRAWS, 61))
    tokens = draw(keys, rows, jnp.float32(temperature), jnp.float32(top_p))
    assert_drawn_from(tokens, nucleus(logits.astype(np.float64), temperature, top_p))


@pytest.mark.parametrize(
    ["top_k", "top_p", "expected"],
    [
        (3, None, [0, 4 / 9, 2 / 9, 3 / 9]),
        (1, None, [0, 1, 0, 0]),
        (9, None, [0.1, 0.4, 0.2, 0.3]),
        (3, 0.45, [0, 4 / 7, 0, 3 / 7]),  # the likeliest of three has 4/9
        (3, 0.4, [0, 1, 0, 0]),
    ],
)
def test_tokens_are_drawn_from_the_top_k_likeliest_and_top_p_counts_among_them(top_k, top_p, expected, rng):
    logits = jnp.broadcast_to(jnp.log(jnp.asarray([0.1, 0.4, 0.2, 0.3])), (DRAWS, 4))
    top_p = None if top_p is None else jnp.float32(top_p)
    assert_drawn_from(draw(keys_of(rng), logits, jnp.float32(1), top_p, jnp.int32(top_k)), np.asarray(expected))


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.full), dict(temperature=0.9, top_p=0.9, top_k=20, key=jax.random.key(0))],
    ids=["likeliest", "random"],
)
def test_a_stream_yields_the_tokens_of_generate_and_ends_with_the_last_row(options, rng):
    model, prompts = make_model(), jnp.asarray(rng.integers(0, 29, MASK.shape), jnp.int32)
    options = dict(attention_mask=jnp.asarray(MASK), max_new_tokens=9, **options)
    free = np.asarray(generate(model, prompts, **options, eos_token_id=()))[:, 8:]
    np.testing.assert_array_equal(np.stack([*stream(model, prompts, **options, eos_token_id=())], axis=1), free)
    stops = sorted({int(row[3]) for row in free})
    is_after = np.cumsum(np.isin(free, stops), axis=1) - np.isin(free, stops) > 0
    ended = np.where(is_after, 60, free)
    found = np.stack([*stream(model, prompts, **options, eos_token_id=stops, pad_token_id=60)], axis=1)
    assert found.shape[1] <= 4
    np.testing.assert_array_equal(found, ended[:, : found.shape[1]])
    with pytest.raises(ValueError, match="max_new_tokens=0 must be at least 1"):  # before it is asked for a token
        stream(model, prompts, max_new_tokens=0)


def test_both_of_two_random_tokens_have_the_model_s_probabilities(rng):
    model, prompt = make_model(), random_tokens(rng, batch=1, length=3)
    options = dict(temperature=0.8, top_p=0.9, key=jax.random.key(int(rng.integers(2**31))))
    out = np.asarray(generate(model, prompt.repeat(2000, axis=0), max_new_tokens=2, **options))
    common = np.bincount(out[:, 3]).argmax()
    logits = np.asarray(logits_of(model, jnp.append(prompt, common)[None].astype(jnp.int32)), np.float64)[0]
    assert_drawn_from(out[:, 3], nucleus(logits[2], 0.8, 0.9))
    assert_drawn_from(out[out[:, 3] == common, 4], nucleus(logits[3], 0.8, 0.9))


@pytest.mark.parametrize("choice", [{}, dict(temperature=0.7, key=jax.random.key(3))], ids=["likeliest", "random"])
def test_a_logit_without_a_softmax_gives_minus_one_wherever_it_is(choice, rng):
    model, prompts = make_model(), random_tokens(rng)
    head = model.lm_head[...]
    decode = nnx.jit(lambda model: generate(model, prompts, max_new_tokens=2, eos_token_id=(), **choice))
    for wrong in (jnp.nan, jnp.inf):  # an infinite weight makes logits of inf or −inf, or NaN; all but −inf are wrong
        for row in (0, 5):
            model.lm_head[...] = head.at[row].set(wrong)
            logits = np.asarray(logits_of(model, prompts))[:, -1]
            is_wrong = ~np.isfinite(logits.max(-1))
            assert wrong == jnp.inf or is_wrong.all()
            assert np.array_equal(np.asarray(decode(model))[:, prompts.shape[1]] == -1, is_wrong)


@pytest.mark.parametrize("temperature, top_p", [(1.2e-38, None), (1.2e-38, 0.5), (1.0, 1.2e-38), (1.2e-38, 1.2e-38)])
def test_at_the_least_temperature_and_top_p_the_likeliest_token_is_drawn(temperature, top_p, rng):
    logits = jnp.asarray(100 * rng.standard_normal((5, 61)), jnp.float32)
    keys = jax.random.split(jax.random.key(0), 5)
    found = jax.jit(draw)(keys, logits, jnp.float32(temperature), None if top_p is None else jnp.float32(top_p))
    np.testing.assert_array_equal(found, logits.argmax(-1))


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ["options", "message"],
    [
        (dict(num_return_sequences=0), "num_return_sequences=0 must be at least 1"),
        (dict(max_new_tokens=0), "max_new_tokens=0 must be at least 1"),
        (dict(max_new_tokens=62), "3 positions of input_ids and max_new_tokens=62 are more than the 64 that .* fewer"),
        (dict(temperature=-1.0), "temperature=-1.0 must be 0, .* or positive"),
        (dict(temperature=float("nan")), "temperature=nan must be 0"),
        (dict(temperature=1e-39), "temperature=1e-39 must be 0, .* in float32, from 1.2e-38 to 3.4e.38"),
        (dict(temperature=1e39), "temperature=1e.39 must be 0, .* in float32"),
        (dict(temperature=1.0), "temperature=1.0 samples tokens, and key is None. Pass key="),
        (dict(top_p=0.0), r"top_p=0.0 must be in \(0, 1\]"),
        (dict(top_p=1e-39), r"top_p=1e-39 must be in \(0, 1\], and at least 1.2e-38, the smallest number"),
        (dict(top_p=1.5), r"top_p=1.5 must be in \(0, 1\]"),
        (dict(top_p=0.5), "temperature=0 takes the most likely token, so key, top_p and top_k would be ignored"),
        (dict(top_k=3), "temperature=0 takes the most likely token, so key, top_p and top_k would be ignored"),
        (dict(top_k=0), "top_k=0 must be at least 1"),
        (dict(key=0), "temperature=0 takes the most likely token"),
        (dict(pad_token_id=0), "pad_token_id=0 is given without eos_token_id"),
        (dict(eos_token_id=61), r"eos_token_id or pad_token_id is 61, and must be in \[0, 61\)"),
        (dict(attention_mask=jnp.ones((2, 2))), r"input_ids has shape \(1, 3\) and attention_mask \(2, 2\)"),
        (dict(attention_mask=jnp.zeros((1, 3))), "attention_mask hides all tokens of row 0"),
        (dict(input_ids=jnp.array([[1, 61, 2]])), r"input_ids holds 61, which is not a token in \[0, 61\)"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_what_cannot_be_generated_is_refused(options, message):
    arguments = dict(input_ids=jnp.ones((1, 3), jnp.int32), max_new_tokens=2) | options
    with pytest.raises(ValueError, match=message):
        generate(make_model(), **arguments)


@pytest.mark.full
def test_a_token_outside_the_vocabulary_gives_minus_one_where_it_cannot_be_seen():
    model = make_model()
    tokens = jax.jit(lambda ids: generate(model, ids, max_new_tokens=3))(jnp.array([[1, 2], [1, 61]]))
    assert np.all(tokens[0] >= 0) and np.all(tokens[1, 2:] == -1)


def test_a_cache_that_does_not_fit_is_refused(rng):
    model, tokens = make_model(), random_tokens(rng)
    with pytest.raises(ValueError, match=r"length=65 must be in \[1, 64\].*max_position_embeddings"):
        model.init_cache(2, 65)
    with pytest.raises(ValueError, match="batch=0 must be at least 1"):
        model.init_cache(0, 5)
    with pytest.raises(
        ValueError, match=r"cache has 11 slots, of which 0 are written, and .* 12 .*init_cache\(batch, 12"
    ):
        model(tokens, cache=model.init_cache(2, 11))
    with pytest.raises(ValueError, match="cache has 3 rows, and input_ids has 2"):
        model(tokens, cache=model.init_cache(3, 12))
    with pytest.raises(ValueError, match="segment_ids is given with a cache"):
        model(tokens, cache=model.init_cache(2, 12), segment_ids=jnp.zeros((2, 12), jnp.int32))


def test_under_jit_a_cache_that_is_too_short_makes_logits_nan(rng):
    model, tokens = make_model(), random_tokens(rng, length=4)
    _, cache = call(model, tokens, None, model.init_cache(2, 7))
    logits, _ = call(model, tokens, None, cache)
    assert np.isnan(logits).all()


@pytest.mark.parametrize("choice", [{}, dict(temperature=0.7, key=jax.random.key(3))], ids=["likeliest", "random"])
def test_sequences_of_a_prompt_are_those_of_a_batch_that_repeats_it(choice, rng):
    model, prompts, mask = make_model(), random_tokens(rng, length=5), jnp.asarray([[1] * 5, [0, 0, 1, 1, 1]])
    options = dict(max_new_tokens=7, eos_token_id=(), return_log_probs=True, **choice)
    found = generate(model, prompts, attention_mask=mask, num_return_sequences=3, **options)
    of_all = (jnp.repeat(x, 3, axis=0) for x in (prompts, mask))
    expected = generate(model, next(of_all), attention_mask=next(of_all), **options)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-6)
    if choice:
        assert len({tuple(row) for row in found[0][:3].tolist()}) > 1


# --- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [{}, {"temperature": 0.7, "top_p": 0.6, "key": jax.random.key(3)}], ids=str)
def test_log_probabilities_are_the_model_s_own_before_top_p(choice, rng):
    model, prompts = make_model(), random_tokens(rng, length=4)
    options = dict(max_new_tokens=6, return_log_probs=True, **choice)
    tokens, found = generate(model, prompts, eos_token_id=(), **options)
    scores = nnx.jit(lambda model: model.log_probs(tokens, labels=tokens, temperature=choice.get("temperature", 1.0)))
    of_all = scores(model).log_probs
    np.testing.assert_allclose(found, of_all[:, 3:-1], rtol=1e-4, atol=1e-5)
    stop = int(tokens[0, 5])  # the first row's second new token, unless it is the first one, too
    ended, found_until = generate(model, prompts, eos_token_id=stop, **options)
    is_after = np.cumsum(np.asarray(ended[:, 4:]) == stop, axis=1) - (np.asarray(ended[:, 4:]) == stop) > 0
    assert is_after.any() and found.dtype == jnp.float32
    np.testing.assert_allclose(found_until, np.where(is_after, 0, found), rtol=1e-4, atol=1e-5)
