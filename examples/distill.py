"""Distillation of a small LLaMA into a smaller one: from all probabilities, from a stored top 16, and none at all.

    python -m examples.distill

The text is a random Markov chain, and there is little of it. The teacher, which the program trains first, has seen
much more. Three students learn from the same sequences for as many steps: from the teacher's hidden states and head,
from the 16 likeliest tokens, stored once, and from the labels alone. In its folder (--out) the program leaves
distill.png: the divergence of each student from the teacher on sequences that nobody has seen.
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
    from liger_jax import fused_linear_distillation, fused_linear_topk_distillation
    from liger_jax.losses import shifted_labels
    from liger_jax.models import CausalLM
    from liger_jax.training import language_model_loss, make_step

VOCAB, LENGTH, BATCH, STORED = 256, 64, 16, 16
SEQUENCES = 64  # that the students learn from, again and again
PRETRAINING_STEPS = 200
EVERY = 10  # steps between looks at the sequences held out


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    """Runs the program.

    Args:
        argv: its arguments; the command line's if none.

    Returns:
        Each student's divergence from the teacher, before training, every tenth step and at the end. The keys say what
        a student learns from.
    """
    steps, out = steps_and_folder(argv, 150, "runs/tiny_distill")
    graph, params = tiny.llama(VOCAB, hidden_size=128)
    params = tiny.pretrain(graph, params, lambda step: markov_text(step, BATCH), PRETRAINING_STEPS, "teacher")
    teacher = nnx.merge(graph, params)
    teach = jax.jit(lambda tokens: lesson(teacher, tokens))
    lessons, held_out = (teach(markov_text(-seed, SEQUENCES)) for seed in (1, 2))

    full = lambda model, batch, denominator=None: full_loss(model, teacher.head, batch, denominator)
    ways = {
        "labels alone": lambda model, batch, denominator=None: language_model_loss(
            model, batch["input_ids"], denominator
        ),
        f"top {STORED}": topk_loss,
        "all probabilities": full,
    }
    graph, params = tiny.llama(VOCAB, hidden_size=64, num_hidden_layers=1, seed=1)
    divergence = jax.jit(lambda params: full(nnx.merge(graph, params), held_out))
    log = {}
    for way, loss in ways.items():
        log[way] = train(graph, params, loss, divergence, lessons, steps, way)
        print(f"{way}: held-out divergence {log[way][0]:.3f} → {log[way][-1]:.3f}")
    seen = [*range(0, steps, EVERY), steps]
    lines = {way: (seen, values) for way, values in log.items()}
    report.curves({"KL(teacher ‖ student), nats a token": lines}, "Held-out divergence", out / "distill.png")
    return log


def train(graph, params, loss_fn, divergence, lessons, steps, description) -> list[float]:
    """Trains a student in micro-batches; returns its divergence from the teacher along the way."""
    optimizer = optax.adam(3e-3)
    step = jax.jit(make_step(graph, optimizer, loss_fn, micro_batches=2))
    state, values, random = (params, optimizer.init(params)), [], np.random.default_rng(0)
    with tqdm(range(steps), desc=description, unit="step", dynamic_ncols=True) as bar:
        for number in bar:
            if number % EVERY == 0:
                values.append(float(divergence(state[0])))
            rows = random.choice(SEQUENCES, BATCH, replace=False)
            state, loss = step(state, jax.tree.map(lambda x, rows=rows: x[rows], lessons))
            bar.set_postfix_str(f"loss {float(loss):.3f}, held-out divergence {values[-1]:.3f}", refresh=False)
    return [*values, float(divergence(state[0]))]


def full_loss(model: CausalLM, head: jax.Array, batch: dict, denominator: jax.Array | None = None) -> jax.Array:
    """The mean of KL(teacher ‖ student) over the tokens that have a next one.

    Args:
        model: the student.
        head: the teacher's (V, E).
        batch: `input_ids` and `labels` (B, T), and the teacher's `hidden` (B, T, E).
        denominator: the mean's; `None` for the batch's own number of tokens.

    Returns:
        A float32 scalar.
    """
    hidden = model.hidden_states(batch["input_ids"])
    counted = shifted_labels(batch["labels"]) != -100
    return fused_linear_distillation(hidden, model.head, batch["hidden"], head, where=counted, denominator=denominator)


def topk_loss(model: CausalLM, batch: dict, denominator: jax.Array | None = None) -> jax.Array:
    """The mean divergence from the stored `token_ids` and `log_probs` (B, T, K); all other tokens are one event."""
    hidden = model.hidden_states(batch["input_ids"])
    counted = shifted_labels(batch["labels"]) != -100
    return fused_linear_topk_distillation(
        hidden, model.head, batch["token_ids"], batch["log_probs"], tail="bucket", where=counted,
        denominator=denominator,
    )  # fmt: skip


def lesson(teacher: CausalLM, tokens: jax.Array) -> dict[str, jax.Array]:
    """What the students are given: tokens, the teacher's hidden states, and its likeliest tokens."""
    hidden = teacher.hidden_states(tokens)
    log_probs, token_ids = jax.lax.top_k(jax.nn.log_softmax(hidden @ teacher.head.T), STORED)
    return dict(input_ids=tokens, labels=tokens, hidden=hidden, token_ids=token_ids, log_probs=log_probs)


def markov_text(seed: int, batch: int) -> jax.Array:
    """Sequences (batch, T) of a chain in which eight tokens, some likelier than others, may follow each token."""
    chain, random = np.random.default_rng(0), np.random.default_rng([1, abs(seed), seed < 0])
    following = chain.integers(0, VOCAB, (VOCAB, 8))
    likelihoods = np.sort(chain.dirichlet(np.ones(8)))
    steps = random.choice(8, (LENGTH, batch), p=likelihoods)
    tokens = [random.integers(0, VOCAB, batch)]
    for step in steps[1:]:
        tokens.append(following[tokens[-1], step])
    return jnp.asarray(np.stack(tokens, axis=1))


if __name__ == "__main__":
    sys.exit(run(main))
