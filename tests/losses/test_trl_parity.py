"""TRL's own numbers: its trainers' loss functions run on our log-probabilities, without a trainer and without a model.

A trainer's method that computes a loss reads options and sends metrics through `self`; a namespace with those options
stands in for it, and for the model a function that returns the log-probabilities. Gradients come from PyTorch.
"""

import collections
import importlib
import importlib.util
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax import losses
from liger_jax.losses._dpo_formulas import LOSS_TYPES as DPO_TYPES
from liger_jax.losses._policy_formulas import LOSS_TYPES, SEQUENCE_TYPES
from liger_jax.losses.sampler import MODES
from tests.losses._oracle import close, scale_of_sum

HAS_TRL = all(importlib.util.find_spec(name) for name in ("torch", "trl"))
pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(not HAS_TRL, reason="torch or trl is not installed"),
    pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'"),
]
P, T = 4, 7
TYPES_AND_LEVELS = [(t, "token") for t in LOSS_TYPES] + [(t, "sequence") for t in LOSS_TYPES if t not in SEQUENCE_TYPES]
LENGTHS = np.array([5, 2, 4, 6, 3, 6, 1, 4])  # of P chosen and P rejected


@pytest.fixture
def torch():
    return importlib.import_module("torch")


def trl(module):
    """A module of TRL's, which is imported where a test runs that needs it: that takes seconds."""
    return importlib.import_module(f"trl.{module}")


class Accelerator:
    """One process, nothing to log."""

    device = "cpu"
    num_processes = 1
    sync_gradients = False
    gather = staticmethod(lambda x: x)
    gather_for_metrics = staticmethod(lambda x: x)
    reduce = staticmethod(lambda x, reduction: x)


def trainer(**options):
    fixed = dict(
        accelerator=Accelerator(),
        # Where PEFT is installed, accelerate looks for compiled parts among `_modules`.
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False, _modules={}),
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        _total_train_tokens=0,
        _tp_size=1,
    )
    return SimpleNamespace(**fixed | options)


def assert_same(torch, ours, theirs, *arrays):
    """Value and gradients by all arrays."""
    arrays = [np.asarray(x, np.float32) for x in arrays]
    value, gradients = jax.jit(jax.value_and_grad(ours, tuple(range(len(arrays)))))(*map(jnp.asarray, arrays))
    tensors = [torch.tensor(x, requires_grad=True) for x in arrays]
    expected = theirs(*tensors)
    found = torch.autograd.grad(expected, tensors, allow_unused=True)
    true_gradients = [np.zeros_like(x) if g is None else g.numpy() for x, g in zip(arrays, found, strict=True)]
    close(value, expected.detach(), scale=scale_of_sum(value, arrays, true_gradients))
    for gradient, true_gradient in zip(gradients, true_gradients, strict=True):
        close(gradient, true_gradient)


@pytest.fixture
def tokens(rng):
    """Log-probabilities of chosen and then rejected, under two policies, and the tokens that count."""
    log_probs = -rng.gamma(1.0, 1.0, (2 * P, T)).astype(np.float32)
    other = log_probs + 0.3 * rng.standard_normal((2 * P, T)).astype(np.float32)
    return log_probs, other, np.arange(T) < LENGTHS[:, None]


