"""dpo_loss is each paper's formula in TRL's definition, for every type, divergence and option."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.losses import dpo_loss
from liger_jax.losses._dpo_formulas import LOSS_TYPES
from tests.losses._oracle import assert_matches, close, numerical_gradient

PAIRS = 6
BETA, EPSILON, TAU = 0.3, 0.1, 0.05
CHOSEN_TOKENS, REJECTED_TOKENS = np.array([3, 9, 5, 7, 4, 6]), np.array([6, 2, 8, 3, 5, 9])


def log_sigmoid(x):
    return -np.logaddexp(0, -x)


def sigmoid(x):
    return np.exp(log_sigmoid(x))


def score(r, divergence="reverse_kl", alpha=0.5):
    """f'(u) of the papers' f with u = e^r, up to f's own constant."""
    u = np.exp(r)
    if divergence == "forward_kl":
        return 1 - 1 / u
    if divergence == "js_divergence":
        return np.log(2 * u / (1 + u))
    if divergence == "alpha_divergence":
        return (u ** (alpha - 1) - 1) / (alpha - 1)
    return r


def oracle(loss_type, chosen, rejected, ref_chosen, ref_rejected, **divergence):
    r_w, r_l = chosen - ref_chosen, rejected - ref_rejected
    s_w, s_l = score(r_w, **divergence), score(r_l, **divergence)
    x = BETA * (s_w - s_l)
    mean = s_w / CHOSEN_TOKENS - s_l / REJECTED_TOKENS
    p, target, q = sigmoid(x), 1 - EPSILON, sigmoid(x / TAU)
    bce = lambda x: -(1 - EPSILON) * log_sigmoid(x) - EPSILON * log_sigmoid(-x)
    return {
        "sigmoid": lambda: -log_sigmoid(x),
        "hinge": lambda: np.maximum(0, 1 - x),
        "ipo": lambda: (mean - 1 / (2 * BETA)) ** 2,
        "sigmoid_norm": lambda: -log_sigmoid(BETA * mean),
        # KL of (p, 1 − p) to (1 − ε, ε)
        "exo_pair": lambda: p * np.log(p / target) + (1 - p) * np.log((1 - p) / (1 - target)),
        "nca_pair": lambda: -log_sigmoid(BETA * r_w) - 0.5 * sum(log_sigmoid(-BETA * r) for r in (r_w, r_l)),
        "robust": lambda: (-(1 - EPSILON) * np.log(p) + EPSILON * np.log(1 - p)) / (1 - 2 * EPSILON),
        "bco_pair": lambda: -np.log(sigmoid(BETA * r_w)) - np.log(1 - sigmoid(BETA * r_l)),
        "sppo_hard": lambda: (r_w - 0.5 / BETA) ** 2 + (r_l + 0.5 / BETA) ** 2,
        "aot": lambda: bce(BETA * (np.sort(chosen - rejected) - np.sort(ref_chosen - ref_rejected))),
        "aot_unpaired": lambda: bce(BETA * (np.sort(r_w) - np.sort(r_l))),
        "apo_zero": lambda: 1 - sigmoid(BETA * r_w) + sigmoid(BETA * r_l),
        "apo_down": lambda: sigmoid(BETA * r_w) + 1 - sigmoid(BETA * (r_w - r_l)),
        "discopop": lambda: (1 - q) * np.log(1 + np.exp(-x)) + q * np.exp(-x),
        "sft": lambda: -chosen / CHOSEN_TOKENS.mean(),
    }[loss_type]()


def options_of(loss_type):
    options = dict(beta=BETA, loss_type=loss_type)
    if loss_type in ("ipo", "sigmoid_norm", "sft"):
        options |= dict(chosen_tokens=jnp.asarray(CHOSEN_TOKENS))
    if loss_type in ("ipo", "sigmoid_norm"):
        options |= dict(rejected_tokens=jnp.asarray(REJECTED_TOKENS))
    if loss_type in ("exo_pair", "robust", "aot", "aot_unpaired"):
        options |= dict(label_smoothing=EPSILON)
    return options


def losses(*arrays, **options):
    return dpo_loss(*arrays, **options).losses


@pytest.fixture
def arrays(rng):
    """Log-probabilities of chosen and rejected under policy and reference."""
    policy = -40 + 10 * rng.standard_normal((2, PAIRS))
    return [*policy, *(policy + 3 * rng.standard_normal((2, PAIRS)))]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_type_is_its_paper_s_formula(loss_type, arrays):
    ours = functools.partial(losses, **options_of(loss_type))
    assert_matches(ours, functools.partial(oracle, loss_type), arrays)


