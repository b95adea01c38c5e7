"""Losses of log-probabilities without logits, beside the fused cross-entropy, Liger and TRL on one NVIDIA GPU.

    python -m benchmarks.token_losses [--losses grpo dpo log_probs] [--heads llama_8b] [--parts times peers memory]

"grpo" is TRL's default with a reference, of 8 answers: loss type "dapo", and 0.04 times the k3 estimate times the
ratio. "dpo" is DPO's sigmoid loss of 4 pairs of responses, with the reference's log-probabilities given. "log_probs" is
Σ a·log_probs + b·entropy with random a and b. All are of 8,192 tokens in bfloat16.

A row is a training step: the loss, and its gradients by hidden and by the head. The unit is the fused cross-entropy of
the same tokens: in mode "fast" for GRPO, and "lean" for the others, whose logits are made twice, as there. All of JAX's
steps of a head have their turns in the same rounds (`_measure.in_rounds`), torch's run after them. "Extra" memory is
beside inputs and gradients: for JAX the compiler's figure, for torch the peak of its allocator.

Errors are against float64 from the same bfloat16 values: of the loss, relative, and the RMS of (dW − truth) in 512
random rows of the vocabulary, divided by the RMS of the truth. GRPO's ratios keep away from the ends of the range in
which they are not clipped: there a rounding would clip a token or not. Liger's DPO takes no reference's
log-probabilities: its row is of the loss without a reference, which costs it least.

"memory" is of JAX's steps from 1,024 to 65,536 tokens, by the compiler of a device that need not be there (`--target`),
and a picture.
"""

import argparse
import concurrent.futures
import functools
import importlib
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _figures, _measure, _peers
from benchmarks._token_losses import (
    HEADER,
    HEADS,
    Exact,
    Loss,
    compiled_steps,
    installed,
    jax_rows,
    lines,
    make_data,
    make_exact,
    make_truth,
    plain_log_probs,
    torch_rows,
)
from liger_jax import fused_linear_cross_entropy, fused_linear_log_probs, fused_linear_token_loss
from liger_jax.losses import dpo_loss, policy_token_loss, sequence_log_probs

