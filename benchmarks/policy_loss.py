"""A GRPO step's loss without logits: against the fused cross-entropy, and against Liger and TRL on one NVIDIA GPU.

    python -m benchmarks.policy_loss [--heads llama_8b qwen2_half_b] [--parts times peers memory]

The loss is TRL's default for GRPO with a reference: loss type "dapo", and 0.04 times the k3 estimate times the ratio,
of 8 answers with 1,024 tokens, in bfloat16. A row is a training step: the loss, and its gradients by hidden and by the
head. The unit is the fused cross-entropy of the same tokens in mode "fast". All of JAX's steps of a head have their
turns in the same rounds (`_measure.in_rounds`), torch's run after them. "Extra" memory is beside inputs and gradients:
for JAX the compiler's figure, for torch the peak of its allocator.

Errors are against float64 from the same bfloat16 values: of the loss, relative, and the RMS of (dW − truth) in 512
random rows of the vocabulary, divided by the RMS of the truth. The ratios keep away from the ends of the range in which
they are not clipped: there a rounding would clip a token or not.

"memory" is of log-probabilities and of the token loss on five generations of TPUs, by their compiler.
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

from benchmarks import _measure, _peers
from benchmarks._token_losses import (
    HEADER,
    HEADS,
    Data,
    ExactLogProbs,
    Loss,
    as_torch,
    compiled_steps,
    exact_log_probs,
    installed,
    jax_rows,
    lines,
    make_data,
    make_truth,
    plain_log_probs,
    torch_rows,
)
from liger_jax import fused_linear_cross_entropy, fused_linear_log_probs, fused_linear_token_loss
from liger_jax.losses import policy_token_loss

ANSWERS = 8
EPSILON, BETA = 0.2, 0.04
UNIT = "fused cross-entropy, fast"
# By default tpu7x's compiler copies 16-bit arrays that a loop reads, the weight too, into tiles of 16 rows.
SMALL_TILES = {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"}
TPUS = {name: ({}, name) for name in ("v4", "v5e", "v5p", "v6e", "tpu7x")} | {
    "tpu7x, small tiles": (SMALL_TILES, "tpu7x")
}


class Rollouts(NamedTuple):
    """What a step knows of its tokens (N,): log-probabilities of two other policies, and advantages."""

    old: np.ndarray
    reference: np.ndarray
    advantages: np.ndarray


def make_rollouts(log_probs: np.ndarray) -> Rollouts:
    """A third of the tokens have ratios within the range, and the others beyond either end of it."""
    random, n = np.random.default_rng(1), len(log_probs)
    log_ratio = random.choice([-0.4, 0.0, 0.4], n) + random.uniform(-0.1, 0.1, n)
    advantages = np.repeat(random.standard_normal(ANSWERS), n // ANSWERS)
    reference = log_probs + 0.3 * random.standard_normal(n)
    return Rollouts(*(x.astype(np.float32) for x in (log_probs - log_ratio, reference, advantages)))


# --- losses -----------------------------------------------------------------------------------------------------------


def by_token(log_prob: Any, old: Any, reference: Any, advantage: Any) -> Any:
    return policy_token_loss(
        log_prob, old, advantage, reference, loss_type="dapo", epsilon_low=EPSILON, epsilon_high=EPSILON, beta=BETA
    )


def exact_loss(rollouts: Rollouts, log_probs: jax.Array) -> jax.Array:
    """The formula, in the dtype of the log-probabilities."""
    old, reference, advantages = (x.astype(log_probs.dtype) for x in rollouts)
    ratio = jnp.exp(log_probs - old)
    clipped = jnp.clip(ratio, 1 - EPSILON, 1 + EPSILON)
    d = reference - log_probs
    return jnp.mean(-jnp.minimum(ratio * advantages, clipped * advantages) + BETA * ratio * (jnp.expm1(d) - d))


def jax_losses(rollouts: Rollouts, plain: bool) -> dict[str, Loss]:
    """JAX's losses by name, the unit first."""
    per_token = tuple(jnp.asarray(x) for x in rollouts)
    n = len(rollouts.old)

    def token_loss(hidden, weight, labels, **options):
        return fused_linear_token_loss(by_token, hidden, weight, labels, per_token, denominator=n, **options)[0]

    def bounded(hidden, weight, labels):
        """Within the bytes of a 16-bit dW and of 2,048 tokens' logits."""
        budget = 2 * weight.size + 4096 * len(weight)
        return token_loss(hidden, weight, labels, mode="fast", memory_budget_bytes=budget)

    def of_log_probs(log_probs, hidden, weight, labels):
        return jnp.mean(by_token(log_probs(hidden, weight, labels), *per_token))

    def fused(hidden, weight, labels):
        return fused_linear_log_probs(hidden, weight, labels, metrics=False).log_probs

    losses: dict[str, Loss] = {UNIT: functools.partial(fused_linear_cross_entropy, mode="fast")}
    losses |= {f"liger-jax token loss, {mode}": functools.partial(token_loss, mode=mode) for mode in ("fast", "lean")}
    losses["liger-jax token loss, bounded"] = bounded
    losses["liger-jax log_probs and the loss"] = functools.partial(of_log_probs, fused)
    if plain:
        losses["plain JAX, all logits in bf16"] = functools.partial(of_log_probs, plain_log_probs)
    return losses