def dpo_of_trl(torch, log_probs, reference, mask, squares=None, **options):
    fixed = dict(
        loss_types=["sigmoid"], beta=0.3, ld_alpha=None, label_smoothing=0.0, use_weighting=squares is not None
    )
    divergence = dict(f_divergence_type="reverse_kl", f_alpha_divergence_coef=0.5)
    self = trainer(
        **fixed | divergence | dict(loss_weights=[1.0]) | options,
        precompute_ref_logps=False,
        args=SimpleNamespace(discopop_tau=0.05, gradient_checkpointing_kwargs=None),
    )

    counted = torch.tensor(mask)

    def model(x):
        """What a model with a fused head returns: 0 where a token does not count."""
        zero = torch.zeros_like(x)
        outputs = dict(log_probs=x * counted, entropy=zero, mean_logits=zero, is_top1=zero.bool())
        return lambda **inputs: SimpleNamespace(**outputs, log_sum_sq_probs=squares)

    self.ref_model = model(reference)
    prompt = torch.zeros(mask.shape[0], 1, dtype=torch.long)
    completion_mask = torch.cat([prompt, counted.long()], 1)
    inputs = dict(
        input_ids=torch.zeros_like(completion_mask), completion_mask=completion_mask, attention_mask=completion_mask
    )
    return trl("trainer.dpo_trainer").DPOTrainer._compute_loss(self, model(log_probs), inputs, False)


def dpo_of_ours(log_probs, reference, mask, **options):
    where = jnp.asarray(mask)
    sequences = lambda x: losses.sequence_log_probs(x, where)
    chosen, rejected = jnp.split(sequences(log_probs), 2)
    return losses.dpo_loss(chosen, rejected, *jnp.split(sequences(reference), 2), beta=0.3, **options).losses.mean()


@pytest.mark.parametrize("loss_type", DPO_TYPES)
def test_dpo_types(loss_type, tokens, torch):
    log_probs, reference, mask = tokens
    smoothing = dict(label_smoothing=0.1) if loss_type in ("exo_pair", "robust", "aot", "aot_unpaired") else {}
    counts = {}
    if loss_type in ("ipo", "sigmoid_norm", "sft"):
        counts["chosen_tokens"] = jnp.asarray(LENGTHS[:P])
    if loss_type in ("ipo", "sigmoid_norm"):
        counts["rejected_tokens"] = jnp.asarray(LENGTHS[P:])
    ours = lambda x: dpo_of_ours(x, jnp.asarray(reference), mask, loss_type=loss_type, **smoothing, **counts)
    theirs = lambda x: dpo_of_trl(torch, x, torch.tensor(reference), mask, loss_types=[loss_type], **smoothing)
    assert_same(torch, ours, theirs, log_probs)


@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence", "alpha_divergence"])
@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm"])
def test_dpo_divergences(loss_type, divergence, tokens, torch):
    log_probs, reference, mask = tokens
    options = dict(chosen_tokens=jnp.asarray(LENGTHS[:P]), rejected_tokens=jnp.asarray(LENGTHS[P:]))
    options = dict(loss_type=loss_type, f_divergence=divergence) | (options if loss_type == "sigmoid_norm" else {})
    ours = lambda x: dpo_of_ours(x, jnp.asarray(reference), mask, **options)
    theirs = lambda x: dpo_of_trl(
        torch, x, torch.tensor(reference), mask, loss_types=[loss_type], f_divergence_type=divergence
    )
    assert_same(torch, ours, theirs, log_probs)


def test_dpo_with_several_types_and_wpo_weights(tokens, rng, torch):
    log_probs, reference, mask = tokens
    squares = -rng.gamma(1.0, 1.0, log_probs.shape).astype(np.float32)

    def ours(x):
        weights = losses.wpo_weights(x, jnp.asarray(squares), jnp.asarray(mask))
        return dpo_of_ours(
            x,
            jnp.asarray(reference),
            mask,
            loss_type=("sigmoid", "bco_pair"),
            loss_weights=(0.8, 0.2),
            pair_weights=weights[:P] * weights[P:],
        )

    options = dict(loss_types=["sigmoid", "bco_pair"], loss_weights=[0.8, 0.2])
    theirs = lambda x: dpo_of_trl(torch, x, torch.tensor(reference), mask, torch.tensor(squares), **options)
    assert_same(torch, ours, theirs, log_probs)