ANSWERS, PAIRS = 8, 4
EPSILON, POLICY_BETA, DPO_BETA = 0.2, 0.04, 0.1
TOKENS = (1024, 4096, 16384, 65536)
DOCS = _measure.RESULTS.parent.parent / "docs"
# By default tpu7x's compiler copies 16-bit arrays that a loop reads, the weight too, into tiles of 16 rows.
SMALL_TILES = {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"}


class Numbers(NamedTuple):
    """What a step knows of its tokens, each (N,): those of two other policies, and factors."""

    old: Any
    reference: Any
    advantages: Any  # of answers; they are the random factors of "log_probs", too


def make_numbers(log_probs: np.ndarray) -> Numbers:
    """A third of the tokens have ratios within the range, and the others beyond either end of it."""
    random, n = np.random.default_rng(1), len(log_probs)
    log_ratio = random.choice([-0.4, 0.0, 0.4], n) + random.uniform(-0.1, 0.1, n)
    advantages = np.repeat(random.standard_normal(ANSWERS), n // ANSWERS)
    reference = log_probs + 0.3 * random.standard_normal(n)
    return Numbers(*(x.astype(np.float32) for x in (log_probs - log_ratio, reference, advantages)))


def fused(hidden: jax.Array, weight: jax.Array, labels: jax.Array, **options: Any) -> Any:
    return fused_linear_log_probs(hidden, weight, labels, metrics=False, **options)


# --- GRPO -------------------------------------------------------------------------------------------------------------


def by_token(log_prob: Any, old: Any, reference: Any, advantage: Any) -> Any:
    return policy_token_loss(
        log_prob, old, advantage, reference, loss_type="dapo", epsilon_low=EPSILON, epsilon_high=EPSILON,
        beta=POLICY_BETA,
    )  # fmt: skip


def exact_grpo(numbers: Numbers, log_probs: jax.Array, entropy: jax.Array) -> jax.Array:
    """The formula, in the dtype of the log-probabilities."""
    old, reference, advantages = (x.astype(log_probs.dtype) for x in numbers)
    ratio = jnp.exp(log_probs - old)
    clipped = jnp.clip(ratio, 1 - EPSILON, 1 + EPSILON)
    d = reference - log_probs
    return jnp.mean(-jnp.minimum(ratio * advantages, clipped * advantages) + POLICY_BETA * ratio * (jnp.expm1(d) - d))


def grpo_losses(numbers: Numbers) -> dict[str, Loss]:
    n = len(numbers.old)

    def token_loss(hidden, weight, labels, **options):
        return fused_linear_token_loss(by_token, hidden, weight, labels, tuple(numbers), denominator=n, **options)[0]

    def bounded(hidden, weight, labels):
        """Within the bytes of a 16-bit dW and of 2,048 tokens' logits."""
        budget = 2 * weight.size + 4096 * len(weight)
        return token_loss(hidden, weight, labels, mode="fast", memory_budget_bytes=budget)

    return {
        **{f"liger-jax token loss, {mode}": functools.partial(token_loss, mode=mode) for mode in ("fast", "lean")},
        "liger-jax token loss, bounded": bounded,
        "liger-jax log_probs and the loss": lambda *head: jnp.mean(by_token(fused(*head).log_probs, *numbers)),
        "plain JAX, all logits in bf16": lambda *head: jnp.mean(by_token(plain_log_probs(*head)[0], *numbers)),
    }


def liger_grpo(numbers: Numbers) -> dict[str, Loss]:
    torch = importlib.import_module("torch")
    old, reference, advantages = map(_peers.to_torch, numbers)
    shape = ANSWERS, len(old) // ANSWERS
    options = dict(beta=POLICY_BETA, epsilon_low=EPSILON, epsilon_high=EPSILON, use_bias_correction_kl=True)
    loss = importlib.import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss(**options)
    mask, of_answers = torch.ones(shape, device=old.device), advantages.reshape(shape)[:, 0]

    def function(hidden, weight, labels):
        others = dict(ref_per_token_logps=reference.reshape(shape), old_per_token_logps=old.reshape(shape))
        return loss(hidden.reshape(*shape, -1), weight, labels.reshape(shape), mask, of_answers, **others)[0]

    return {"Liger LigerFusedLinearGRPOLoss": function}


def trl_grpo(numbers: Numbers) -> dict[str, Loss]:
    torch, log_probs = importlib.import_module("torch"), _peers.trl_log_probs()
    old, reference, advantages = map(_peers.to_torch, numbers)

    def function(hidden, weight, labels):
        scored = log_probs(hidden, weight, labels)
        ratio, d = torch.exp(scored - old), reference - scored
        clipped = torch.clamp(ratio, 1 - EPSILON, 1 + EPSILON)
        objective = torch.minimum(ratio * advantages, clipped * advantages)
        return (POLICY_BETA * ratio * (torch.exp(d) - d - 1) - objective).mean()

    return {"TRL chunked log-probabilities": function}


# --- DPO --------------------------------------------------------------------------------------------------------------


def dpo(log_probs: jax.Array, reference: jax.Array) -> jax.Array:
    """The mean loss of tokens' log-probabilities (N,): chosen responses first, then the rejected ones."""
    sums = [jnp.split(sequence_log_probs(x.reshape(2 * PAIRS, -1)), 2) for x in (log_probs, reference)]
    return jnp.mean(dpo_loss(*sums[0], *sums[1], beta=DPO_BETA).losses)


def exact_dpo(numbers: Numbers, log_probs: jax.Array, entropy: jax.Array) -> jax.Array:
    """The formula, in the dtype of the log-probabilities."""
    margins = (log_probs - numbers.reference.astype(log_probs.dtype)).reshape(2 * PAIRS, -1)
    chosen, rejected = jnp.split(jnp.sum(margins, axis=1), 2)
    return jnp.mean(jax.nn.softplus(-DPO_BETA * (chosen - rejected)))


def dpo_losses(numbers: Numbers) -> dict[str, Loss]:
    return {
        "liger-jax dpo_loss": lambda *head: dpo(fused(*head).log_probs, numbers.reference),
        "the same, chunk_size=512": lambda *head: dpo(fused(*head, chunk_size=512).log_probs, numbers.reference),
        "plain JAX, all logits in bf16": lambda *head: dpo(plain_log_probs(*head)[0], numbers.reference),
    }


def liger_dpo(numbers: Numbers) -> dict[str, Loss]:
    module = importlib.import_module("liger_kernel.chunked_loss")
    loss = module.LigerFusedLinearDPOLoss(beta=DPO_BETA, use_ref_model=False)

    def function(hidden, weight, labels):
        shape = 2 * PAIRS, len(labels) // (2 * PAIRS)
        return loss(weight, hidden.reshape(*shape, -1), labels.reshape(shape))[0]

    return {"Liger LigerFusedLinearDPOLoss, no reference": function}


def trl_dpo(numbers: Numbers) -> dict[str, Loss]:
    torch, log_probs = importlib.import_module("torch"), _peers.trl_log_probs()
    reference = _peers.to_torch(numbers.reference)

    def function(hidden, weight, labels):
        sums = (log_probs(hidden, weight, labels) - reference).reshape(2 * PAIRS, -1).sum(1)
        return -torch.nn.functional.logsigmoid(DPO_BETA * (sums[:PAIRS] - sums[PAIRS:])).mean()

    return {"TRL chunked log-probabilities": function}


# --- log-probabilities and entropies ----------------------------------------------------------------------------------


def weighted(numbers: Numbers, log_probs: jax.Array, entropy: jax.Array | None) -> jax.Array:
    a, b = (x.astype(log_probs.dtype) for x in (numbers.old, numbers.advantages))
    return jnp.sum(a * log_probs) + (0.0 if entropy is None else jnp.sum(b * entropy))


def log_probs_losses(numbers: Numbers) -> dict[str, Loss]:
    def ours(*head: Any, **options: Any) -> jax.Array:
        output = fused_linear_log_probs(*head, **options)
        return weighted(numbers, output.log_probs, output.entropy)

    return {
        "log_probs and entropy": functools.partial(ours, entropy=True),
        "log_probs and entropy, metrics=False": functools.partial(ours, entropy=True, metrics=False),
        "plain JAX, all logits in bf16": lambda *head: weighted(numbers, *plain_log_probs(*head)),
    }


# --- tables -----------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A loss: the name of its files, the unit's mode, its formula of (numbers, log_probs, entropy), ours, and peers."""

    file: str
    mode: str
    formula: Callable[..., jax.Array]
    ours: Callable[[Numbers], dict[str, Loss]]
    peers: dict[str, Callable[[Numbers], dict[str, Loss]]]


CASES = {
    "grpo": Case("policy_loss", "fast", exact_grpo, grpo_losses, {"Liger": liger_grpo, "TRL": trl_grpo}),
    "dpo": Case("preference", "lean", exact_dpo, dpo_losses, {"Liger": liger_dpo, "TRL": trl_dpo}),
    "log_probs": Case("log_probs", "lean", weighted, log_probs_losses, {}),
}


def case_lines(case: Case, head: str, tokens: int, parts: list[str], pool: Any) -> list[list[str]]:
    data = make_data(tokens, *HEADS[head])
    exact: Exact = make_exact(data)
    numbers, unit = make_numbers(exact.log_probs), f"fused cross-entropy, {case.mode}"
    truth = make_truth(data, exact, functools.partial(case.formula, numbers))
    rows = []
    if "times" in parts:
        losses = {unit: functools.partial(fused_linear_cross_entropy, mode=case.mode)}
        ours = case.ours(Numbers(*map(jnp.asarray, numbers)))
        rows = jax_rows(compiled_steps(losses | ours, data, pool), data, dict.fromkeys(ours, truth))
    cells = lines(head, rows, unit)
    if "peers" in parts:
        own = [row for row in rows if row.who == unit]
        peers = installed({who: functools.partial(make, numbers) for who, make in case.peers.items()})
        for who, loss in peers.items():
            known = numbers._replace(reference=0 * numbers.reference) if "no reference" in who else numbers
            its_truth = make_truth(data, exact, functools.partial(case.formula, known))
            cells += lines(head, own + torch_rows({who: loss}, data, its_truth), unit)[len(own) :]
    return cells


def memory_table(name: str, head: str, target: str, folder: pathlib.Path) -> str:
    """Extra MiB of the steps, compiled for a device that need not be there, and their picture."""
    from liger_jax.planner.compilers import compile_for, gpu_devices, tpu_devices

    case, (d, v) = CASES[name], HEADS[head]
    is_tpu = target.startswith(("v", "tpu"))
    device = (tpu_devices if is_tpu else gpu_devices)(target)[0]
    options = SMALL_TILES if target == "tpu7x" else {}
    zeros = lambda n: Numbers(*[jnp.zeros(n)] * 3)
    figures: dict[str, list[float]] = {}
    for who in case.ours(zeros(ANSWERS)):
        for n in TOKENS:

            def loss(hidden, weight, labels, *numbers, who=who):
                return case.ours(Numbers(*numbers))[who](hidden, weight, labels)

            shapes = ((n, d), jnp.bfloat16), ((v, d), jnp.bfloat16), ((n,), jnp.int32), *[((n,), jnp.float32)] * 3
            step = jax.value_and_grad(loss, (0, 1))
            compiled = compile_for(step, shapes, device, "tpu" if is_tpu else "gpu", options)
            figures.setdefault(who, []).append(compiled.memory_analysis().temp_size_in_bytes / 2**20)
        print(who, figures[who], flush=True)
    figures["one float32 array of hidden's size"] = [4 * n * d / 2**20 for n in TOKENS]
    title = f"{name}: forward and backward, D = {d:,}, V = {v:,}, bfloat16, compiled for {target}"
    styles = ("o-", "v-", "s--", "x--", "^-", ":")[-len(figures) :]
    path = folder / f"{case.file}_memory.png"
    _figures.memory_against_tokens(figures, styles, TOKENS, title, path, yscale="log")
    rows = [[who, *(f"{x:,.0f}" for x in values)] for who, values in figures.items()]
    return _measure.table(["extra MiB", *(f"{n:,} tokens" for n in TOKENS)], rows)


def main() -> None:
    # Read when JAX's GPU client is made: torch shares the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.token_losses")
    parser.add_argument("--losses", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--heads", nargs="+", choices=tuple(HEADS), default=["llama_8b"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--parts", nargs="+", choices=("times", "peers", "memory"), default=["times", "peers"])
    parser.add_argument("--target", default="h200", help='of "memory": a GPU or a TPU by the planner\'s name')
    parser.add_argument("--folder", type=pathlib.Path, default=_measure.RESULTS)
    options = parser.parse_args()
    for name in options.losses:
        command = f"python -m benchmarks.token_losses --losses {name} --heads {' '.join(options.heads)}"
        if "memory" in options.parts:
            folder = DOCS if options.folder == _measure.RESULTS else options.folder
            table = memory_table(name, options.heads[0], options.target, folder)
            heading = _measure.heading(f"{command} --parts memory", f"compiled for {options.target}")
            _measure.save(f"{CASES[name].file}_memory", f"{heading}\n{table}", options.folder)
        if set(options.parts) & {"times", "peers"}:
            heading = _measure.heading(f"{command} --tokens {options.tokens}").rstrip()
            if "peers" in options.parts:
                heading += "; " + _measure.versions("torch", "triton", "liger-kernel", "trl")
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                each = (case_lines(CASES[name], head, options.tokens, options.parts, pool) for head in options.heads)
                cells = [line for own in each for line in own]
            _measure.save(CASES[name].file, f"{heading}\n\n{_measure.table(HEADER, cells)}", options.folder)


if __name__ == "__main__":
    main()
