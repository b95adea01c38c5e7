"""policy_loss is its papers' objective in TRL's definition, and policy_token_loss is the part that is separable."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.losses import group_advantages, policy_loss, policy_token_loss, policy_weights, reinforce_advantages
from liger_jax.losses._policy_formulas import CLIPPING_TYPES, LOSS_TYPES, SEQUENCE_TYPES
from tests.losses import _oracle
from tests.losses._oracle import close

B, T = 4, 6
MASK = np.arange(T) < np.array([[6], [2], [4], [1]])
MASK[0, 2] = False  # a tool's answer amid a completion
ADVANTAGES = np.array([1.3, -0.7, 0.4, -2.0])
MAX_LENGTH = 9
SEPARABLE_TYPES = [t for t in LOSS_TYPES if t not in SEQUENCE_TYPES]
# The old policy and the reference are constants.
assert_matches = functools.partial(_oracle.assert_matches, constants=(1, 2))
TYPES_AND_LEVELS = [(t, "token") for t in LOSS_TYPES] + [(t, "sequence") for t in SEPARABLE_TYPES]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def oracle(
    log_probs,
    old,
    reference=None,
    *,
    loss_type="dapo",
    level="token",
    low=0.2,
    high=0.2,
    delta=None,
    beta=0.0,
    unbiased=True,
    importance=1.0,
    advantages=ADVANTAGES[:, None],
    detached=None,
):
    """Token by token, by the papers' cases; `detached` is where the gradient is stopped."""
    counts = MASK.sum(1, keepdims=True)
    log_ratio = log_probs - old
    if level == "sequence":
        log_ratio = (log_ratio * MASK).sum(1, keepdims=True) / counts
    ratio = np.exp(log_ratio)
    advantages = np.broadcast_to(advantages, MASK.shape)
    if loss_type == "cispo":
        constant = ratio if detached is None else np.exp(detached - old)
        losses = -np.minimum(constant, high) * advantages * log_probs
    elif loss_type == "sapo":
        tau = np.where(advantages > 0, 1.0, 1.05)
        losses = -4 / tau * sigmoid(tau * (ratio - 1)) * advantages
    elif loss_type == "vespo":
        terms = ((log_ratio if detached is None else detached - old) + np.log(importance)) * MASK
        w = np.exp(np.clip(terms.sum(1, keepdims=True), np.log(1e-8), 20))
        k, lam = np.where(advantages >= 0, 2.0, 3.0), np.where(advantages >= 0, 3.0, 2.0)
        losses, importance = -np.exp(lam) * w**k * np.exp(-lam * w) * advantages * log_probs, 1.0
    elif loss_type == "gmpo":
        clipped = np.where(advantages > 0, np.minimum(log_ratio, high), np.maximum(log_ratio, -low))
        mean = (clipped * MASK).sum(1, keepdims=True) / counts
        losses, unbiased = -np.exp(mean) * advantages, False
    else:
        bounded = np.minimum(ratio, np.inf if delta is None else delta)
        losses = -np.minimum(bounded * advantages, np.clip(ratio, 1 - low, 1 + high) * advantages)
    losses = losses * importance
    if beta:
        d = reference - log_probs
        losses = losses + beta * (np.exp(d) - d - 1) * (ratio if unbiased else 1)
    losses = losses * MASK
    if loss_type in ("grpo", "sapo", "gmpo"):
        return np.mean(losses.sum(1) / counts[:, 0])
    if loss_type == "luspo":
        return np.mean(losses.sum(1))
    return losses.sum() / (B * MAX_LENGTH if loss_type == "dr_grpo" else MASK.sum())


def options_of(loss_type):
    return dict(loss_type=loss_type, mask=jnp.asarray(MASK)) | (
        dict(max_length=MAX_LENGTH) if loss_type == "dr_grpo" else {}
    )


def loss(log_probs, old, reference=None, *, advantages=ADVANTAGES, **options):
    advantages = jnp.asarray(advantages, jnp.float32)
    return policy_loss(log_probs, old, advantages, reference_log_probs=reference, **options).loss


