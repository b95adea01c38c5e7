"""Generation beside the bytes that it must read, and beside transformers': tokens a second, greedy and sampled.

    python -m benchmarks.generation [--model llama-3.2-1b llama-3-8b@8] [--ways greedy sampled] [--by ours transformers]
        [--batch 64] [--prompt 512] [--new 512] [--ended 0 0.75]

A model may be followed by the number of its layers. Random weights in bfloat16, unrolled layers, prompts without
padding. Of "ended" rows so large a share ends early, each at a random place: a generation without ends is made first,
and the tokens that stand there in these rows end a row in the generation that is measured, the same one up to its
ends. Other rows may meet such a token, too, so the table tells the mean of the lengths that were found. With ends ours
is measured twice, without and with `compact`, by which rows that have ended leave the batch.

A step must read all weights but those of an embedding that is no head, and of the rows that have not ended the keys and
values of the tokens before it: the limit is these bytes, summed over the new tokens, at the memory's published
bandwidth. The prompt's time is that of one new token, the likeliest, and is left out of "of the limit". New tokens a
second are those of rows that have not ended. The peer is transformers' `generate` with a static cache and
torch.compile. Each of the two has a process of its own. Times are the median of two generations after three, of which
the first compiles; its seconds are told, too.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import _hugging_face
from benchmarks._measure import heading, in_own_process, save, table, versions, wall_ms
from benchmarks._scaling_cases import with_layers
from liger_jax.models.hugging_face import config_json
from liger_jax.pallas_kernels.devices import gpu_named
from liger_jax.planner.architectures import Architecture, architecture

SAMPLED = dict(temperature=0.7, top_p=0.9)
WAYS = ["greedy", "sampled"]


@dataclasses.dataclass(frozen=True)
class Case:
    """What is generated."""

    model: str
    batch: int
    prompt: int
    new: int
    sampled: bool
    ended: float

    @property
    def architecture(self) -> Architecture:
        """The model's family and config."""
        name, _, layers = self.model.partition("@")
        return with_layers(architecture(name), int(layers) if layers else None)

    @property
    def prompts(self) -> np.ndarray:
        """Random tokens (B, T)."""
        return np.random.default_rng(0).integers(0, self.architecture.config.vocab_size, (self.batch, self.prompt))


def least_bytes(case: Case, lengths: np.ndarray) -> int:
    """What the steps after the first token must read for rows of so many new tokens."""
    config, parameters = case.architecture.config, case.architecture.num_parameters
    if not config.tie_word_embeddings:
        parameters -= config.vocab_size * config.hidden_size  # of the embedding a step reads a row for each token
    of_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    steps = lengths.max() - 1
    tokens_before = sum(int(np.arange(case.prompt + 1, case.prompt + length).sum()) for length in lengths)
    return int(2 * (steps * parameters + of_token * tokens_before))


def ends_of(new: np.ndarray, share: float) -> list[int]:
    """Tokens that end this share of the rows (B, new), each at a random place."""
    random, count = np.random.default_rng(1), round(share * len(new))
    rows = random.permutation(len(new))[:count]
    return sorted({int(row[random.integers(len(row))]) for row in new[rows]})


def lengths_of(new: np.ndarray, stops: list[int]) -> np.ndarray:
    """The number of tokens of each row (B, new), with the first that ends it."""
    is_end = np.isin(new, stops)
    return np.where(is_end.any(axis=1), is_end.argmax(axis=1) + 1, new.shape[1])


@dataclasses.dataclass(frozen=True)
class Measured:
    """A generation's figures."""

    case: Case  # what was generated
    compact: bool  # whether rows that had ended left the batch
    tokens: int  # new tokens of all rows, up to their ends
    mean: float  # of the rows' new tokens
    steps: int  # tokens of the longest row after the first
    needed_bytes: int  # what the steps after the first token must read
    whole: float  # milliseconds of a generation
    first: float  # milliseconds of its prompt and first token
    start: float  # seconds of the generation that compiles
    device: str  # the device's kind


