"""A loss of packed rows is the loss of the same sequences in their own rows, and so are its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from liger_jax import losses
from liger_jax.losses._dpo_formulas import LOSS_TYPES as DPO_TYPES
from liger_jax.losses._policy_formulas import LOSS_TYPES, SEQUENCE_TYPES
from liger_jax.training import make_step, pack_completions, pack_pairs
from tests.losses._oracle import close

B, T, LENGTH = 12, 8, 20  # sequences, the longest of them, a row
EXACT = 1e-6  # share of the largest number: both sides are sums of float32 in another order
MAX_LENGTH = 9


class Batch:
    """Sequences of random lengths, each in its own row and packed; a token's id is its place in (B, T)."""

    def __init__(self, rng, pairs=False, rows=None):
        self.lengths = rng.integers(1, T + 1, B)
        sequences = [np.arange(n) + i * T for i, n in enumerate(self.lengths)]
        if pairs:
            batch, chosen, rejected = pack_pairs(sequences[: B // 2], sequences[B // 2 :], LENGTH)
            self.places = jnp.asarray(np.concatenate([chosen, rejected]))
        else:
            batch, places = pack_completions(list(zip(sequences[::2], sequences[1::2], strict=True)), LENGTH)
            self.places = jnp.asarray(places)
        more = 0 if rows is None else -len(batch["input_ids"]) % rows
        empty = lambda x: np.pad(x, ((0, more), (0, 0)))
        self.tokens, self.segment_ids = empty(batch["input_ids"]), empty(batch["segment_ids"])
        self.num_segments = int(self.segment_ids.max())
        self.mask = (np.arange(T) < self.lengths[:, None]) & (rng.uniform(size=(B, T)) < 0.8)
        self.mask[:, 0] = True
        self.mask[1] = False  # such a completion was cut off
        self.shape = len(self.tokens), self.num_segments

    @property
    def segments(self):
        return dict(segment_ids=jnp.asarray(self.segment_ids), num_segments=self.num_segments)

    def packed(self, x, elsewhere=np.nan):
        """Numbers of tokens (B, T) as the packed rows hold them; what stands at empty places must not matter."""
        return jnp.asarray(np.where(self.segment_ids > 0, np.asarray(x).reshape(-1)[self.tokens], elsewhere))

    def laid(self, x):
        """Numbers of sequences (B,) as (rows, segments)."""
        return losses.place_segments(jnp.asarray(x, jnp.float32), self.places, self.shape)

    def assert_same(self, packed, padded, arrays, names, of_packed, of_padded):
        """The values and the gradients by all arrays of tokens, of two functions that return a vector."""

        def run(f, arrays, others):
            value, pullback = jax.vjp(functools.partial(f, **others), *arrays)
            return value, jax.vmap(pullback)(jnp.eye(len(value)))

        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            expected, truths = jax.jit(functools.partial(run, padded))([jnp.asarray(x) for x in arrays], of_padded)
            found, gradients = jax.jit(functools.partial(run, packed))([self.packed(x) for x in arrays], of_packed)
        expected, truths, found, gradients = jax.device_get((expected, truths, found, gradients))
        for i, name in enumerate(names):
            try:
                of_terms = max(float(np.abs(np.asarray(x) * t[i]).sum()) for x, t in zip(arrays, truths, strict=True))
                close(found[i], expected[i], EXACT, scale=max(of_terms, 0.1))  # float32 rounds logarithms near 0 so
                for gradient, truth in zip(gradients, truths, strict=True):  # whose terms may cancel
                    close(gradient[i], self.packed(truth[i], elsewhere=0.0), EXACT, scale=0.03)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


@pytest.fixture
def tokens(rng):
    """Log-probabilities under three policies, and entropies."""
    policy = -rng.gamma(1.0, 1.0, (B, T))
    others = [policy + scale * rng.standard_normal((B, T)) for scale in (0.4, 0.5)]
    return [x.astype(np.float32) for x in (policy, *others, rng.gamma(1.0, 1.0, (B, T)))]


def policy_losses(x, old, reference, entropy, *, advantages, importance, **options):
    """Every type at every level, with all that acts at once."""
    found = {}
    for loss_type in LOSS_TYPES:
        for level in ("token",) if loss_type in SEQUENCE_TYPES else ("token", "sequence"):
            own = dict(max_length=MAX_LENGTH) if loss_type == "dr_grpo" else {}
            found[f"{loss_type}, {level}"] = losses.policy_loss(
                x, old, advantages, reference_log_probs=reference, importance_ratio=importance, entropy=entropy,
                entropy_coef=0.1, beta=0.1, loss_type=loss_type, importance_level=level, **own, **options,
            ).loss  # fmt: skip
    return found


@pytest.mark.parametrize("by_token", [False, True], ids=["numbers of sequences", "numbers of tokens"])
def test_policy_losses(by_token, tokens, rng):
    batch = Batch(rng)
    shape = (B, T) if by_token else (B,)
    advantages, importance = rng.standard_normal(shape), rng.uniform(0.5, 2.0, shape)
    advantages, importance = (jnp.asarray(x, jnp.float32) for x in (advantages, importance))
    column = importance if by_token else importance[:, None]
    own = dict(advantages=advantages, importance=column, mask=jnp.asarray(batch.mask))
    lay = (lambda x: batch.packed(x)) if by_token else batch.laid
    mask = batch.packed(batch.mask, elsewhere=True).astype(bool)
    packed = dict(
        advantages=lay(advantages), importance=lay(importance), mask=mask, segment_ids=batch.segments["segment_ids"]
    )
    names = jax.eval_shape(policy_losses, *map(jnp.asarray, tokens), **own)
    of = lambda **options: lambda *arrays, **others: jnp.stack([*policy_losses(*arrays, **others, **options).values()])
    batch.assert_same(of(num_segments=batch.num_segments), of(), tokens, names, packed, own)


def test_what_is_logged_counts_the_same_tokens(tokens, rng):
    batch = Batch(rng)
    advantages = jnp.asarray(rng.standard_normal(B), jnp.float32)
    options = dict(loss_type="grpo", importance_level="sequence", epsilon_low=0.05)

    @functools.partial(jax.jit, static_argnames="num_segments")
    def output(advantages, mask, x, old, reference, **more):
        return losses.policy_loss(x, old, advantages, mask=mask, reference_log_probs=reference, **options, **more)

    own = output(advantages, jnp.asarray(batch.mask), *map(jnp.asarray, tokens[:3]))
    mask = batch.packed(batch.mask, elsewhere=False).astype(bool)
    packed = output(batch.laid(advantages), mask, *map(batch.packed, tokens[:3]), **batch.segments)
    for name in ("loss", "kl", "clipped_low", "clipped_high"):
        close(getattr(packed, name), getattr(own, name), EXACT, scale=1.0)
    close(packed.token_losses, batch.packed(own.token_losses, elsewhere=0.0), EXACT)


def preference_losses(policy, reference, squares, *, sequences, split, counts, shared):
    """Every loss of pairs and of single responses; `sequences` makes numbers (B,) of numbers of tokens."""
    chosen, rejected = split(sequences(policy))
    references = split(sequences(reference))
    means = split(sequences(policy, average=True))
    of_counts = dict(zip(("chosen_tokens", "rejected_tokens"), split(counts), strict=True))
    found = {}
    for name in DPO_TYPES:
        own = dict(label_smoothing=0.1) if name in ("exo_pair", "robust", "aot", "aot_unpaired") else {}
        read = {"ipo": 2, "sigmoid_norm": 2, "sft": 1}.get(name, 0)
        own |= dict(list(of_counts.items())[:read])
        found[name] = losses.dpo_loss(chosen, rejected, *references, loss_type=name, **own).losses
    weights = split(sequences(policy, squares=squares))
    found["WPO"] = losses.dpo_loss(chosen, rejected, *references, pair_weights=weights[0] * weights[1]).losses
    ld = [split(sequences(x, ld_alpha=0.4, shared_tokens=shared)) for x in (policy, reference)]
    found["LD-DPO"] = losses.dpo_loss(*ld[0], *ld[1]).losses
    found["ORPO"] = losses.orpo_loss(means[0], means[1], -means[0]).losses
    found["SimPO"] = losses.simpo_loss(*means).losses
    found["CPO"] = losses.cpo_loss(chosen, rejected, -means[0]).losses
    both = jnp.concatenate([chosen, rejected]), jnp.concatenate(references)
    found["KTO"] = losses.kto_loss(*both, jnp.arange(B) < B // 2, kl=0.3).losses
    return {name: x.mean() for name, x in found.items()}


def test_preference_losses(tokens, rng):
    batch = Batch(rng, pairs=True)
    batch.mask[1, 0] = True  # a response's mean is over its tokens
    counts = batch.mask.sum(1)
    shared = np.tile(np.minimum(counts[: B // 2], counts[B // 2 :]), 2)
    split = lambda x: jnp.split(x, 2)

    def sequences(x, *, mask, segments, take, squares=None, **options):
        if squares is not None:
            return take(losses.wpo_weights(x, squares, mask, **segments))
        return take(losses.sequence_log_probs(x, mask, **segments, **options))

    def found(*arrays, mask, counts, shared, places=None, segment_ids=None):
        segments, take = {}, lambda x: x
        if segment_ids is not None:
            segments = dict(segment_ids=segment_ids, num_segments=batch.num_segments)
            take = lambda x: losses.take_segments(x, places)
        of = functools.partial(sequences, mask=mask, segments=segments, take=take)
        return preference_losses(*arrays, sequences=of, split=split, counts=counts, shared=shared)

    take = lambda x: losses.take_segments(x, batch.places)
    mask = batch.packed(batch.mask, elsewhere=True).astype(bool)
    own = dict(mask=jnp.asarray(batch.mask), counts=jnp.asarray(counts), shared=jnp.asarray(shared))
    packed = own | dict(mask=mask, shared=batch.laid(shared).astype(jnp.int32), places=batch.places)
    packed |= dict(segment_ids=batch.segments["segment_ids"])
    arrays = [tokens[0], tokens[1], -np.abs(tokens[2])]
    names = jax.eval_shape(found, *map(jnp.asarray, arrays), **own)
    of = lambda *arrays, **others: jnp.stack([*found(*arrays, **others).values()])
    batch.assert_same(of, of, arrays, names, packed, own)
    sums = losses.sequence_log_probs(batch.packed(tokens[0]), mask, **batch.segments)
    in_rows = sums[:, 0::2][jnp.asarray(batch.places[: B // 2, 0]), jnp.asarray(batch.places[: B // 2, 1]) // 2]
    np.testing.assert_array_equal(in_rows, take(sums)[: B // 2])  # the form that micro-batches cut by rows


class Unigram(nnx.Module):
    def __init__(self, logits):
        self.logits = nnx.Param(jnp.asarray(logits))

    def __call__(self, tokens):
        return jax.nn.log_softmax(self.logits[...])[tokens]


@pytest.mark.parametrize("loss_type, level", [("grpo", "sequence"), ("dapo", "token"), ("vespo", "token")])
def test_micro_batches_of_packed_rows_add_up_to_the_sequences_step(loss_type, level, tokens, rng):
    batch = Batch(rng, rows=2)
    graph, params = nnx.split(Unigram(rng.standard_normal(B * T).astype(np.float32)))
    advantages = jnp.asarray(rng.standard_normal(B), jnp.float32)
    options = dict(loss_type=loss_type, importance_level=level, importance_ratio=None)

    def loss_fn(model, batch, denominator, num_segments=None):
        more = {} if num_segments is None else dict(segment_ids=batch["segment_ids"], num_segments=num_segments)
        return losses.policy_loss(
            model(batch["input_ids"]), batch["old"], batch["advantages"], mask=batch["mask"], denominator=denominator,
            **options, **more,
        ).loss  # fmt: skip

    def normalizer(batch, num_segments=None):
        more = {} if num_segments is None else dict(segment_ids=batch["segment_ids"], num_segments=num_segments)
        return losses.policy_weights(batch["mask"], loss_type, **more)[1]

    old = -4.5 + tokens[1]
    own = dict(input_ids=np.arange(B * T).reshape(B, T), old=old, advantages=advantages, mask=batch.mask)
    mask = batch.packed(batch.mask, elsewhere=False).astype(bool)
    packed = dict(input_ids=batch.tokens, old=batch.packed(old), advantages=batch.laid(advantages), mask=mask)
    packed["segment_ids"] = batch.segment_ids
    optimizer = optax.sgd(1.0)
    state = params, optimizer.init(params)
    with_segments = lambda f: functools.partial(f, num_segments=batch.num_segments)
    steps = [
        (make_step(graph, optimizer, loss_fn, normalizer=normalizer), own),
        (
            make_step(graph, optimizer, with_segments(loss_fn), normalizer=with_segments(normalizer), micro_batches=2),
            packed,
        ),
    ]
    (expected, loss), (found, value) = [jax.jit(step)(state, jax.tree.map(jnp.asarray, x)) for step, x in steps]
    close(value, loss, EXACT, scale=1.0)
    moved = lambda state: jax.tree.leaves(state[0])[0] - jax.tree.leaves(params)[0]
    close(moved(found), moved(expected), 2.4e-7, scale=1.0)  # differences of numbers of about 1, of two roundings each


@pytest.mark.parametrize("kind", ["auto", "explicit", "shard_map"])
def test_rows_over_a_mesh(kind, devices, tokens, rng):
    batch = Batch(rng, rows=len(devices))
    types = (jax.sharding.AxisType.Explicit if kind == "explicit" else jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.Mesh(devices, ("rows",), axis_types=types)
    mask = batch.packed(batch.mask, elsewhere=False).astype(bool)
    arrays = [*map(batch.packed, tokens[:2]), batch.laid(rng.standard_normal(B)), mask, jnp.asarray(batch.segment_ids)]
    count = dict(num_segments=batch.num_segments)

    def loss(x, old, advantages, mask, segment_ids, denominator=None):
        options = dict(mask=mask, segment_ids=segment_ids, denominator=denominator, **count)
        return sum(
            losses.policy_loss(x, old, advantages, loss_type="grpo", importance_level=level, **options).loss
            for level in ("token", "sequence")
        )

    def on_shards(*arrays):
        denominator = losses.policy_weights(arrays[3], "grpo", segment_ids=arrays[4], **count)[1]
        denominator = jax.lax.psum(denominator, "rows")
        return jax.lax.psum(loss(*arrays, denominator=denominator), "rows")

    run = jax.jit(jax.value_and_grad(loss))
    expected, truth = run(*arrays)
    placed = [jax.device_put(x, jax.NamedSharding(mesh, jax.P("rows"))) for x in arrays]
    if kind == "shard_map":
        run = jax.jit(
            jax.value_and_grad(jax.shard_map(on_shards, mesh=mesh, in_specs=jax.P("rows"), out_specs=jax.P()))
        )
    with jax.set_mesh(mesh):
        found, gradient = run(*placed)
    close(found, expected, EXACT, scale=1.0)
    close(gradient, truth, EXACT)
    assert gradient.sharding.is_equivalent_to(placed[0].sharding, 2)


# --- what does not fit ------------------------------------------------------------------------------------------------

IDS = jnp.asarray([[1, 1, 2, 2, 0], [1, 2, 2, 3, 3]])
X = -jnp.arange(1.0, 11.0).reshape(2, 5)
ALL = jnp.ones((2, 5), bool)
FULL = dict(segment_ids=IDS, num_segments=2)


def test_a_row_that_does_not_fit_is_nan_and_others_are_right():
    f = jax.jit(lambda x, ids, **o: losses.sequence_log_probs(x, segment_ids=ids, num_segments=2, **o))
    found = f(X, IDS)
    np.testing.assert_array_equal(found, [[-3.0, -7.0], [np.nan, np.nan]])
    gradient = jax.jit(jax.grad(lambda x, ids: f(x, ids)[0].sum() + 0.0 * f(x, ids)[1, 0]))(X, IDS)
    np.testing.assert_array_equal(gradient, [[1.0, 1.0, 1.0, 1.0, 0.0], [np.nan] * 5])
    negative = IDS.at[1].set(jnp.asarray([1, 1, 2, 2, -1]))
    assert np.isnan(f(X, negative)[1]).all()
    weights = jax.jit(lambda ids: losses.wpo_weights(X, X, ALL, segment_ids=ids, num_segments=2))(IDS)
    assert np.isnan(weights[1]).all() and not np.isnan(weights[0]).any()
    assert np.isnan(jax.jit(losses.spread_segments)(jnp.ones((2, 2)), IDS)[1]).all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_policy_loss_with_a_row_that_does_not_fit_is_nan(loss_type):
    own = dict(max_length=MAX_LENGTH) if loss_type == "dr_grpo" else {}

    def numbers(x, ids):
        segments = dict(segment_ids=ids, num_segments=2)
        f = lambda x: losses.policy_loss(x, X - 0.1, jnp.ones((2, 2)), mask=ALL, loss_type=loss_type, **own, **segments)
        weights = losses.policy_weights(ALL, loss_type, own.get("max_length"), **segments)
        return f(x).loss, f(x).token_losses[1], jax.grad(lambda x: f(x).loss)(x)[1], weights[0][1], weights[1]

    assert all(np.isnan(x).all() for x in jax.jit(numbers)(X, IDS))


def test_a_row_with_padding_before_a_segment_is_nan():
    ids = IDS.at[1].set(jnp.asarray([0, 0, 1, 1, 1]))

    def numbers(x, ids):
        segments = dict(segment_ids=ids, num_segments=3)
        sums = lambda x: losses.sequence_log_probs(x, **segments)
        spread = losses.spread_segments(jnp.ones((2, 3)), ids)
        gradient = jax.grad(lambda x: sums(x)[:, 0].sum())(x)[:, 2:]
        return sums(x), gradient, spread, losses.wpo_weights(x, x, ALL, **segments)

    for x in jax.jit(numbers)(X, ids):
        assert np.isnan(x[1]).all() and np.isfinite(x[0]).all()
    with pytest.raises(ValueError, match="segment_ids hold a 0 at position 1 and 1 after it, but 0 is padding"):
        numbers(X, ids)


def test_segments_that_a_row_does_not_have_are_0_and_count_for_nothing():
    ids = IDS.at[1].set(jnp.asarray([1, 1, 1, 0, 0]))
    sums = losses.sequence_log_probs(X, segment_ids=ids, num_segments=3, average=True)
    np.testing.assert_array_equal(sums, [[-1.5, -3.5, 0.0], [-7.0, 0.0, 0.0]])
    assert losses.policy_weights(ALL, "grpo", segment_ids=ids, num_segments=3)[1] == 3
    nothing = jnp.zeros_like(ids)
    f = jax.jit(lambda x: losses.policy_loss(x, None, jnp.ones((2, 3)), mask=ALL, segment_ids=nothing, num_segments=3))
    assert f(X).loss == 0


def test_truncated_completions_are_masked_in_both_layouts(rng):
    batch = Batch(rng)
    truncated = rng.uniform(size=B) < 0.5
    own = losses.mask_truncated(jnp.asarray(batch.mask), jnp.asarray(truncated))
    np.testing.assert_array_equal(own, batch.mask & ~truncated[:, None])
    mask = batch.packed(batch.mask, elsewhere=False).astype(bool)
    laid = batch.laid(truncated).astype(bool)
    packed = losses.mask_truncated(mask, laid, **batch.segments)
    np.testing.assert_array_equal(packed, batch.packed(own, elsewhere=False).astype(bool))


def test_the_layouts_of_numbers_of_sequences_convert_both_ways(rng):
    batch = Batch(rng)
    values = jnp.asarray(rng.standard_normal(B), jnp.float32)
    laid = losses.place_segments(values, batch.places, batch.shape)
    np.testing.assert_array_equal(losses.take_segments(laid, batch.places), values)
    spread = losses.spread_segments(laid, jnp.asarray(batch.segment_ids))
    np.testing.assert_array_equal(spread, batch.packed(np.repeat(values, T).reshape(B, T), elsewhere=0.0))
    outside = batch.places.at[0].set(jnp.asarray([0, batch.num_segments]))
    assert np.isnan(jax.jit(losses.take_segments)(laid, outside)[0])
    assert np.isnan(jax.jit(losses.place_segments, static_argnums=2)(values, outside, batch.shape)).all()


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: losses.sequence_log_probs(X, **FULL),
            ValueError,
            "sequence_log_probs: segment_ids hold 3, but num_segments=2 keeps a place for segments 1 to 2; pass num",
        ),
        (lambda: losses.policy_weights(ALL, **FULL), ValueError, "policy_weights: segment_ids hold 3"),
        (lambda: losses.wpo_weights(X, X, ALL, **FULL), ValueError, "wpo_weights: segment_ids hold 3"),
        (lambda: losses.spread_segments(X[:, :2], IDS), ValueError, "spread_segments: segment_ids hold 3, but"),
        (lambda: losses.sequence_log_probs(X, num_segments=2), ValueError, "segment_ids and num_segments belong"),
        (
            lambda: losses.sequence_log_probs(X, segment_ids=IDS - 1, num_segments=3),
            ValueError,
            "segment_ids hold -1, but must count from 1",
        ),
        (
            lambda: losses.sequence_log_probs(X, segment_ids=IDS, num_segments=jnp.asarray(3)),
            TypeError,
            "num_segments is a .*, but must be a Python int",
        ),
        (lambda: losses.sequence_log_probs(X, segment_ids=IDS, num_segments=0), ValueError, "num_segments=0 must be"),
        (
            lambda: losses.sequence_log_probs(X, segment_ids=IDS.astype(float), num_segments=3),
            TypeError,
            "segment_ids have dtype float32, but must be integers",
        ),
        (
            lambda: losses.sequence_log_probs(X, segment_ids=IDS[:1], num_segments=3),
            ValueError,
            r"segment_ids has shape \(1, 5\), but must have shape \(2, 5\)",
        ),
        (
            lambda: losses.sequence_log_probs(X, IDS != 2, average=True, segment_ids=IDS, num_segments=3),
            ValueError,
            "where counts no token for row 0 and segment 1; its mean is undefined",
        ),
        (
            lambda: losses.take_segments(X, jnp.asarray([[0, 0], [2, 0]])),
            ValueError,
            r"places hold \[2, 0\], but rows and segments count from 0 in \(2, 5\)",
        ),
        (lambda: losses.take_segments(X, jnp.zeros((3, 1), int)), ValueError, r"places has shape \(3, 1\), but"),
        (lambda: losses.place_segments(X[0], jnp.zeros((3, 2), int), (2, 2)), ValueError, "there are 5 values and 3"),
        (lambda: losses.mask_truncated(ALL, jnp.ones(2)), TypeError, "truncated has dtype float32, but must be bool"),
        (lambda: losses.mask_truncated(ALL, ALL[:, :2]), ValueError, r"truncated has shape \(2, 2\), but must"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_outside_of_jit(call, error, message, unchecked_types):
    with pytest.raises(error, match=message):
        call()