@pytest.fixture
def arrays(rng):
    """Log-probabilities under the policy, the one that sampled, and the reference."""
    policy = -rng.gamma(1.0, 1.0, (B, T))
    return [policy, policy + 0.4 * rng.standard_normal((B, T)), policy + 0.5 * rng.standard_normal((B, T))]


@pytest.mark.parametrize("loss_type, level", [x for x in TYPES_AND_LEVELS if x[0] not in ("cispo", "vespo")])
def test_every_type_is_its_paper_s_objective_at_both_levels(loss_type, level, arrays):
    ours = functools.partial(loss, importance_level=level, **options_of(loss_type))
    ranges = dict(low=0.4, high=0.4) if loss_type == "gmpo" else {}
    assert_matches(ours, functools.partial(oracle, loss_type=loss_type, level=level, **ranges), arrays[:2])


def test_gmpo_clips_log_ratios_and_adds_a_plain_penalty(arrays):
    ours = functools.partial(loss, epsilon_low=0.1, epsilon_high=0.3, beta=0.3, **options_of("gmpo"))
    assert_matches(ours, functools.partial(oracle, loss_type="gmpo", low=0.1, high=0.3, beta=0.3), arrays)


@pytest.mark.parametrize("shape", [(B, 1), (B, T)])
def test_vespo_weighs_a_sequence_by_all_its_ratios_and_not_the_gradient(shape, arrays, rng):
    """A sequence's importance ratio is a factor of its weight once, and each token's is one."""
    policy, old = arrays[:2]
    importance = rng.uniform(0.5, 2.0, shape).astype(np.float32)
    ours = lambda x: loss(
        x, jnp.asarray(old, jnp.float32), importance_ratio=jnp.asarray(importance), **options_of("vespo")
    )
    old, fixed = (np.float32(x).astype(np.float64) for x in (old, policy))
    shares = importance if shape == (B, T) else importance ** (1 / MASK.sum(1, keepdims=True))
    options = dict(loss_type="vespo", detached=fixed, importance=shares.astype(np.float64))
    assert_matches(ours, lambda x: oracle(x, old, **options), [policy])


def test_cispo_clips_the_weight_and_not_the_gradient(arrays):
    policy, old = arrays[:2]
    ours = lambda x: loss(x, jnp.asarray(old, jnp.float32), epsilon_high=1.1, **options_of("cispo"))
    old = np.float32(old).astype(np.float64)
    fixed = np.float32(policy).astype(np.float64)
    assert_matches(ours, lambda x: oracle(x, old, loss_type="cispo", high=1.1, detached=fixed), [policy])


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("loss_type, level", [("dapo", "token"), ("grpo", "sequence"), ("sapo", "token")])
def test_the_penalty_is_k3_times_the_ratio_or_plain(loss_type, level, unbiased, arrays):
    options = options_of(loss_type) | dict(importance_level=level, beta=0.3, unbiased_kl=unbiased)
    ours = functools.partial(loss, **options)
    assert_matches(
        ours, functools.partial(oracle, loss_type=loss_type, level=level, beta=0.3, unbiased=unbiased), arrays
    )


def test_ranges_and_delta_are_options(arrays):
    arrays = [arrays[0], arrays[0] - 2 * (arrays[0] - arrays[1])]
    ours = functools.partial(loss, epsilon_low=0.1, epsilon_high=0.5, delta=1.7, **options_of("dapo"))
    assert_matches(ours, functools.partial(oracle, low=0.1, high=0.5, delta=1.7), arrays)


@pytest.mark.parametrize("shape", [(B, 1), (B, T)])
def test_importance_ratios_multiply_the_losses_and_not_the_penalty(shape, arrays, rng):
    importance = rng.uniform(0.5, 2.0, shape).astype(np.float32)
    ours = functools.partial(loss, importance_ratio=jnp.asarray(importance), beta=0.3, **options_of("dapo"))
    assert_matches(ours, functools.partial(oracle, importance=importance, beta=0.3), arrays)


