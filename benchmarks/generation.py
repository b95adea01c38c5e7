"""Generation beside the bytes that it must read, and beside transformers': tokens a second, greedy and sampled.

    python -m benchmarks.generation [--model llama-3.2-1b llama-3-8b] [--batch 64] [--prompt 512] [--new 512] [--peers]

Random weights in bfloat16, unrolled layers, prompts without padding, and no token that ends a row. A step must read all
weights but those of an embedding that is no head, and the keys and values of the tokens before it: the limit is these
bytes, summed over the new tokens, at the memory's published bandwidth. The prompt's time is that of one new token, and
is left out of "of the limit". The peer is transformers' `generate` with a static cache and torch.compile, in a process
of its own. Times are the median of three generations after one that compiles.
"""

import argparse
import dataclasses
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


def ours(case: Case) -> tuple[float, float, str]:
    """Milliseconds of a generation, and of its prompt and first token; and the device."""
    family, config = case.architecture.family, case.architecture.config
    dtypes: dict[str, Any] = dict(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    model = nnx.jit(lambda: family(config, **dtypes, scan_layers=False, rngs=nnx.Rngs(0)))()
    prompts = jnp.asarray(case.prompts, jnp.int32)
    options: dict[str, Any] = dict(SAMPLED, key=jax.random.key(0)) if case.sampled else {}
    run = lambda new: model.generate(prompts, max_new_tokens=new, eos_token_id=(), **options)
    whole, first = (wall_ms(lambda new=new: run(new), jax.block_until_ready, iterations=3) for new in (case.new, 1))
    return whole, first, jax.devices()[0].device_kind


def theirs(case: Case) -> tuple[float, float, str]:
    """The same of transformers."""
    family, config = case.architecture.family, case.architecture.config
    values = config_json.write(config, family.config_fixed, family.__name__, "bfloat16")
    step = _hugging_face.generation(values, case.prompts, sampled=SAMPLED if case.sampled else None)
    whole, first = (wall_ms(lambda new=new: step.run(new), step.wait, iterations=3) for new in (case.new, 1))
    return whole, first, step.device


def line(name: str, case: Case, needed_bytes: int, whole: float, first: float, device: str) -> list[str]:
    """The table's line of a measurement."""
    gpu = gpu_named(device)
    limit = 1e3 * needed_bytes / gpu.bandwidth if gpu else None
    steps = whole - first
    way = "sampled" if case.sampled else "greedy"
    return [
        case.model,
        way,
        name,
        f"{1e3 * case.batch * case.new / whole:,.0f}",
        f"{first:.1f}",
        f"{steps / max(1, case.new - 1):.2f}",
        f"{limit / max(1, case.new - 1):.2f}" if limit else "–",
        f"{limit / steps:.2f}" if limit else "–",
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["llama-3.2-1b", "llama-3-8b"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--peers", action="store_true", help="transformers too, which must be installed, with torch")
    parser.add_argument("--name", default="generation", help="of the file of results")
    options = parser.parse_args(arguments)
    rows, device = [], None
    for model in options.model:
        for sampled in (False, True):
            case = Case(model, options.batch, options.prompt, options.new, sampled)
            needed = in_own_process(least_bytes, case)  # in this process JAX would take the GPU
            for name, measure in {"ours": ours, **({"transformers": theirs} if options.peers else {})}.items():
                found = in_own_process(measure, case)
                device = device or found[-1]
                rows.append(line(name, case, needed, *found))
                print(rows[-1], flush=True)
    header = ["model", "tokens", "by", "new tokens/s", "ms, prompt", "ms a step", "ms, limit", "of the limit"]
    flags = f"--model {' '.join(options.model)} --batch {options.batch} --prompt {options.prompt} --new {options.new}"
    command = f"python -m benchmarks.generation {flags}" + " --peers" * options.peers
    packages = versions("flax", *(("torch", "transformers") if options.peers else ()))
    save(options.name, f"{heading(command, device).rstrip()}; {packages}\n\n{table(header, rows)}")


if __name__ == "__main__":
    main()