@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence", "alpha_divergence"])
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "sigmoid_norm"])
def test_divergences_keep_their_constants(loss_type, divergence, arrays):
    """1, log 2 and 1/(α − 1) cancel in a difference, but not where each score has its own number of tokens."""
    ours = functools.partial(losses, f_divergence=divergence, **options_of(loss_type))
    assert_matches(ours, functools.partial(oracle, loss_type, divergence=divergence), arrays)


@pytest.mark.parametrize("alpha, expected", [(1.0, "reverse_kl"), (0.0, "forward_kl")])
def test_alpha_is_the_kl_of_either_direction_at_its_ends(alpha, expected, arrays):
    arrays = [jnp.asarray(x, jnp.float32) for x in arrays]
    found = losses(*arrays, f_divergence="alpha_divergence", f_alpha=alpha)
    close(found, losses(*arrays, f_divergence=expected))


def test_without_references_the_log_probabilities_are_the_ratios(arrays):
    chosen, rejected = arrays[:2]
    zero = np.zeros(PAIRS)
    for loss_type in ("sigmoid", "aot"):
        ours = functools.partial(losses, **options_of(loss_type))
        assert_matches(ours, lambda x, y, t=loss_type: oracle(t, x, y, zero, zero), [chosen, rejected])


def test_several_types_add_up_with_their_weights_and_pairs_with_theirs(arrays, rng):
    pair_weights = rng.uniform(0.1, 1.0, PAIRS).astype(np.float32)
    weighted = lambda *arrays: (
        pair_weights
        * sum(c * oracle(t, *arrays) for c, t in zip((0.8, 0.2, 1.0), ("sigmoid", "bco_pair", "sft"), strict=True))
    )
    ours = functools.partial(
        losses,
        beta=BETA,
        loss_type=("sigmoid", "bco_pair", "sft"),
        loss_weights=(0.8, 0.2, 1.0),
        chosen_tokens=jnp.asarray(CHOSEN_TOKENS),
        pair_weights=jnp.asarray(pair_weights),
    )
    assert_matches(ours, weighted, arrays)


def test_sft_s_parts_of_a_batch_add_up_to_it(arrays):
    arrays = [jnp.asarray(x, jnp.float32) for x in arrays]
    sft = lambda rows, **options: losses(
        *(x[rows] for x in arrays), loss_type="sft", chosen_tokens=jnp.asarray(CHOSEN_TOKENS)[rows], **options
    )
    mean = float(CHOSEN_TOKENS.mean())
    parts = [sft(rows, sft_tokens_per_pair=mean) for rows in (slice(0, 2), slice(2, PAIRS))]
    close(jnp.concatenate(parts), sft(slice(None)))


def test_rewards_are_scaled_log_ratios_without_gradient(arrays):
    chosen, rejected, ref_chosen, ref_rejected = (jnp.asarray(x, jnp.float32) for x in arrays)
    output = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=BETA)
    close(output.chosen_rewards, BETA * (arrays[0] - arrays[2]))
    close(output.rejected_rewards, BETA * (arrays[1] - arrays[3]))
    close(output.margins, BETA * (arrays[0] - arrays[2] - arrays[1] + arrays[3]))
    close(output.accuracy, np.mean(arrays[0] - arrays[2] > arrays[1] - arrays[3]))
    of_rewards = lambda x: jnp.sum(dpo_loss(x, rejected, ref_chosen, ref_rejected).margins)
    assert not jax.grad(of_rewards)(chosen).any()


@pytest.mark.parametrize(
    "loss_type, divergence",
    [(t, "reverse_kl") for t in LOSS_TYPES]
    + [(t, d) for t in ("sigmoid", "ipo", "discopop") for d in ("forward_kl", "js_divergence", "alpha_divergence")],
)
def test_far_ratios_overflow_nowhere_that_float32_can_hold(loss_type, divergence):
    far = jnp.asarray([-2000.0, -1.0, -2000.0, -1.0, -90.0, -50.0])
    other = jnp.asarray([-1.0, -2000.0, -2000.0, -1.0, -1.0, -50.0])
    zero = jnp.zeros(PAIRS)
    f = lambda x, y: losses(x, y, zero, zero, f_divergence=divergence, **options_of(loss_type))

    @jax.jit
    def value_and_gradients(*arrays):
        value, pullback = jax.vjp(f, *arrays)
        return value, *pullback(jnp.ones(PAIRS))

    numbers = value_and_gradients(far, other)
    # ipo squares scores of up to e^80, which is beyond float32: infinite, and still no inf − inf.
    squares = loss_type == "ipo" and divergence in ("forward_kl", "alpha_divergence")
    assert not any((np.isnan(x) if squares else ~np.isfinite(x)).any() for x in numbers)


def test_half_precision_is_computed_in_float32(arrays):
    half = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
    exact = [x.astype(jnp.float32) for x in half]
    assert losses(*half).dtype == jnp.float32
    np.testing.assert_array_equal(losses(*half), losses(*exact))
    assert jax.grad(lambda x: losses(x, *half[1:]).sum())(half[0]).dtype == jnp.bfloat16