def test_advantages_may_be_one_for_each_token(arrays, rng):
    advantages = rng.standard_normal((B, T)).astype(np.float32)
    ours = functools.partial(loss, advantages=advantages, **options_of("dapo"))
    assert_matches(ours, functools.partial(oracle, advantages=advantages), arrays[:2])


def test_the_entropy_bonus_is_a_mean_over_tokens_whatever_the_type(arrays, rng):
    entropy = rng.gamma(2.0, 1.0, (B, T))
    ours = lambda x, old, h: loss(x, old, entropy=h, entropy_coef=0.1, **options_of("grpo"))
    expected = lambda x, old, h: oracle(x, old, loss_type="grpo") - 0.1 * (h * MASK).sum() / MASK.sum()
    assert_matches(ours, expected, [*arrays[:2], entropy], constants=(1,))


@pytest.mark.parametrize("loss_type", SEPARABLE_TYPES)
def test_the_token_form_weighted_and_summed_is_the_loss(loss_type, arrays):
    policy, old, reference = (jnp.asarray(x, jnp.float32) for x in arrays)
    weights, denominator = policy_weights(
        jnp.asarray(MASK), loss_type, max_length=MAX_LENGTH if loss_type == "dr_grpo" else None
    )
    of_sequences = np.abs(ADVANTAGES)  # of one sign, so that nothing cancels
    advantages = jnp.broadcast_to(jnp.asarray(of_sequences, jnp.float32)[:, None], (B, T))

    def by_tokens(x):
        losses = policy_token_loss(x, old, advantages, reference, loss_type=loss_type, beta=0.1)
        return jnp.sum(weights * losses) / denominator

    whole = lambda x: loss(x, old, reference, beta=0.1, advantages=of_sequences, **options_of(loss_type))
    (found, gradient), (expected, true_gradient) = (jax.jit(jax.value_and_grad(f))(policy) for f in (by_tokens, whole))
    close(found, expected)
    close(gradient, true_gradient)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_micro_batches_of_one_step_add_up_to_it(loss_type, arrays, rng):
    policy, old = (jnp.asarray(x, jnp.float32) for x in arrays[:2])
    entropy = jnp.asarray(rng.gamma(2.0, 1.0, (B, T)), jnp.float32)
    options = options_of(loss_type) | dict(entropy_coef=0.1)
    _, denominator = policy_weights(jnp.asarray(MASK), loss_type, options.get("max_length"))

    def part(rows, **denominators):
        of_rows = dict(mask=jnp.asarray(MASK)[rows], entropy=entropy[rows], advantages=np.abs(ADVANTAGES)[rows])
        return loss(policy[rows], old[rows], **options | of_rows, **denominators)

    whole_step = dict(denominator=denominator, entropy_denominator=float(MASK.sum()))
    parts = lambda: part(slice(0, 1), **whole_step) + part(slice(1, B), **whole_step)
    close(jax.jit(parts)(), jax.jit(lambda: part(slice(None)))())


@pytest.mark.parametrize("loss_type, level", TYPES_AND_LEVELS)
def test_the_policy_itself_as_the_old_one_is_a_constant(loss_type, level, arrays):
    """Where it is computed in the same program, a ratio of one array to itself would have no gradient."""
    policy = jnp.asarray(arrays[0], jnp.float32)
    options = options_of(loss_type) | dict(importance_level=level)
    gradient = lambda f: jax.jit(jax.grad(f))(policy)
    close(gradient(lambda x: loss(x, x, **options)), gradient(lambda x: loss(x, None, **options)))