def test_ld_dpo(tokens, torch):
    log_probs, reference, mask = tokens
    shared = jnp.tile(jnp.minimum(LENGTHS[:P], LENGTHS[P:]), 2)

    def ours(x):
        sequences = lambda x: losses.sequence_log_probs(x, jnp.asarray(mask), ld_alpha=0.4, shared_tokens=shared)
        pairs = (*jnp.split(sequences(x), 2), *jnp.split(sequences(jnp.asarray(reference)), 2))
        return losses.dpo_loss(*pairs, beta=0.3).losses.mean()

    theirs = lambda x: dpo_of_trl(torch, x, torch.tensor(reference), mask, ld_alpha=0.4)
    assert_same(torch, ours, theirs, log_probs)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto(loss_type, tokens, rng, torch):
    log_probs, reference, mask = tokens
    desirable = np.array([1, 0, 0, 1, 1, 0, 1, 0], bool)
    others = rng.standard_normal((2, 2 * P)).astype(np.float32)
    has_kl = loss_type == "kto"
    kl = jnp.asarray(others[0] - others[1]) if has_kl else None

    def ours(x):
        sequences = [losses.sequence_log_probs(y, jnp.asarray(mask)) for y in (x, jnp.asarray(reference))]
        options = dict(beta=0.3, desirable_weight=1.3, undesirable_weight=0.8, loss_type=loss_type)
        return losses.kto_loss(*sequences, desirable=jnp.asarray(desirable), kl=kl, **options).losses.mean()

    def theirs(x):
        self = trainer(
            beta=0.3,
            desirable_weight=1.3,
            undesirable_weight=0.8,
            loss_type=loss_type,
            calculate_KL=has_kl,
            precompute_ref_logps=True,
            _compute_kl_logps=lambda *_: torch.tensor(others[0]),
        )
        zero = torch.zeros_like(x)
        model = lambda **_: SimpleNamespace(log_probs=x * torch.tensor(mask), entropy=zero, mean_logits=zero)
        completion_mask = torch.cat([torch.zeros(2 * P, 1), torch.tensor(mask)], 1).long()
        inputs = dict(
            label=torch.tensor(desirable),
            input_ids=torch.zeros_like(completion_mask),
            attention_mask=completion_mask,
            completion_mask=completion_mask,
            ref_logps=torch.tensor(reference * mask).sum(1),
            ref_KL_logps=torch.tensor(others[1]),
        )
        return trl("trainer.kto_trainer").KTOTrainer._compute_loss(self, model, inputs, False)

    assert_same(torch, ours, theirs, log_probs)


def test_orpo(rng, torch):
    means = -rng.gamma(1.0, 1.0, (2, P))
    nll = jnp.asarray(1.25)
    self = trainer(beta=0.3)
    theirs = lambda w, x: 1.25 - trl("experimental.orpo.orpo_trainer").ORPOTrainer.odds_ratio_loss(self, w, x)[0].mean()
    assert_same(torch, lambda w, x: losses.orpo_loss(w, x, nll, beta=0.3).losses.mean(), theirs, *means)


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo", "simpo", "alphapo"])
def test_cpo_simpo_and_alphapo(loss_type, rng, torch):
    smoothing = 0.1 if loss_type in ("sigmoid", "simpo", "alphapo") else 0.0
    arrays = -3 * rng.gamma(1.0, 1.0, (2, P))
    alpha = 0.25 if loss_type == "alphapo" else 0.0
    theirs = "simpo" if loss_type == "alphapo" else loss_type  # as CPOConfig names it
    self = trainer(loss_type=theirs, beta=0.3, alpha=alpha, simpo_gamma=0.5, label_smoothing=smoothing)
    options = dict(beta=0.3, label_smoothing=smoothing)

    def ours(w, x):
        if loss_type == "simpo":
            return losses.simpo_loss(w, x, gamma=0.5, **options).losses.mean()
        if loss_type == "alphapo":
            return losses.alphapo_loss(w, x, gamma=0.5, reward_alpha=alpha, **options).losses.mean()
        return losses.cpo_loss(w, x, loss_type=loss_type, cpo_alpha=0.0, **options).losses.mean()

    assert_same(
        torch, ours, lambda w, x: trl("experimental.cpo.cpo_trainer").CPOTrainer.cpo_loss(self, w, x)[0].mean(), *arrays
    )


