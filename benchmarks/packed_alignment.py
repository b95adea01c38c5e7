"""DPO's and GRPO's training steps on packed rows: beside padded rows, and beside rows that have no empty place.

    python -m benchmarks.packed_alignment [--cases dpo grpo] [--parts times peers] [--layouts padded packed "full rows"]

A step is loss, gradients and plain SGD of Llama-3.2-1B in bfloat16, layers scanned and recomputed, its state updated in
place, in micro-batches of about 16,384 tokens. The reference's and the old log-probabilities are given.

A step has what 16 rows of 4,096 tokens hold. DPO's sequences have lengths that are lognormal like UltraFeedback's, cut
at 2,048 and scaled to a mean of 512; their first quarter is the prompt. GRPO's answers have 50 to 2,048 tokens, uniform
in the logarithm, after prompts of 128; advantages are given, so an answer may lie in another row than its group's
others. "padded" fills each of the same sequences up to the longest of them. "packed" has rows by `pack_pairs` and
`pack_completions`. "full rows" are these whose last segments are drawn out over their empty places: what packing
reaches where nothing is left empty.

Counted tokens are those with a place in the loss. Times are medians over rounds in which all steps of a case have their
turn. "peers" is DPO's padded step of TRL's trainer, on transformers' model with recomputed layers, after JAX's. A
line says so if TRL is not installed.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import _measure, _peers, _trl
from benchmarks._models import SIZES, compiled_step, make_model, needed_bytes, runs
from liger_jax import losses
from liger_jax.models import CausalLM, KernelOptions
from liger_jax.training import pack_completions, pack_pairs, share_of_padding

MICRO_BATCH = 16384  # tokens
LONGEST, PROMPT, LEARNING_RATE, BETA = 2048, 128, 1e-6, 0.1
HEADER = ["step", "rows", "empty", "ms", "counted tokens/s", "÷ full rows", "GiB"]


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Token ids of sequences, and how many tokens of each are its prompt."""

    tokens: list[np.ndarray]
    prompts: list[int]

    def labels(self) -> list[np.ndarray]:
        return [np.where(np.arange(len(x)) < n, -100, x) for x, n in zip(self.tokens, self.prompts, strict=True)]

    def counted(self) -> int:
        """Tokens that are scored; a prompt has at least one."""
        return sum(len(x) - n for x, n in zip(self.tokens, self.prompts, strict=True))


def preference_lengths(random: np.random.Generator, count: int, longest: int) -> np.ndarray:
    """A lognormal's, scaled until they have a mean of a quarter of the longest."""
    drawn, scale = random.lognormal(0.0, 0.7, count), longest / 4
    lengths_of = lambda scale: np.clip(np.rint(scale * drawn), 8, longest).astype(int)
    for _ in range(20):
        scale *= longest / 4 / lengths_of(scale).mean()
    return lengths_of(scale)