def test_all_but_the_policy_is_constant(arrays):
    policy, old, reference = (jnp.asarray(x, jnp.float32) for x in arrays)
    advantages = jnp.broadcast_to(jnp.asarray(ADVANTAGES, jnp.float32)[:, None], (B, T))
    others = old, advantages, reference, jnp.ones((B, T))

    def of_rows(old, advantages, reference, importance):
        options = options_of("grpo") | dict(beta=0.1, importance_ratio=importance)
        return policy_loss(policy, old, advantages, reference_log_probs=reference, **options).loss

    by_token = lambda *others: jnp.sum(policy_token_loss(policy, *others, beta=0.1))
    for f in (of_rows, by_token):
        assert not any(np.any(x) for x in jax.grad(f, argnums=(0, 1, 2, 3))(*others))


@pytest.mark.parametrize("loss_type, level", TYPES_AND_LEVELS)
def test_a_fresh_sample_trains_in_full_at_every_range(loss_type, level, arrays):
    """A fresh sample has ratio 1. At ε = 0 this is the end of the range, where half the gradient is easily lost."""
    policy = jnp.asarray(arrays[0], jnp.float32)
    options = options_of(loss_type) | dict(importance_level=level)
    if loss_type not in ("sapo", "vespo"):
        options |= dict(epsilon_high=1.0 if loss_type == "cispo" else 0.0)
    if loss_type in (*CLIPPING_TYPES, "gmpo"):
        options |= dict(epsilon_low=0.0)
    weights, denominator = policy_weights(jnp.asarray(MASK), loss_type, options.get("max_length"))
    gradient = jax.jit(jax.grad(lambda x: loss(x, None, **options)))(policy)
    plain = -np.asarray(weights) * ADVANTAGES[:, None] / denominator  # REINFORCE's gradient
    if level == "sequence" and loss_type != "cispo":
        plain = plain.sum(1, keepdims=True) / MASK.sum(1, keepdims=True) * MASK
    close(gradient, plain)


@pytest.mark.parametrize("loss_type, level", TYPES_AND_LEVELS)
def test_ratios_that_overflow_stay_finite(loss_type, level):
    mask = jnp.ones((4, 2), bool)
    policy = jnp.asarray([[-1.0, -1.0], [-1.0, -1.0], [-1e4, -1e4], [-1e4, -1e4]])
    old, advantages = policy[::-1], jnp.asarray([1.0, -1.0, 1.0, -1.0])
    options = options_of(loss_type) | dict(mask=mask, importance_level=level, advantages=advantages)
    far_ratios, far_reference = lambda x: loss(x, old, **options), lambda x: loss(x, x, old, beta=0.1, **options)
    found = jax.jit(lambda x: [jax.value_and_grad(f)(x) for f in (far_ratios, far_reference)])(policy)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "gmpo"])
@pytest.mark.parametrize("unbiased", [True, False])
def test_the_penalty_of_what_is_impossible_for_both_is_0_and_no_ratio_makes_it_overflow(loss_type, unbiased):
    """Against the same tokens with −1 under policy and reference, and a ratio of 1e-30 where −inf makes 0."""
    policy, old = jnp.asarray([[-1.0, -jnp.inf, -2.0]]), jnp.asarray([[-1.2, -3.0, -2.0]])
    kl = None if loss_type == "gmpo" else unbiased
    options = options_of(loss_type) | dict(advantages=jnp.ones(1), mask=jnp.ones((1, 3), bool), beta=0.1)
    options |= dict(unbiased_kl=kl)
    value, gradient = jax.jit(jax.value_and_grad(lambda x: loss(x, old, policy, **options)))(policy)
    without = jax.jit(lambda x: loss(x, old, None, **options | dict(beta=0.0, unbiased_kl=None)))(policy)
    close(value, without)
    assert np.isfinite(gradient).all()
    far_old, reference = jnp.asarray([[-100.0, -79.9, -1.0]]), jnp.asarray([[-1.0, -9999.0, -1.0]])
    policy = jnp.asarray([[-22.0, -0.5, -2.0]])
    found = jax.jit(jax.value_and_grad(lambda x: loss(x, far_old, reference, **options)))(policy)
    assert all(np.isfinite(x).all() for x in found) and found[1][0, 2] != 0


