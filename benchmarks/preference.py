"""A DPO step's loss without logits: against the fused cross-entropy, and against Liger and TRL on one NVIDIA GPU.

    python -m benchmarks.preference [--heads llama_8b] [--parts times peers memory]

The loss is DPO's sigmoid loss of 4 pairs of responses with 1,024 tokens each, in bfloat16, with the reference's
log-probabilities given. A row is a training step: the loss, and its gradients by hidden and by the head. The unit is
the fused cross-entropy of the same tokens in mode "lean": DPO needs the sums of whole responses, so its logits are made
twice, as there. All of JAX's steps have their turns in the same rounds (`_measure.in_rounds`), torch's run after them.
"Extra" memory is beside inputs and gradients: for JAX the compiler's figure, for torch the peak of its allocator.

Liger takes no reference log-probabilities. Its row is of the loss without a reference, which costs it least.

Errors are against float64 from the same bfloat16 values: of the loss, relative, and the RMS of (dW − truth) in 512
random rows of the vocabulary, divided by the RMS of the truth.

"memory" is of 1,024 to 65,536 tokens, by the compiler for an H200 that need not be there, and a picture.
"""

import argparse
import concurrent.futures
import functools
import importlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _figures, _measure, _peers
from benchmarks._token_losses import (
    HEADER,
    HEADS,
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
from liger_jax.losses import dpo_loss, policy_token_loss, sequence_log_probs

PAIRS, BETA = 4, 0.1
UNIT = "fused cross-entropy, lean"
TOKENS = (1024, 4096, 16384, 65536)
DOCS = _measure.RESULTS.parent.parent / "docs"


# --- losses -----------------------------------------------------------------------------------------------------------


def dpo(log_probs: jax.Array, reference: jax.Array) -> jax.Array:
    """The mean loss of tokens' log-probabilities (N,): chosen responses first, then the rejected ones."""
    sums = [jnp.split(sequence_log_probs(x.reshape(2 * PAIRS, -1)), 2) for x in (log_probs, reference)]
    return jnp.mean(dpo_loss(*sums[0], *sums[1], beta=BETA).losses)


def exact_loss(reference: np.ndarray, log_probs: jax.Array) -> jax.Array:
    """The formula, in the dtype of the log-probabilities."""
    chosen, rejected = jnp.split(jnp.sum((log_probs - reference).reshape(2 * PAIRS, -1), axis=1), 2)
    return jnp.mean(jax.nn.softplus(-BETA * (chosen - rejected)))


def fused(hidden: jax.Array, weight: jax.Array, labels: jax.Array, **options: Any) -> jax.Array:
    return fused_linear_log_probs(hidden, weight, labels, metrics=False, **options).log_probs


def jax_losses(reference: np.ndarray) -> dict[str, Loss]:
    def loss(log_probs, hidden, weight, labels):
        return dpo(log_probs(hidden, weight, labels), jnp.asarray(reference))

    return {
        UNIT: functools.partial(fused_linear_cross_entropy, mode="lean"),
        "liger-jax dpo_loss": functools.partial(loss, fused),
        "plain JAX, all logits in bf16": functools.partial(loss, plain_log_probs),
    }


LIGER = "Liger LigerFusedLinearDPOLoss, no reference"


def torch_losses(reference: np.ndarray) -> dict[str, Loss]:
    """Liger's loss without references, and the loss in torch on TRL's log-probabilities."""
    torch = importlib.import_module("torch")
    of_tokens = as_torch(reference)

    def liger() -> dict[str, Loss]:
        module = importlib.import_module("liger_kernel.chunked_loss")
        loss = module.LigerFusedLinearDPOLoss(beta=BETA, use_ref_model=False)

        def function(hidden, weight, labels):
            shape = 2 * PAIRS, len(labels) // (2 * PAIRS)
            return loss(weight, hidden.reshape(*shape, -1), labels.reshape(shape))[0]

        return {LIGER: function}

    def trl() -> dict[str, Loss]:
        log_probs = _peers.trl_log_probs()

        def function(hidden, weight, labels):
            sums = (log_probs(hidden, weight, labels) - of_tokens).reshape(2 * PAIRS, -1).sum(1)
            return -torch.nn.functional.logsigmoid(BETA * (sums[:PAIRS] - sums[PAIRS:])).mean()

        return {"TRL chunked log-probabilities": function}

    return installed({"Liger": liger, "TRL": trl})


# --- tables -----------------------------------------------------------------------------------------------------------


def head_lines(head: str, tokens: int, parts: list[str]) -> list[list[str]]:
    data = make_data(tokens, *HEADS[head])
    exact = exact_log_probs(data)
    noise = 0.3 * np.random.default_rng(1).standard_normal(tokens)
    reference = (exact.log_probs + noise).astype(np.float32)
    truth = make_truth(data, exact, functools.partial(exact_loss, reference.astype(np.float64)))
    rows = []
    if "times" in parts:
        losses = jax_losses(reference)
        with concurrent.futures.ThreadPoolExecutor(len(losses)) as pool:
            steps = compiled_steps(losses, data, pool)
            rows = jax_rows(steps, data, {who: truth for who in losses if who != UNIT})
    found = lines(head, rows, UNIT)
    if "peers" in parts:
        unit = [row for row in rows if row.who == UNIT]
        without_reference = make_truth(data, exact, functools.partial(exact_loss, np.zeros(tokens)))
        for who, loss in torch_losses(reference).items():
            others = torch_rows({who: loss}, data, without_reference if who == LIGER else truth)
            found += lines(head, unit + others, UNIT)[len(unit) :]
    return found


# --- the picture ------------------------------------------------------------------------------------------------------


def memory_steps() -> dict[str, Callable[..., jax.Array]]:
    """Losses of (hidden, weight, labels, numbers of tokens), in the modes that keep no chunk of logits."""

    def of_dpo(hidden, weight, labels, reference, **options):
        return dpo(fused(hidden, weight, labels, **options), reference)

    def of_policy(hidden, weight, labels, numbers):
        function = lambda log_prob, old, reference, advantage: policy_token_loss(
            log_prob, old, advantage, reference, beta=0.04
        )
        per_token = numbers, numbers, numbers
        return fused_linear_token_loss(
            function, hidden, weight, labels, per_token, denominator=len(labels), mode="lean"
        )[0]

    def of_labels(hidden, weight, labels, numbers):
        return fused_linear_cross_entropy(hidden, weight, labels, mode="lean")

    def of_logits(hidden, weight, labels, reference):
        return dpo(plain_log_probs(hidden, weight, labels), reference)

    return {
        "dpo_loss of fused log-probabilities": of_dpo,
        "the same, chunk_size=512": functools.partial(of_dpo, chunk_size=512),
        "token loss, lean": of_policy,
        "fused cross-entropy, lean": of_labels,
        "dpo_loss of all logits": of_logits,
    }


def memory_table(head: str, folder: pathlib.Path) -> str:
    """Extra MiB of the steps, compiled for an H200, and their picture."""
    from liger_jax.planner.compilers import compile_for, gpu_devices

    d, v = HEADS[head]
    figures: dict[str, list[float]] = {}
    for who, loss in memory_steps().items():
        for n in TOKENS:
            shapes = ((n, d), jnp.bfloat16), ((v, d), jnp.bfloat16), ((n,), jnp.int32), ((n,), jnp.float32)
            compiled = compile_for(jax.value_and_grad(loss, (0, 1)), shapes, gpu_devices("h200")[0], "gpu")
            figures.setdefault(who, []).append(compiled.memory_analysis().temp_size_in_bytes / 2**20)
        print(who, figures[who], flush=True)
    figures["one float32 array of hidden's size"] = [4 * n * d / 2**20 for n in TOKENS]
    title = f"Forward and backward, D = {d:,}, V = {v:,}, bfloat16, compiled for an H200"
    styles = "o-", "v-", "s--", "x--", "^-", ":"
    _figures.memory_against_tokens(figures, styles, TOKENS, title, folder / "preference_memory.png", yscale="log")
    rows = [[who, *(f"{x:,.0f}" for x in values)] for who, values in figures.items()]
    return _measure.table(["extra MiB", *(f"{n:,} tokens" for n in TOKENS)], rows)


def main() -> None:
    # Read when JAX's GPU client is made: torch shares the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preference")
    parser.add_argument("--heads", nargs="+", choices=tuple(HEADS), default=["llama_8b"])
    parser.add_argument("--tokens", type=int, default=8192, help=f"of {PAIRS} pairs together")
    parser.add_argument("--parts", nargs="+", choices=("times", "peers", "memory"), default=["times", "peers"])
    parser.add_argument("--folder", type=pathlib.Path, default=_measure.RESULTS)
    options = parser.parse_args()
    command = f"python -m benchmarks.preference --heads {' '.join(options.heads)} --tokens {options.tokens}"
    if "memory" in options.parts:
        folder = DOCS if options.folder == _measure.RESULTS else options.folder
        table = memory_table(options.heads[0], folder)
        heading = _measure.heading("python -m benchmarks.preference --parts memory", "compiled for an H200")
        _measure.save("preference_memory", f"{heading}\n{table}", options.folder)
    if set(options.parts) & {"times", "peers"}:
        heading = _measure.heading(command).rstrip()
        if "peers" in options.parts:
            heading += "; " + _measure.versions("torch", "triton", "liger-kernel", "trl")
        found = [line for head in options.heads for line in head_lines(head, options.tokens, options.parts)]
        _measure.save("preference", f"{heading}\n\n{_measure.table(HEADER, found)}", options.folder)


if __name__ == "__main__":
    main()