def make_sequences(case: str, count: int, longest: int, vocab_size: int) -> Sequences:
    random = np.random.default_rng(0)
    if case == "dpo":
        lengths = preference_lengths(random, 2 * count, longest)
        prompts = [max(1, int(n) // 4) for n in lengths]
    else:
        prompt = max(1, longest * PROMPT // LONGEST)
        answers = np.exp(random.uniform(np.log(longest * 50 / LONGEST), np.log(longest), count))
        lengths, prompts = prompt + np.maximum(1, answers).astype(int), [prompt] * count
    return Sequences([random.integers(0, vocab_size, n).astype(np.int32) for n in lengths], prompts)


# --- batches: each array begins with the rows, so that micro-batches can cut it ---------------------------------------


def padded(case: str, sequences: Sequences) -> dict[str, np.ndarray]:
    """(sequences, longest), or pairs (pairs, 2, longest); its length is a multiple of 128."""
    length = -(-max(map(len, sequences.tokens)) // 128) * 128
    fill = lambda rows, value: np.stack([np.pad(x, (0, length - len(x)), constant_values=value) for x in rows])
    batch = {"input_ids": fill(sequences.tokens, 0), "labels": fill(sequences.labels(), -100)}
    if case == "dpo":
        return {name: np.stack(np.split(x, 2), axis=1) for name, x in batch.items()}
    return batch


def first(case: str, sequences: Sequences, count: int) -> Sequences:
    """The first `count` pairs or answers."""
    tokens, prompts = sequences.tokens, sequences.prompts
    if case == "grpo":
        return Sequences(tokens[:count], prompts[:count])
    half = len(tokens) // 2
    chosen, rejected = slice(0, count), slice(half, half + count)
    return Sequences(tokens[chosen] + tokens[rejected], prompts[chosen] + prompts[rejected])


def what_fits(case: str, sequences: Sequences, length: int, rows: int) -> Sequences:
    """As many of the first pairs or answers as these rows hold."""
    sizes = np.array([len(x) for x in sequences.tokens])
    sizes = sum(np.split(sizes, 2)) if case == "dpo" else sizes
    count = int(np.searchsorted(np.cumsum(sizes), rows * length, side="right"))
    while len(packed(case, first(case, sequences, count), length)[0]["input_ids"]) > rows:
        count -= 1
    return first(case, sequences, count)


def packed(case: str, sequences: Sequences, length: int) -> tuple[dict[str, np.ndarray], int]:
    """Packed rows, and an even number of segments that the fullest of them has room in."""
    tokens, labels = sequences.tokens, sequences.labels()
    if case == "dpo":
        half = len(tokens) // 2
        packing = pack_pairs(
            tokens[:half], tokens[half:], length, chosen_labels=labels[:half], rejected_labels=labels[half:]
        )[0]
    else:
        packing = pack_completions([[x] for x in tokens], length, labels=[[x] for x in labels])[0]
    segments = int(packing["segment_ids"].max())
    return dict(packing), segments + segments % 2


def drawn_out(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The batch whose rows' last segments fill what was empty, with tokens that count."""
    ids, labels = batch["segment_ids"].copy(), batch["labels"].copy()
    random = np.random.default_rng(1)
    tokens = np.where(ids == 0, random.integers(0, 100, ids.shape), batch["input_ids"]).astype(np.int32)
    labels = np.where(ids == 0, tokens, labels)
    ids = np.where(ids == 0, np.maximum(ids.max(axis=1, keepdims=True), 1), ids)
    positions = np.zeros_like(ids)
    for row, of_row in enumerate(ids):
        begins = np.flatnonzero(np.diff(of_row, prepend=0))
        positions[row] = np.arange(len(of_row)) - np.repeat(begins, np.diff(begins, append=len(of_row)))
    return {"input_ids": tokens, "labels": labels, "segment_ids": ids, "positions": positions}


# --- losses -----------------------------------------------------------------------------------------------------------


def token_log_probs(model: CausalLM, batch: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of the rows' tokens, and which of them count; pairs are two rows side by side."""
    tokens, labels = (batch[k].reshape(-1, batch[k].shape[-1]) for k in ("input_ids", "labels"))
    packing = {k: batch[k] for k in ("segment_ids", "positions") if k in batch}
    log_probs = model.log_probs(tokens, labels=labels, **packing).log_probs
    return log_probs, losses.shifted_labels(labels, batch.get("segment_ids")) != -100


def dpo(model: CausalLM, batch: dict[str, Any], pairs: jax.Array, *, num_segments: int | None) -> jax.Array:
    """The sum of the pairs' losses over the step's number of pairs. A pair that a row does not have weighs 0."""
    log_probs, mask = token_log_probs(model, batch)
    if num_segments is None:
        sums = losses.sequence_log_probs(log_probs, mask).reshape(-1, 2)
        return losses.dpo_loss(sums[:, 0], sums[:, 1], beta=BETA).losses.sum() / pairs
    segments = dict(segment_ids=batch["segment_ids"], num_segments=num_segments)
    sums = losses.sequence_log_probs(log_probs, mask, **segments).reshape(-1, 2)
    exists = batch["segment_ids"].max(axis=1)[:, None] > 2 * jnp.arange(num_segments // 2)
    weights = exists.reshape(-1).astype(jnp.float32)
    return losses.dpo_loss(sums[:, 0], sums[:, 1], pair_weights=weights, beta=BETA).losses.sum() / pairs


def number_of_pairs(batch: dict[str, Any]) -> jax.Array:
    if "segment_ids" in batch:
        return jnp.sum(batch["segment_ids"].max(axis=1) // 2).astype(jnp.float32)
    return jnp.asarray(float(len(batch["input_ids"])))


def grpo(model: CausalLM, batch: dict[str, Any], denominator: jax.Array, *, num_segments: int | None) -> jax.Array:
    """GRPO's with sequence ratios, which need the sums of segments; advantages alternate."""
    log_probs, mask = token_log_probs(model, batch)
    segments = {} if num_segments is None else dict(segment_ids=batch["segment_ids"], num_segments=num_segments)
    rows = log_probs.shape[0]
    advantages = jnp.ones((rows,)) if num_segments is None else jnp.ones((rows, num_segments))
    options = dict(loss_type="grpo", importance_level="sequence", denominator=denominator)
    return losses.policy_loss(log_probs, None, advantages, mask=mask, **options, **segments).loss


def number_of_sequences(batch: dict[str, Any]) -> jax.Array:
    if "segment_ids" in batch:
        return jnp.sum(batch["segment_ids"].max(axis=1)).astype(jnp.float32)
    return jnp.asarray(float(len(batch["input_ids"])))


LAYOUTS = ("padded", "packed", "full rows")
LOSSES = {"dpo": (dpo, number_of_pairs), "grpo": (grpo, number_of_sequences)}


# --- steps ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A step's rows, and what the table says of them."""

    batch: dict[str, np.ndarray]
    num_segments: int | None

    def micro_batches(self) -> int:
        """The fewest micro-batches of at most `MICRO_BATCH` tokens, or of one row, that cut the rows evenly."""
        rows, tokens = len(self.batch["input_ids"]), self.batch["input_ids"].size
        return next(n for n in range(1, rows + 1) if rows % n == 0 and (tokens <= n * MICRO_BATCH or n == rows))

    def counted(self) -> int:
        labels = jnp.asarray(self.batch["labels"])
        labels = labels.reshape(-1, labels.shape[-1])
        ids = self.batch.get("segment_ids")
        return int(jnp.sum(losses.shifted_labels(labels, None if ids is None else jnp.asarray(ids)) != -100))

    def empty(self, tokens: int) -> float:
        if "segment_ids" in self.batch:
            return share_of_padding(self.batch)
        return 1.0 - tokens / self.batch["input_ids"].size


def cases_of(case: str, sequences: Sequences, length: int) -> dict[str, Case]:
    """The step's rows by the names of `LAYOUTS`."""
    rows, segments = packed(case, sequences, length)
    return {
        "padded": Case(padded(case, sequences), None),
        "packed": Case(rows, segments),
        "full rows": Case(drawn_out(rows), segments),
    }


def step_of(model_name: str, name: str, case: Case) -> tuple[Callable[[], Any], Any]:
    """The function that makes the state, and the compiled step on (state, batch)."""
    make = functools.partial(make_model, SIZES[model_name], KernelOptions(), remat="full")
    loss, normalizer = LOSSES[name]
    loss = functools.partial(loss, num_segments=case.num_segments)
    options = dict(normalizer=normalizer, micro_batches=case.micro_batches())
    return compiled_step(make, optax.sgd(LEARNING_RATE), case.batch, loss, **options)


def rows_of(
    model: str, name: str, sequences: Sequences, length: int, layouts: list[str], rounds: int
) -> list[list[str]]:
    tokens, cases = sum(map(len, sequences.tokens)), cases_of(name, sequences, length)
    cases = {who: case for who, case in cases.items() if who in layouts}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = {who: pool.submit(step_of, model, name, case) for who, case in cases.items()}
        programs = {who: future.result() for who, future in futures.items()}
    times = _measure.in_rounds({who: runs(*programs[who], case.batch) for who, case in cases.items()}, rounds=rounds)
    speeds = {who: 1e3 * case.counted() / times[who] for who, case in cases.items()}
    cells = []
    for who, case in cases.items():
        gib = needed_bytes(programs[who][1]) / 2**30
        line = [f"{name}, {who}", f"{case.batch['input_ids'].shape}", f"{case.empty(tokens):.1%}", f"{times[who]:.0f}"]
        share = f"{speeds[who] / speeds['full rows']:.3f}" if "full rows" in speeds else "–"
        cells.append([*line, f"{speeds[who]:,.0f}", share, f"{gib:.1f}"])
        print(*cells[-1], sep=" | ", flush=True)
    return cells


# --- TRL's ------------------------------------------------------------------------------------------------------------


def trl_row(model_name: str, sequences: Sequences) -> list[str]:
    """The table's line of DPO's padded step by TRL's trainer."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    device, values = "cuda" if _peers.on_gpu(torch) else "cpu", dataclasses.asdict(SIZES[model_name])
    named = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    named = (*named, "num_key_value_heads", "tie_word_embeddings", "rope_theta")
    torch.manual_seed(0)
    with torch.device(device):
        of_model = transformers.LlamaConfig(**{k: values[k] for k in named}, use_cache=False)
        model = transformers.LlamaForCausalLM._from_config(of_model, dtype=torch.bfloat16).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    case = Case(padded("dpo", sequences), None)
    by, micro_batches = "TRL's trainer", case.micro_batches()
    step = _trl.dpo_step(model, case.batch, micro_batches=micro_batches, beta=BETA, learning_rate=LEARNING_RATE)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    print(f"{by}: the first step's loss is {float(step()):.4f}", flush=True)
    wait = lambda _: torch.cuda.synchronize() if device == "cuda" else None
    ms = _measure.in_rounds({by: step}, wait, rounds=2)[by]
    gib = f"{torch.cuda.max_memory_allocated() / 2**30:.1f}" if device == "cuda" else "–"
    speed, empty = f"{1e3 * case.counted() / ms:,.0f}", case.empty(sum(map(len, sequences.tokens)))
    return [f"dpo, padded, {by}", f"{case.batch['input_ids'].shape}", f"{empty:.1%}", f"{ms:.0f}", speed, "–", gib]


def main() -> None:
    # Read when JAX's GPU client is made: torch shares the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packed_alignment")
    parser.add_argument("--model", choices=("llama-3.2-1b", "tiny"), default="llama-3.2-1b")
    parser.add_argument("--cases", nargs="+", choices=tuple(LOSSES), default=list(LOSSES))
    parser.add_argument("--rows", type=int, default=16, help="that are packed full")
    parser.add_argument("--longest", type=int, default=LONGEST, help="of a sequence's tokens; a row has twice as many")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=5, help="in which every layout has its turn")
    parser.add_argument("--parts", nargs="+", choices=("times", "peers"), default=["times", "peers"])
    options = parser.parse_args()
    length = 2 * options.longest
    rows: list[list[str]] = []
    for name in options.cases:
        many = make_sequences(name, 16 * options.rows, options.longest, SIZES[options.model].vocab_size)
        sequences = what_fits(name, many, length, options.rows)
        if "times" in options.parts:
            rows += rows_of(options.model, name, sequences, length, options.layouts, options.rounds)
        if "peers" in options.parts and name == "dpo":
            try:
                rows.append(trl_row(options.model, sequences))
                print(*rows[-1], sep=" | ", flush=True)
            except Exception as error:  # that TRL is not installed, or cannot run here, is a result, too
                print(f"without TRL: {type(error).__name__}: {error}", flush=True)
    command = f"python -m benchmarks.packed_alignment --model {options.model} --cases {' '.join(options.cases)}"
    heading = _measure.heading(command).rstrip() + "; " + _measure.versions("torch", "transformers", "trl")
    _measure.save("packed_alignment", f"{heading}\n\n{_measure.table(HEADER, rows)}")


if __name__ == "__main__":
    main()