@pytest.mark.parametrize(
    "loss_type, level", [("dapo", "token"), ("grpo", "sequence"), ("cispo", "token"), ("sapo", "token")]
)
def test_a_token_that_the_sampler_did_not_score_counts_like_a_fresh_one(loss_type, level, arrays):
    """Samplers write NaN, −inf, or a stand-in such as −9999."""
    policy, old, reference = (jnp.asarray(x, jnp.float32) for x in arrays)
    unscored = np.array([[0, 2], [0, 1], [1, 0], [2, 0], [3, 0]]) @ [T, 1]  # positive and negative advantages
    spoilt = np.array(old).reshape(-1)
    np.put(spoilt, unscored, [np.nan, -np.inf, -np.inf, -9999.0, np.nan])
    options = options_of(loss_type) | dict(importance_level=level, beta=0.1)

    def losses(x):
        fresh = jnp.where(jnp.zeros(B * T, bool).at[unscored].set(True).reshape(B, T), jax.lax.stop_gradient(x), old)
        weighted = dict(importance_ratio=jnp.where(jnp.arange(B)[:, None] == 1, jnp.nan, 0.5))
        plain = dict(importance_ratio=jnp.where(jnp.arange(B)[:, None] == 1, 1.0, 0.5))
        return [
            loss(x, jnp.asarray(spoilt).reshape(B, T), reference, **options, **weighted),
            loss(x, fresh, reference, **options, **plain),
        ]

    (found, expected), (gradient, true_gradient) = jax.jit(lambda x: (losses(x), jax.jacrev(losses)(x)))(policy)
    close(found, expected)
    close(gradient, true_gradient)
    masked = jax.jit(jax.grad(lambda x: losses(x.at[0, 0].set(-jnp.inf))[0]))(policy)  # a masked logit of the policy
    assert np.isfinite(masked).all() and masked[1].any()


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "sapo"])
def test_a_factor_of_0_leaves_a_token_out_whatever_is_there(loss_type, arrays):
    policy, old = (jnp.asarray(x, jnp.float32) for x in arrays[:2])
    left_out = jnp.zeros((B, T), bool).at[0, 1].set(True).at[2, 0].set(True)
    advantages = jnp.broadcast_to(jnp.asarray(ADVANTAGES, jnp.float32)[:, None], (B, T))

    def gradient(old, advantages):
        options = options_of(loss_type) | dict(importance_ratio=jnp.where(left_out, 0.0, 1.0), advantages=advantages)
        return jax.jit(jax.value_and_grad(lambda x: loss(x, old, **options)))(policy)

    spoil = lambda x: jnp.where(left_out, jnp.nan, x)
    found, expected = gradient(spoil(old), spoil(advantages)), gradient(old, advantages)
    jax.tree.map(close, found, expected)
    assert not found[1][left_out].any()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_tokens_that_do_not_count_may_be_anything(level, arrays):
    spoil = lambda x: jnp.asarray(np.where(MASK, x, np.nan), jnp.float32)
    clean = [jnp.asarray(x, jnp.float32) for x in arrays]
    options = options_of("grpo") | dict(importance_level=level, beta=0.2, entropy_coef=0.1)
    f = jax.jit(
        lambda x, old, reference, entropy: policy_loss(
            x, old, jnp.asarray(ADVANTAGES, jnp.float32), reference_log_probs=reference, entropy=entropy, **options
        )
    )
    output = f(*map(spoil, (*arrays, arrays[0])))
    expected = f(*clean, clean[0])
    jax.tree.map(close, output, expected)
    gradient = jax.jit(jax.grad(lambda *a: f(*a).loss))(*map(spoil, (*arrays, arrays[0])))
    assert np.isfinite(gradient).all() and not gradient[~MASK].any()


