"""GRPO on a tiny LLaMA: it adds better and better, and is only told whether a sum is right.

    python -m examples.grpo [--lora RANK]

A prompt is `a + b =` with two digits, and an answer has two digits. The model first sees sums for a moment, so that
some of its answers are right. Then each step samples a group of answers to each prompt, rewards the right ones, and
updates twice: the ratio is that to the policy that sampled, and a penalty keeps the model near the frozen reference.
With --lora adapters alone are trained, and the reference is the same model with its adapters off, not a second copy. In
its folder (--out) the program leaves grpo.png: the mean reward, and the distance from the reference.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

if not __package__:  # started by its path, from any folder: Python must find the packages of the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from examples._lib.command import all_flags, needed_packages, run

with needed_packages(__name__):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from tqdm import tqdm

    from examples._lib import report, tiny
    from liger_jax import losses
    from liger_jax.models import CausalLM
    from liger_jax.models.lora import add_lora, trainable, with_adapters
    from liger_jax.training import make_step

PLUS, EQUALS, VOCAB = 10, 11, 12
PROMPT, ANSWER = 4, 2  # tokens
PROMPTS, GROUP, UPDATES = 32, 8, 2  # prompts a step, answers to each, updates with them
PRETRAINING_STEPS = 60


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    """Runs the program.

    Args:
        argv: its arguments; the command line's if none.

    Returns:
        The mean reward of each step's answers, the KL divergence at each update, and the share of all sums that the
        likeliest answer gets right, before training and after it.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank (default: all weights)")
    flags = all_flags(parser, argv, 100, "runs/tiny_grpo")
    graph, params = tiny.llama(VOCAB)
    params = tiny.pretrain(graph, params, sums, PRETRAINING_STEPS, "a moment of sums")
    graph, trained, frozen, reference = policy_and_reference(nnx.merge(graph, params), flags.lora)

    log_probs = jax.jit(answer_log_probs)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-4))
    update = jax.jit(make_step(graph, optimizer, policy_loss, has_aux=True))
    state, log = (
        (trained, optimizer.init(trained)),
        {"reward": [], "kl": [], "right": [share_right(reference)]},
    )
    with tqdm(range(flags.steps), desc="GRPO", unit="step", dynamic_ncols=True) as bar:
        for number in bar:
            policy = nnx.merge(graph, state[0], frozen)
            tokens = rollout(policy, number)
            rewards = reward(tokens)
            batch = {
                "input_ids": tokens,
                "advantages": losses.group_advantages(rewards.reshape(PROMPTS, GROUP)).reshape(-1),
                "old": log_probs(policy, tokens),
                "reference": log_probs(reference, tokens),
            }
            for _ in range(UPDATES):
                state, (_, kl) = update(state, batch, frozen)
                log["kl"].append(float(kl))
            log["reward"].append(float(rewards.mean()))
            bar.set_postfix_str(f"reward {log['reward'][-1]:.3f}", refresh=False)
    log["right"].append(share_right(nnx.merge(graph, state[0], frozen)))

    print(f"share of all sums that the likeliest answer gets right: {log['right'][0]:.2f} → {log['right'][1]:.2f}")
    panels = {
        "mean reward": {"sampled answers": (range(flags.steps), log["reward"])},
        "nats a token": {"KL from the reference": ([i / UPDATES for i in range(UPDATES * flags.steps)], log["kl"])},
    }
    report.curves(panels, "GRPO: right sums become likelier", flags.out / "grpo.png")
    return log


def policy_and_reference(model: CausalLM, rank: int | None) -> tuple[Any, Any, Any, CausalLM]:
    """Splits the policy that is trained, and makes the reference that stays as the model is.

    Args:
        model: a causal language model.
        rank: of the adapters; `None` to train all weights.

    Returns:
        The policy's graph, what is trained of it, what is frozen, and the reference. Beside adapters the reference
        shares all arrays with the policy.
    """
    if rank is None:
        graph, params, others = nnx.split(model, nnx.Param, ...)
        return graph, params, others, model
    policy = add_lora(model, rank, alpha=2 * rank, rngs=nnx.Rngs(1))
    return *trainable(policy), with_adapters(policy, False)


def policy_loss(model: CausalLM, batch: dict, _=None) -> tuple[jax.Array, jax.Array]:
    """The clipped loss with a penalty, and the penalty's estimate of the KL divergence.

    Args:
        model: a causal language model.
        batch: `input_ids` (B, T), `advantages` (B,), and log-probabilities `old` and `reference` (B, answer).

    Returns:
        Two float32 scalars.
    """
    output = losses.policy_loss(
        answer_log_probs(model, batch["input_ids"]),
        batch["old"],
        batch["advantages"],
        mask=jnp.ones(batch["old"].shape, bool),  # an answer has two digits, always
        reference_log_probs=batch["reference"],
        beta=0.02,
        epsilon_high=0.28,
    )
    return output.loss, output.kl


def answer_log_probs(model: CausalLM, tokens: jax.Array) -> jax.Array:
    """The log-probabilities of the answers' tokens (B, answer); position t predicts token t + 1."""
    before = PROMPT - 1 + jnp.arange(ANSWER)
    return model.log_probs(tokens, labels=tokens, logits_to_keep=before).log_probs


def rollout(model: CausalLM, step: int) -> jax.Array:
    """Samples a group of answers to each of a step's prompts: (prompts · group, prompt + answer)."""
    prompts = jnp.repeat(sums(step, PROMPTS)[:, :PROMPT], GROUP, axis=0)
    return model.generate(prompts, max_new_tokens=ANSWER, temperature=1.0, key=jax.random.key(step))


def reward(tokens: jax.Array) -> jax.Array:
    """1 where the answer is the sum, and 0 elsewhere."""
    a, b, tens, ones = tokens[:, 0], tokens[:, 2], tokens[:, 4], tokens[:, 5]
    return ((tens < 10) & (ones < 10) & (10 * tens + ones == a + b)).astype(jnp.float32)


def share_right(model: CausalLM) -> float:
    """The share of all hundred sums that the likeliest answer gets right."""
    prompts = with_sums(*np.divmod(np.arange(100), 10))[:, :PROMPT]
    return float(reward(model.generate(prompts, max_new_tokens=ANSWER)).mean())


def sums(step: int, count: int = 64) -> jax.Array:
    """Random sums with their right answers, (count, 6)."""
    return with_sums(*np.random.default_rng(step).integers(0, 10, (2, count)))


def with_sums(a: np.ndarray, b: np.ndarray) -> jax.Array:
    signs = np.full_like(a, PLUS), np.full_like(a, EQUALS)
    return jnp.asarray(np.stack([a, signs[0], b, signs[1], *np.divmod(a + b, 10)], axis=1))


if __name__ == "__main__":
    sys.exit(run(main))
