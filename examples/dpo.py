"""DPO on a tiny LLaMA: it has learnt to count both ways, and pairs teach it to prefer upwards.

    python -m examples.dpo

A prompt is one number. The chosen answer counts upwards from it, by ones, twos or threes, and the rejected one
downwards. The reference is the model before DPO; its log-probabilities are computed once for all pairs. In its folder
(--out) the program leaves dpo.png: the margin between the rewards of chosen and rejected answers.
"""

import sys
from pathlib import Path

if not __package__:  # started by its path, from any folder: Python must find the packages of the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from examples._lib.command import needed_packages, run, steps_and_folder

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
    from liger_jax.training import make_step

VOCAB, LENGTH, BATCH = 64, 9, 32  # LENGTH: one token of prompt and eight of answer
PRETRAINING_STEPS = 200
EVERY = 10  # steps between looks at the pairs held out


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    """Runs the program.

    Args:
        argv: its arguments; the command line's if none.

    Returns:
        The mean reward margin of each step's pairs, and of the pairs held out, before training and after it.
    """
    steps, out = steps_and_folder(argv, 100, "runs/tiny_dpo")
    graph, params = tiny.llama(VOCAB)
    params = tiny.pretrain(graph, params, both_ways, PRETRAINING_STEPS, "counting both ways")

    pairs, held_out = make_pairs()
    scores = jax.jit(lambda params, pairs: answer_log_probs(nnx.merge(graph, params), pairs))
    pairs, held_out = ({"input_ids": x, "reference": scores(params, x)} for x in (pairs, held_out))
    margin = jax.jit(lambda params: pair_loss(nnx.merge(graph, params), held_out)[1])
    before = shares(graph, params)

    optimizer = optax.adam(3e-4)
    step = jax.jit(make_step(graph, optimizer, pair_loss, has_aux=True))
    state, log = (params, optimizer.init(params)), {"trained pairs": [], "pairs held out": [float(margin(params))]}
    seen, random = [0], np.random.default_rng(0)
    with tqdm(range(1, steps + 1), desc="DPO", unit="step", dynamic_ncols=True) as bar:
        for number in bar:
            rows = random.choice(len(pairs["input_ids"]), BATCH, replace=False)
            state, (_, mean_margin) = step(state, jax.tree.map(lambda x, rows=rows: x[rows], pairs))
            log["trained pairs"].append(float(mean_margin))
            bar.set_postfix_str(f"margin {mean_margin:.3f}", refresh=False)
            if number % EVERY == 0 or number == steps:
                seen.append(number)
                log["pairs held out"].append(float(margin(state[0])))

    first, last = log["pairs held out"][0], log["pairs held out"][-1]
    print(f"reward margin of pairs held out: {first:.3f} → {last:.3f}")
    for way, was, now in zip(("upwards", "downwards"), before, shares(graph, state[0]), strict=True):
        print(f"share of sampled answers that begin {way}: {was:.2f} → {now:.2f}")
    lines = {"trained pairs": (range(steps), log["trained pairs"]), "pairs held out": (seen, log["pairs held out"])}
    report.curves({"reward margin": lines}, "DPO: chosen answers gain on rejected ones", out / "dpo.png")
    return log


def pair_loss(model: CausalLM, batch: dict, _=None) -> tuple[jax.Array, jax.Array]:
    """DPO's loss of P pairs, and their mean reward margin.

    Args:
        model: a causal language model.
        batch: `input_ids` (P, 2, T), chosen before rejected, and `reference` (P, 2).

    Returns:
        Two float32 scalars.
    """
    chosen, rejected = answer_log_probs(model, batch["input_ids"]).T
    output = losses.dpo_loss(chosen, rejected, *batch["reference"].T, beta=0.1)
    return output.losses.mean(), output.margins.mean()


def answer_log_probs(model: CausalLM, pairs: jax.Array) -> jax.Array:
    """The log-probability of each answer (P, 2), of token ids (P, 2, T)."""
    tokens = pairs.reshape(-1, LENGTH)
    labels = tokens.at[:, 0].set(-100)  # the prompt
    found = model.log_probs(tokens, labels=labels)
    return losses.sequence_log_probs(found.log_probs, losses.shifted_labels(labels) != -100).reshape(-1, 2)


def counting(start, stride):
    return (np.asarray(start)[..., None] + np.asarray(stride)[..., None] * np.arange(LENGTH)) % VOCAB


def both_ways(step: int) -> jax.Array:
    """A batch that counts upwards or downwards."""
    random = np.random.default_rng(step)
    return jnp.asarray(counting(random.integers(0, VOCAB, BATCH), random.choice([-3, -2, -1, 1, 2, 3], BATCH)))


def make_pairs() -> tuple[jax.Array, jax.Array]:
    """All pairs (P, 2, T) to train on, and those of each eighth prompt, which are held out."""
    start, up, down = (x.ravel() for x in np.meshgrid(range(VOCAB), (1, 2, 3), (-1, -2, -3), indexing="ij"))
    pairs = np.stack([counting(start, up), counting(start, down)], axis=1)
    return jnp.asarray(pairs[start % 8 != 0]), jnp.asarray(pairs[start % 8 == 0])


def shares(graph, params) -> tuple[float, float]:
    """Samples 256 answers; returns the share whose first step goes up, and the share whose first step goes down."""
    prompts = jnp.arange(256)[:, None] % VOCAB
    tokens = nnx.merge(graph, params).generate(prompts, max_new_tokens=1, temperature=1.0, key=jax.random.key(0))
    stride = (tokens[:, 1] - tokens[:, 0]) % VOCAB
    return float(jnp.mean((stride >= 1) & (stride <= 3))), float(jnp.mean(stride >= VOCAB - 3))


if __name__ == "__main__":
    sys.exit(run(main))