def test_what_is_logged_has_no_gradient_and_counts_tokens(arrays):
    policy, old, reference = (jnp.asarray(x, jnp.float32) for x in arrays)
    options = options_of("dapo") | dict(epsilon_low=0.1, epsilon_high=0.3)
    f = lambda x: policy_loss(x, old, jnp.asarray(ADVANTAGES, jnp.float32), reference_log_probs=reference, **options)
    output = jax.jit(f)(policy)
    ratio, d = np.exp(arrays[0] - arrays[1]), arrays[2] - arrays[0]
    negative, share = ADVANTAGES[:, None] < 0, lambda x: (x & MASK).sum() / MASK.sum()
    close(output.kl, ((np.exp(d) - d - 1) * MASK).sum() / MASK.sum())
    assert output.clipped_low == pytest.approx(share((ratio < 0.9) & negative))
    assert output.clipped_high == pytest.approx(share((ratio > 1.3) & ~negative))
    assert not output.token_losses[~MASK].any()
    logged = lambda x: sum(jnp.sum(y) for y in (f(x).token_losses, f(x).kl))
    assert not jax.jit(jax.grad(logged))(policy).any()


def test_a_mask_without_tokens_is_0_under_jit_and_refused_outside(arrays):
    policy, mask = jnp.asarray(arrays[0], jnp.float32), jnp.zeros((B, T), bool)
    f = lambda x, mask: loss(x, None, mask=mask)
    assert jax.jit(f)(policy, mask) == 0
    assert not jax.jit(jax.grad(f))(policy, mask).any()
    with pytest.raises(ValueError, match="policy_loss: mask counts no token; leave such a batch out"):
        f(policy, mask)
    with pytest.raises(ValueError, match="policy_weights: mask counts no token"):
        policy_weights(mask)


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo"])
def test_advantages_compare_with_the_group(method, rng):
    rewards = rng.standard_normal((3, 5)).astype(np.float32)
    exact = rewards.astype(np.float64)
    centred = exact - exact.mean(1, keepdims=True)
    expected = {
        "grpo": centred / (exact.std(1, ddof=1, keepdims=True) + 1e-4),
        "dr_grpo": centred,
        "rloo": np.array([[x[i] - np.delete(x, i).mean() for i in range(5)] for x in exact]),
    }[method]
    close(group_advantages(jnp.asarray(rewards), method), expected)
    where = np.array([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [0, 1, 0, 0, 0]], bool)
    found = group_advantages(jnp.asarray(np.where(where, rewards, np.nan)), method, where=jnp.asarray(where))
    close(found[0], expected[0])
    close(found[1, [0, 2, 3]], group_advantages(jnp.asarray(rewards[1:2, [0, 2, 3]]), method)[0])
    assert not found[1, [1, 4]].any() and not found[2].any()


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo"])
def test_rewards_of_any_size_have_advantages(method, rng):
    rewards = jnp.asarray(rng.uniform(-3.0, 3.0, (3, 5)), jnp.float32)
    found, scale = group_advantages(1e4 * rewards, method), 1e4 if method == "grpo" else 1.0
    for size in (1e16, 1e30, 5e37):
        close(group_advantages(size * rewards, method) / (size / 1e4 * scale if method != "grpo" else 1.0), found)


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo"])
def test_equal_rewards_teach_nothing(method):
    """A sum of eight is rounded, and their mean is another number."""
    where = jnp.ones((3, 8), bool).at[1, 0].set(False)
    rewards = jnp.full((3, 8), 12345.678).at[1, 0].set(jnp.nan)
    assert not group_advantages(rewards, method, where=where).any()


@pytest.mark.parametrize("group_baseline", [False, True])
def test_reinforce_s_advantages_compare_with_the_batch(group_baseline, rng):
    rewards = rng.standard_normal((3, 5)).astype(np.float32)
    where = np.array([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [1, 1, 0, 0, 0]], bool)
    exact = np.where(where, rewards.astype(np.float64), 0.0)
    a = exact - (exact.sum(1) / where.sum(1))[:, None] if group_baseline else exact
    expected = np.where(where, (a - a[where].mean()) / (a[where].std(ddof=1) + 1e-4), 0.0)
    spoilt = jnp.asarray(np.where(where, rewards, np.nan))
    close(reinforce_advantages(spoilt, group_baseline=group_baseline, where=jnp.asarray(where)), expected)