def ours(cases: list[Case]) -> list[Measured]:
    """Generations by a model of ours, of one architecture."""
    family, config = cases[0].architecture.family, cases[0].architecture.config
    dtypes: dict[str, Any] = dict(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    model = nnx.jit(lambda: family(config, **dtypes, scan_layers=False, rngs=nnx.Rngs(0)))()
    prompts = jnp.asarray(cases[0].prompts, jnp.int32)

    def run(new: int, sampled: bool, stops: list[int], compact: bool) -> Any:
        options: dict[str, Any] = dict(SAMPLED, key=jax.random.key(0)) if sampled else {}
        return model.generate(prompts, max_new_tokens=new, eos_token_id=tuple(stops), compact=compact, **options)

    return _measured(cases, run, jax.block_until_ready, np.asarray, jax.devices()[0].device_kind, ways=(False, True))


def theirs(cases: list[Case]) -> list[Measured]:
    """The same by transformers."""
    family, config = cases[0].architecture.family, cases[0].architecture.config
    values = config_json.write(config, family.config_fixed, family.__name__, "bfloat16")
    step = _hugging_face.generation(values, cases[0].prompts)

    def run(new: int, sampled: bool, stops: list[int], compact: bool) -> Any:
        return step.run(new, SAMPLED if sampled else None, stops)

    return _measured(cases, run, step.wait, lambda tokens: tokens.cpu().numpy(), step.device, ways=(False,))


def _measured(
    cases: list[Case], run: Callable, wait: Callable, to_numpy: Callable, device: str, *, ways: tuple[bool, ...]
) -> list[Measured]:
    """Measures run(new tokens, sampled, stops, compact); only where rows end, all of the ways to compact."""
    results, first = [], None
    for case in cases:
        stops, lengths = [], np.full(case.batch, case.new)
        if case.ended:
            new = to_numpy(run(case.new, case.sampled, [], False))[:, case.prompt :]
            stops = ends_of(new, case.ended)
            lengths = lengths_of(new, stops)
        for compact in ways if case.ended else ways[:1]:
            whole = functools.partial(run, case.new, case.sampled, stops, compact)
            begin = time.perf_counter()
            wait(whole())
            start = time.perf_counter() - begin
            ms = wall_ms(whole, wait, iterations=2)
            first = first or wall_ms(lambda: run(1, False, [], False), wait, iterations=3)
            sizes = int(lengths.sum()), float(lengths.mean()), int(lengths.max()) - 1
            results.append(Measured(case, compact, *sizes, least_bytes(case, lengths), ms, first, start, device))
            print(results[-1], flush=True)
    return results


BY = {"ours": ours, "transformers": theirs}


def line(name: str, found: Measured) -> list[str]:
    """The table's line of a measurement."""
    case, gpu = found.case, gpu_named(found.device)
    limit = 1e3 * found.needed_bytes / gpu.bandwidth if gpu else None
    steps, count = found.whole - found.first, max(1, found.steps)
    return [
        case.model,
        "sampled" if case.sampled else "greedy",
        f"{name}, compact" if found.compact else name,
        f"{found.mean:.0f}",
        f"{1e3 * found.tokens / found.whole:,.0f}",
        f"{found.first:.1f}",
        f"{steps / count:.2f}",
        f"{limit / count:.2f}" if limit else "–",
        f"{limit / steps:.2f}" if limit else "–",
        f"{found.start:.0f}",
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["llama-3.2-1b", "llama-3-8b"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--by", nargs="+", choices=list(BY), default=["ours"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--ended", type=float, nargs="+", default=[0.0, 0.75], help="shares of rows that end early")
    parser.add_argument("--name", default="generation", help="of the file of results")
    options = parser.parse_args(arguments)
    rows, device = [], None
    for model in options.model:
        sizes = model, options.batch, options.prompt, options.new
        cases = [Case(*sizes, way == "sampled", ended) for ended in options.ended for way in options.ways]
        for name in options.by:
            for found in in_own_process(BY[name], cases):
                device = device or found.device
                rows.append(line(name, found))
    header = [
        "model",
        "tokens",
        "by",
        "mean length",
        "new tokens/s",
        "ms, prompt",
        "ms a step",
        "ms, limit",
        "of the limit",
        "s, start",
    ]
    flags = f"--model {' '.join(options.model)} --ways {' '.join(options.ways)} --by {' '.join(options.by)}"
    sizes = f"--batch {options.batch} --prompt {options.prompt} --new {options.new}"
    sizes += f" --ended {' '.join(map(str, options.ended))}"
    command = f"python -m benchmarks.generation {flags} {sizes}"
    packages = versions("flax", *(("torch", "transformers") if "transformers" in options.by else ()))
    save(options.name, f"{heading(command, device).rstrip()}; {packages}\n\n{table(header, rows)}")


if __name__ == "__main__":
    main()