def torch_losses(rollouts: Rollouts) -> dict[str, Loss]:
    """Liger's loss, and the loss in torch on TRL's log-probabilities."""
    torch = importlib.import_module("torch")
    old, reference, advantages = map(as_torch, rollouts)
    shape = ANSWERS, len(old) // ANSWERS

    def liger() -> dict[str, Loss]:
        options = dict(beta=BETA, epsilon_low=EPSILON, epsilon_high=EPSILON, use_bias_correction_kl=True)
        loss = importlib.import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss(**options)
        mask, of_answers = torch.ones(shape, device=old.device), advantages.reshape(shape)[:, 0]

        def function(hidden, weight, labels):
            others = dict(ref_per_token_logps=reference.reshape(shape), old_per_token_logps=old.reshape(shape))
            rows = hidden.reshape(*shape, -1)
            return loss(rows, weight, labels.reshape(shape), mask, of_answers, **others)[0]

        return {"Liger LigerFusedLinearGRPOLoss": function}

    def trl() -> dict[str, Loss]:
        log_probs = _peers.trl_log_probs()

        def function(hidden, weight, labels):
            found = log_probs(hidden, weight, labels)
            ratio, d = torch.exp(found - old), reference - found
            clipped = torch.clamp(ratio, 1 - EPSILON, 1 + EPSILON)
            objective = torch.minimum(ratio * advantages, clipped * advantages)
            return (BETA * ratio * (torch.exp(d) - d - 1) - objective).mean()

        return {"TRL chunked log-probabilities": function}

    return installed({"Liger": liger, "TRL": trl})


# --- tables -----------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A head with its data, and the steps of JAX that are being compiled for it."""

    head: str
    data: Data
    exact: ExactLogProbs
    rollouts: Rollouts
    steps: dict[str, Any]


def make_case(head: str, tokens: int, is_timed: bool, pool: concurrent.futures.Executor) -> Case:
    data = make_data(tokens, *HEADS[head])
    exact = exact_log_probs(data)
    rollouts = make_rollouts(exact.log_probs)
    losses = jax_losses(rollouts, plain=head != "qwen2_half_b") if is_timed else {}
    return Case(head, data, exact, rollouts, compiled_steps(losses, data, pool))


def case_lines(case: Case, parts: list[str]) -> list[list[str]]:
    truth = make_truth(case.data, case.exact, functools.partial(exact_loss, case.rollouts))
    rows = jax_rows(case.steps, case.data, {who: truth for who in case.steps if who != UNIT})
    found = lines(case.head, rows, UNIT)
    if "peers" in parts:
        unit = [row for row in rows if row.who == UNIT]
        found += lines(case.head, unit + torch_rows(torch_losses(case.rollouts), case.data, truth), UNIT)[len(unit) :]
    return found


def tpu_lines(heads: list[str], tokens: int) -> list[list[str]]:
    """Temporaries in MiB of the steps, compiled for TPUs that need not be there."""
    from liger_jax.planner.compilers import compile_for, tpu_devices

    def log_probs(hidden, weight, labels, factors):
        return jnp.sum(fused_linear_log_probs(hidden, weight, labels, metrics=False).log_probs * factors)

    def token_loss(hidden, weight, labels, factors, mode):
        per_token = factors, factors, factors
        return fused_linear_token_loss(by_token, hidden, weight, labels, per_token, denominator=tokens, mode=mode)[0]

    losses = {"fused_linear_log_probs": log_probs}
    losses |= {
        f"fused_linear_token_loss, {mode}": functools.partial(token_loss, mode=mode) for mode in ("auto", "lean")
    }

    found = []
    for head in heads:
        d, v = HEADS[head]
        shapes = ((tokens, d), jnp.bfloat16), ((v, d), jnp.bfloat16), ((tokens,), jnp.int32), ((tokens,), jnp.float32)
        for who, loss in losses.items():
            line = [head, who]
            for compiler_options, tpu in TPUS.values():
                step: Callable[..., Any] = jax.value_and_grad(loss, (0, 1))
                compiled = compile_for(step, shapes, tpu_devices(tpu)[0], "tpu", compiler_options)
                line.append(f"{compiled.memory_analysis().temp_size_in_bytes / 2**20:,.0f}")
            print(*line, sep=" | ", flush=True)
            found.append(line)
    return found


def main() -> None:
    # Read when JAX's GPU client is made: torch shares the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policy_loss")
    parser.add_argument("--heads", nargs="+", choices=tuple(HEADS), default=["llama_8b", "qwen2_half_b"])
    parser.add_argument("--tokens", type=int, default=8192, help=f"of {ANSWERS} answers together")
    parser.add_argument("--parts", nargs="+", choices=("times", "peers", "memory"), default=["times", "peers"])
    parser.add_argument("--folder", type=pathlib.Path, default=_measure.RESULTS)
    options = parser.parse_args()
    command = f"python -m benchmarks.policy_loss --heads {' '.join(options.heads)} --tokens {options.tokens}"
    if "memory" in options.parts:
        text = _measure.heading(f"{command} --parts memory", "compiled for TPUs") + "\n"
        text += _measure.table(["head", "extra MiB of", *TPUS], tpu_lines(options.heads, options.tokens))
        _measure.save("policy_loss_tpu", text, options.folder)
    if not set(options.parts) & {"times", "peers"}:
        return
    heading = _measure.heading(command).rstrip()
    if "peers" in options.parts:
        heading += "; " + _measure.versions("torch", "triton", "liger-kernel", "trl")
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        cases = [make_case(head, options.tokens, "times" in options.parts, pool) for head in options.heads]
        table: list[list[str]] = []
        while cases:  # a head's arrays are freed before the next one is measured
            table += case_lines(cases.pop(0), options.parts)
            _measure.save("policy_loss", f"{heading}\n\n{_measure.table(HEADER, table)}", options.folder)


if __name__ == "__main__":
    main()