LOG_PROBS = jnp.full((2, 3), -1.0)
ALL = jnp.ones((2, 3), bool)


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(loss_type="ppo"), ValueError, "loss_type='ppo' is unknown"),
        (dict(importance_level="word"), ValueError, "importance_level='word' is unknown"),
        (dict(epsilon_low=1.0), ValueError, r"epsilon_low=1.0 must be in \[0, 1\)"),
        (dict(epsilon_high=-0.1), ValueError, "epsilon_high=-0.1 must be a finite number >= 0"),
        (dict(delta=0.5), ValueError, "delta=0.5 must be > 1"),
        (dict(beta=-0.1), ValueError, "beta=-0.1 must be a finite number >= 0"),
        (dict(beta=0.1), ValueError, "beta=0.1 needs reference_log_probs; pass them, or beta=0.0"),
        (dict(beta=jnp.asarray(0.1)), TypeError, "beta is a .*, but must be a Python number"),
        (dict(loss_type="cispo", epsilon_low=0.2), ValueError, "epsilon_low is given, but loss_type='cispo' does not"),
        (dict(loss_type="sapo", epsilon_high=0.2), ValueError, "epsilon_high is given, but loss_type='sapo' does not"),
        (dict(loss_type="cispo", delta=2.0), ValueError, "delta is given, but loss_type='cispo' does not"),
        (dict(sapo_temperatures=(1.0, 1.0)), ValueError, "sapo_temperatures is given, but loss_type='dapo' does not"),
        (
            dict(loss_type="sapo", sapo_temperatures=(1.0, 0.0)),
            ValueError,
            r"sapo_temperatures\[1\]=0.0 must be a fini",
        ),
        (dict(loss_type="sapo", sapo_temperatures=(1.0,)), ValueError, r"sapo_temperatures=\(1.0,\) must be two"),
        (dict(unbiased_kl=1), TypeError, "unbiased_kl=1 must be True, False or None"),
        (dict(vespo_k=(1.0, 1.0)), ValueError, "vespo_k is given, but loss_type='dapo' does not read it"),
        (
            dict(loss_type="vespo", vespo_lambda=(1.0, 0.0)),
            ValueError,
            r"vespo_lambda\[1\]=0.0 must be a fin",
        ),
        (dict(loss_type="vespo", importance_level="sequence"), ValueError, "importance_level='sequence' does not go"),
        (dict(loss_type="gmpo", unbiased_kl=True), ValueError, "unbiased_kl=True has no meaning for loss_type='gmpo'"),
        (dict(loss_type="gmpo", epsilon_low=-1.0), ValueError, "epsilon_low=-1.0 must be a finite number >= 0"),
        (dict(segment_ids=ALL.astype(int)), ValueError, "segment_ids and num_segments belong together"),
        (dict(segment_ids=ALL.astype(int), num_segments=3), ValueError, "num_segments=3 is the number of tokens in"),
        (dict(loss_type="dr_grpo"), TypeError, "loss_type='dr_grpo' needs max_length, an int, but it is None"),
        (dict(loss_type="dr_grpo", max_length=0), ValueError, "max_length=0 must be > 0"),
        (dict(max_length=9), ValueError, "max_length is given, but loss_type='dapo' does not read it"),
        (dict(entropy=-LOG_PROBS), ValueError, "entropy belongs to entropy_coef, which is 0.0; pass entropy_coef"),
        (
            dict(entropy_coef=0.1),
            ValueError,
            "entropy belongs to entropy_coef, which is 0.1; pass the tokens' entropies",
        ),
        (dict(entropy_denominator=3.0), ValueError, "entropy_denominator has no meaning without entropy"),
        (
            dict(advantages=jnp.ones(3)),
            ValueError,
            r"advantages has shape \(3,\), but must have shape \(2,\) or \(2, 3\)",
        ),
        (
            dict(importance_ratio=jnp.ones(2)),
            ValueError,
            r"importance_ratio has shape \(2,\), but must have shape \(2, 1",
        ),
        (dict(denominator=0), ValueError, "denominator=0 must be a finite number > 0"),
        (dict(mask=ALL.astype(int)), TypeError, "mask has dtype int32, but must be bool; pass mask != 0"),
        (dict(mask=ALL[:, :2]), ValueError, r"mask has shape \(2, 2\), but must have shape \(2, 3\)"),
        (dict(old_log_probs=LOG_PROBS[0]), ValueError, r"old_log_probs has shape \(3,\), but must have shape \(2, 3\)"),
        (dict(log_probs=LOG_PROBS[0]), ValueError, r"log_probs has shape \(3,\), but must be \(sequences, tokens\)"),
    ],
)
def test_wrong_arguments_are_refused_with_law_and_cure(options, error, message, unchecked_types):
    arguments = dict(log_probs=LOG_PROBS, old_log_probs=LOG_PROBS, advantages=jnp.ones(2), mask=ALL) | options
    with pytest.raises(error, match=f"policy_loss: {message}"):
        policy_loss(**arguments)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(importance_level="sequence"), "importance_level='sequence' is not separable by token"),
        (dict(reference_log_probs=LOG_PROBS), "reference_log_probs belongs to beta > 0, but beta=0.0; pass beta > 0"),
        (dict(beta=0.1), "reference_log_probs belongs to beta > 0, but beta=0.1; pass it, or beta=0.0"),
        (dict(advantages=jnp.ones(2)), r"advantages has shape \(2,\), but must have shape \(2, 3\)"),
        (dict(loss_type="vespo"), "loss_type='vespo' is not separable by token, because a token's weight depends"),
        (dict(loss_type="gmpo"), "loss_type='gmpo' is not separable by token"),
    ],
)
def test_the_token_form_refuses_what_is_not_separable(options, message, unchecked_types):
    arguments = dict(log_probs=LOG_PROBS, old_log_probs=LOG_PROBS, advantages=LOG_PROBS) | options
    with pytest.raises(ValueError, match=f"policy_token_loss: {message}"):
        policy_token_loss(**arguments)


