"""Generation beside the bytes that it must read, and beside transformers': tokens a second, greedy and sampled.

    python -m benchmarks.generation [--model llama-3.2-1b llama-3-8b] [--ways greedy sampled] [--by ours transformers]
        [--batch 64] [--prompt 512] [--new 512]

Random weights in bfloat16, unrolled layers, prompts without padding, and no token that ends a row. A step must read all
weights but those of an embedding that is no head, and the keys and values of the tokens before it: the limit is these
bytes, summed over the new tokens, at the memory's published bandwidth. The prompt's time is that of one new token, the
likeliest, and is left out of "of the limit". The peer is transformers' `generate` with a static cache and
torch.compile. Each of the two has a process of its own. Times are the median of two generations after three, of which
the first compiles; its seconds are told, too.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import _hugging_face
from benchmarks._measure import heading, in_own_process, save, table, versions, wall_ms
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

    @property
    def architecture(self) -> Architecture:
        """The model's family and config."""
        return architecture(self.model)

    @property
    def prompts(self) -> np.ndarray:
        """Random tokens (B, T)."""
        return np.random.default_rng(0).integers(0, self.architecture.config.vocab_size, (self.batch, self.prompt))


def least_bytes(case: Case) -> int:
    """What the steps after the first token must read."""
    config, parameters = case.architecture.config, case.architecture.num_parameters
    if not config.tie_word_embeddings:
        parameters -= config.vocab_size * config.hidden_size  # of the embedding a step reads a row for each token
    of_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    steps = case.new - 1
    tokens_before = sum(range(case.prompt + 1, case.prompt + case.new))
    return 2 * (steps * parameters + case.batch * of_token * tokens_before)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A generation's figures.

    Attributes:
        case: what was generated.
        needed_bytes: what the steps after the first token must read.
        whole: milliseconds of a generation.
        first: milliseconds of its prompt and first token.
        start: seconds of the generation that compiles.
        device: the device's kind.
    """

    case: Case
    needed_bytes: int
    whole: float
    first: float
    start: float
    device: str


def ours(cases: list[Case]) -> list[Measured]:
    """Generations by a model of ours, of one architecture."""
    family, config = cases[0].architecture.family, cases[0].architecture.config
    dtypes: dict[str, Any] = dict(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    model = nnx.jit(lambda: family(config, **dtypes, scan_layers=False, rngs=nnx.Rngs(0)))()
    prompts = jnp.asarray(cases[0].prompts, jnp.int32)

    def run(new: int, sampled: bool) -> Any:
        options: dict[str, Any] = dict(SAMPLED, key=jax.random.key(0)) if sampled else {}
        return model.generate(prompts, max_new_tokens=new, eos_token_id=(), **options)

    return _measured(cases, run, jax.block_until_ready, jax.devices()[0].device_kind)


def theirs(cases: list[Case]) -> list[Measured]:
    """The same by transformers."""
    family, config = cases[0].architecture.family, cases[0].architecture.config
    values = config_json.write(config, family.config_fixed, family.__name__, "bfloat16")
    step = _hugging_face.generation(values, cases[0].prompts)
    return _measured(cases, lambda new, sampled: step.run(new, SAMPLED if sampled else None), step.wait, step.device)


def _measured(cases: list[Case], run: Callable[[int, bool], Any], wait: Callable, device: str) -> list[Measured]:
    found, first = [], None
    for case in cases:
        begin = time.perf_counter()
        wait(run(case.new, case.sampled))
        start = time.perf_counter() - begin
        whole = wall_ms(lambda case=case: run(case.new, case.sampled), wait, iterations=2)
        if first is None:
            first = wall_ms(lambda: run(1, False), wait, iterations=3)
        found.append(Measured(case, least_bytes(case), whole, first, start, device))
        print(found[-1], flush=True)
    return found


BY = {"ours": ours, "transformers": theirs}


def line(name: str, found: Measured) -> list[str]:
    """The table's line of a measurement."""
    case, gpu = found.case, gpu_named(found.device)
    limit = 1e3 * found.needed_bytes / gpu.bandwidth if gpu else None
    steps, count = found.whole - found.first, max(1, case.new - 1)
    return [
        case.model,
        "sampled" if case.sampled else "greedy",
        name,
        f"{1e3 * case.batch * case.new / found.whole:,.0f}",
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
    parser.add_argument("--name", default="generation", help="of the file of results")
    options = parser.parse_args(arguments)
    rows, device = [], None
    for model in options.model:
        cases = [Case(model, options.batch, options.prompt, options.new, way == "sampled") for way in options.ways]
        for name in options.by:
            for found in in_own_process(BY[name], cases):
                device = device or found.device
                rows.append(line(name, found))
    header = [
        "model",
        "tokens",
        "by",
        "new tokens/s",
        "ms, prompt",
        "ms a step",
        "ms, limit",
        "of the limit",
        "s, start",
    ]
    flags = f"--model {' '.join(options.model)} --ways {' '.join(options.ways)} --by {' '.join(options.by)}"
    sizes = f"--batch {options.batch} --prompt {options.prompt} --new {options.new}"
    command = f"python -m benchmarks.generation {flags} {sizes}"
    packages = versions("flax", *(("torch", "transformers") if "transformers" in options.by else ()))
    save(options.name, f"{heading(command, device).rstrip()}; {packages}\n\n{table(header, rows)}")


if __name__ == "__main__":
    main()