def grpo_of_trl(torch, log_probs, old, reference, entropy, mask, advantages, **options):
    level, delta = options.pop("level"), options.pop("delta", None)
    self = trainer(
        beta=0.2,
        epsilon_low=0.2,
        importance_sampling_level=level,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        max_completion_length=9,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=True,
        use_adaptive_entropy=False,
        entropy_coef=0.1,
        **options,
        args=SimpleNamespace(
            delta=delta,
            use_bias_correction_kl=True,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
            steps_per_generation=1,
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, entropy, None),
    )
    trainers = {"gmpo": ("experimental.gmpo.gmpo_trainer", "GMPOTrainer")}
    module, name = trainers.get(options["loss_type"], ("trainer.grpo_trainer", "GRPOTrainer"))
    trainer_type = getattr(trl(module), name)
    self.get_gamma_weights = trl("trainer.grpo_trainer").GRPOTrainer.get_gamma_weights
    mask = torch.tensor(mask).long()
    inputs = dict(
        prompt_ids=mask[:, :1],
        prompt_mask=mask[:, :1],
        completion_ids=mask,
        completion_mask=mask,
        advantages=torch.tensor(advantages),
        old_per_token_logps=old,
        ref_per_token_logps=reference,
        importance_sampling_ratio=torch.where(mask.bool(), 1.5 if options["loss_type"] != "gmpo" else 1.0, 1.0),
        num_items_in_batch=mask.sum(),
    )
    loss = trainer_type._compute_loss(self, None, inputs)
    # TRL's GMPO has no entropy bonus, and no importance ratio.
    return loss - 0.1 * (entropy * mask).sum() / mask.sum() if options["loss_type"] == "gmpo" else loss


@pytest.mark.parametrize("loss_type, level", TYPES_AND_LEVELS)
def test_policy_types(loss_type, level, tokens, rng, torch):
    """With all that acts at once: a penalty, an importance ratio, an entropy bonus, a range and delta."""
    log_probs, old, mask = tokens
    reference, entropy = (log_probs + 0.2).astype(np.float32), rng.gamma(1.0, 1.0, log_probs.shape).astype(np.float32)
    advantages = rng.standard_normal(2 * P).astype(np.float32)
    high = 1.1 if loss_type == "cispo" else 0.3
    delta = 1.4 if loss_type not in ("cispo", "sapo", *SEQUENCE_TYPES) else None
    theirs = lambda x, old, reference, entropy: grpo_of_trl(
        torch,
        *(x, old.detach(), reference.detach(), entropy, mask, advantages),  # made without gradients there, too
        loss_type=loss_type,
        level=level,
        epsilon_high=high,
        delta=delta,
    )
    options = {} if loss_type in ("sapo", "vespo") else dict(epsilon_high=high, delta=delta)
    options |= dict(epsilon_low=0.2) if loss_type == "gmpo" else {}
    factor = 1.0 if loss_type == "gmpo" else 1.5
    options |= dict(max_length=9) if loss_type == "dr_grpo" else {}
    ours = lambda x, old, reference, entropy: (
        losses.policy_loss(
            x,
            old,
            jnp.asarray(advantages),
            mask=jnp.asarray(mask),
            reference_log_probs=reference,
            importance_ratio=jnp.full(mask.shape, factor),
            entropy=entropy,
            entropy_coef=0.1,
            beta=0.2,
            loss_type=loss_type,
            importance_level=level,
            **options,
        ).loss
    )
    assert_same(torch, ours, theirs, log_probs, old, reference, entropy)