@pytest.mark.parametrize(
    "rewards, options, error, message",
    [
        (
            jnp.ones((3, 1)),
            {},
            ValueError,
            r"rewards has shape \(3, 1\), but the last axis must hold a group of at least",
        ),
        (jnp.ones((3, 4)), dict(method="gae"), ValueError, "method='gae' is unknown"),
        (jnp.ones((3, 4), int), {}, TypeError, "rewards has dtype int32, but must be floating point"),
        (jnp.ones((3, 4)), dict(where=jnp.ones((3, 1), bool)), ValueError, r"where has shape \(3, 1\)"),
    ],
)
def test_wrong_rewards_are_refused(rewards, options, error, message, unchecked_types):
    with pytest.raises(error, match=f"group_advantages: {message}"):
        group_advantages(rewards, **options)


@pytest.mark.parametrize(
    "rewards, options, error, message",
    [
        (jnp.ones(1), {}, ValueError, r"rewards has shape \(1,\), but must hold a batch of at least two samples"),
        (jnp.ones((3, 1)), dict(group_baseline=True), ValueError, r"rewards has shape \(3, 1\), but must hold"),
        (jnp.ones(3, int), {}, TypeError, "rewards has dtype int32, but must be floating point"),
        (jnp.ones(3), dict(where=jnp.ones(2, bool)), ValueError, r"where has shape \(2,\), but must have shape"),
    ],
)
def test_wrong_batches_of_rewards_are_refused(rewards, options, error, message, unchecked_types):
    with pytest.raises(error, match=f"reinforce_advantages: {message}"):
        reinforce_advantages(rewards, **options)