def test_the_numerical_gradient_is_one():
    """The oracle itself is right: x³ has the gradient 3x²."""
    x = np.linspace(-2, 2, 5)
    np.testing.assert_allclose(numerical_gradient(lambda x: np.sum(x**3), x), 3 * x**2, atol=1e-8)


ONES = jnp.ones(3)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(beta=0.0), r"beta=0.0 must be a finite number > 0"),
        (dict(beta=-1), r"beta=-1 must be a finite number > 0"),
        (dict(label_smoothing=0.5, loss_type="robust"), r"label_smoothing=0.5 must be in \[0, 0.5\)"),
        (dict(loss_type="exo_pair"), r"label_smoothing=0.0 must be > 0 for loss_type='exo_pair'"),
        (dict(loss_type=()), r"loss_type=\(\) names no type"),
        (dict(loss_type="sft", sft_tokens_per_pair=0.0), "sft_tokens_per_pair=0.0 must be a finite number > 0"),
        (dict(loss_type="dpo"), r"loss_type='dpo' is unknown; pass one of \('sigmoid'"),
        (
            dict(label_smoothing=0.1),
            r"label_smoothing is given, but loss_type='sigmoid' does not read it; leave it out",
        ),
        (dict(discopop_tau=0.1), r"discopop_tau is given, but loss_type='sigmoid' does not read it"),
        (dict(loss_type="discopop", discopop_tau=0.0), r"discopop_tau=0.0 must be a finite number > 0"),
        (dict(chosen_tokens=jnp.ones(3, int)), r"chosen_tokens is given, but loss_type='sigmoid' does not read it"),
        (dict(loss_type="sft", rejected_tokens=jnp.ones(3, int)), r"rejected_tokens is given, but loss_type='sft'"),
        (dict(loss_type="ipo"), r"loss_type='ipo' needs chosen_tokens"),
        (dict(loss_type="sft"), r"loss_type='sft' needs chosen_tokens"),
        (dict(loss_type=("hinge", "sigmoid_norm"), chosen_tokens=jnp.ones(3, int)), r"'sigmoid_norm' needs rejected"),
        (dict(loss_type="sft", chosen_tokens=jnp.ones(2, int)), r"chosen_tokens has shape \(2,\), but must have"),
        (dict(loss_type="sft", chosen_tokens=jnp.asarray([3, 0, 1])), r"chosen_tokens counts no token for sequence 1;"),
        (dict(f_divergence="kl"), r"f_divergence='kl' is unknown"),
        (
            dict(f_divergence="forward_kl", loss_type="apo_zero"),
            r"'forward_kl' is not defined for loss_type='apo_zero'",
        ),
        (dict(f_alpha=0.7), r"f_alpha=0.7 has no meaning for f_divergence='reverse_kl'"),
        (dict(loss_type="aot", pair_weights=ONES), r"pair_weights go with no type of \('aot', 'aot_unpaired'\)"),
        (
            dict(loss_type=("hinge", "sft"), loss_weights=(1.0,), chosen_tokens=ONES),
            r"loss_weights=\(1.0,\) must have a",
        ),
        (dict(loss_type=("hinge", "sft", "hinge"), chosen_tokens=ONES), r"loss_type=.* names 'hinge' twice"),
        (
            dict(reference_chosen=ONES),
            r"reference_chosen and reference_rejected belong together; pass both, or neither",
        ),
        (dict(rejected=jnp.ones(2)), r"rejected has shape \(2,\), but must have shape \(3,\): one number for each seq"),
        (dict(chosen=jnp.ones((3, 5))), r"chosen has shape \(3, 5\), but must have one axis"),
        (dict(pair_weights=jnp.ones(4)), r"pair_weights has shape \(4,\), but must have shape \(3,\)"),
    ],
)
def test_wrong_values_are_refused_with_law_and_cure(options, message, unchecked_types):
    with pytest.raises(ValueError, match=f"dpo_loss: .*{message}"):
        dpo_loss(**dict(chosen=ONES, rejected=ONES) | options)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(beta=jnp.asarray(0.1)), "beta is a .*, but must be a Python number"),
        (dict(beta=True), "beta is a bool, but must be a Python number"),
        (dict(rejected=jnp.ones(3, int)), "rejected has dtype int32, but must be floating point"),
        (dict(loss_weights=("1",)), r"loss_weights\[0\] is a str, but must be a Python number"),
    ],
)
def test_wrong_types_are_refused(options, message, unchecked_types):
    with pytest.raises(TypeError, match=f"dpo_loss: {message}"):
        dpo_loss(**dict(chosen=ONES, rejected=ONES) | options)