def test_group_advantages(rng, torch):
    """TRL computes them amid generation, so this restates two places of it: grpo_trainer.py, lines 2765 to 2787, and
    rloo_trainer.py, lines 1685 to 1690, with TRL's own `nanstd`."""
    rewards = rng.standard_normal((3, 5)).astype(np.float32)
    groups = torch.tensor(rewards)
    centred = groups - groups.nanmean(1, keepdim=True)
    expected = dict(grpo=centred / (trl("trainer.utils").nanstd(groups, dim=1)[:, None] + 1e-4), dr_grpo=centred)
    expected["rloo"] = groups - (groups.nansum(1, keepdim=True) - groups) / (5 - 1)
    for method, advantages in expected.items():
        close(losses.group_advantages(jnp.asarray(rewards), method), advantages)


def test_reinforce_advantages(rng, torch):
    """As TRL's RLOO with `normalize_advantages`, of other advantages: rloo_trainer.py, below the lines named above."""
    rewards = rng.standard_normal((3, 5)).astype(np.float32)
    groups = torch.tensor(rewards)
    for group_baseline in (False, True):
        a = groups - groups.mean(1, keepdim=True) if group_baseline else groups
        expected = (a - a.mean()) / (a.std() + 1e-4)
        close(losses.reinforce_advantages(jnp.asarray(rewards), group_baseline=group_baseline), expected)


@pytest.mark.parametrize("mode", MODES)
def test_importance_sampling_ratio(mode, tokens, torch):
    """TRL computes it amid generation, so this restates grpo_trainer.py, lines 2660 to 2704."""
    old, sampling, mask = tokens
    difference = torch.nan_to_num(torch.tensor(old - sampling) * torch.tensor(mask), nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = torch.exp(difference)
    outside = (ratio < 0.8) | (ratio > 1.3)
    expected = ratio.masked_fill(outside, 0.0) if mode.endswith("mask") else torch.clamp(ratio, 0.8, 1.3)
    options = dict(mask=jnp.asarray(mask), mode=mode, clip_min=0.8, clip_max=1.3)
    close(losses.importance_sampling_ratio(jnp.asarray(old), jnp.asarray(sampling), **options), expected)


def test_on_policy_distillation(tokens, rng, torch):
    """The gradient of TRL's sampled-token loss without its weights of prefixes, whose value differs by a constant."""
    _, teacher, mask = tokens
    logits = rng.standard_normal((2 * P, T, 11)).astype(np.float32)
    sampled = rng.integers(0, 11, (2 * P, T))

    def ours(x):
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(x), jnp.asarray(sampled)[..., None], axis=-1)[..., 0]
        advantages = losses.reverse_kl_advantages(log_probs, jnp.asarray(teacher))
        return losses.policy_loss(log_probs, None, advantages, mask=jnp.asarray(mask)).loss

    x = torch.tensor(logits, requires_grad=True)
    self = trainer(temperature=1.0, iw_opd_gamma=0.0, iw_opd_epsilon=1e-8)
    labels = torch.tensor(np.where(mask, sampled, -100))
    found = trl("experimental.iw_opd.iw_opd_trainer").IWOPDTrainer._compute_iw_opd_loss(
        self, x, torch.tensor(sampled), labels, torch.tensor(teacher)
    )
    (true_gradient,) = torch.autograd.grad(found, x)
    close(jax.jit(jax.grad(ours))(jnp.asarray(logits)), true_gradient)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergences(beta, rng, torch):
    logits = 2 * rng.standard_normal((2, 3, 4, 11))
    where = np.arange(4) < np.array([[4], [2], [3]])
    labels = torch.tensor(np.where(where, 1, -100))
    options = dict(temperature=2.5, where=jnp.asarray(where))
    ours = lambda s, t: losses.gkd_loss(s, t, beta=beta, **options)
    theirs = lambda s, t: trl("experimental.gkd.gkd_trainer").GKDTrainer.generalized_jsd_loss(
        s, t, labels, beta=beta, temperature=2.5
    )
    assert_same(torch, ours, theirs, *logits)
