"""A training step of tunix's `PeftTrainer` on its own Qwen2.5-0.5B, with its loss or with ours: speed and memory.

    python -m benchmarks.tunix_step --loss ours --rows 8 --length 1024

Weights are random, parameters float32, computation bfloat16, AdamW; tunix recomputes each layer in the backward. The
steps are those of `trainer.train`, with all that tunix does between them.
"""

import argparse
import dataclasses
import importlib.util
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from liger_jax.integrations.tunix import sft_loss


def without_its_front_page() -> None:
    """Imports of parts of tunix then leave out what `import tunix` loads for other parts."""
    spec = importlib.util.find_spec("tunix")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("tunix is not installed: pip install google-tunix")
    sys.modules["tunix"] = types.ModuleType("tunix")
    sys.modules["tunix"].__path__ = list(spec.submodule_search_locations)


def trainer_of(loss: str, layers: int, rows: int, length: int):
    """Tunix's trainer with a batch: its own loss, or ours."""
    from tunix.models.qwen2 import model as qwen2  # pyright: ignore[reportMissingImports]
    from tunix.sft import peft_trainer, utils  # pyright: ignore[reportMissingImports]

    config = dataclasses.replace(
        qwen2.ModelConfig.qwen2p5_0p5b(),
        num_layers=layers,
        dtype=jnp.bfloat16,
        remat_config=qwen2.RematConfig.DECODER,
    )
    graph, state = nnx.split(nnx.eval_shape(lambda: qwen2.Qwen2(config, rngs=nnx.Rngs(0))))
    leaves, tree = jax.tree.flatten(state)
    drawn = [
        jax.random.normal(key, x.shape, x.dtype) * 0.02
        for key, x in zip(jax.random.split(jax.random.key(0), len(leaves)), leaves, strict=True)
    ]
    model = nnx.merge(graph, jax.tree.unflatten(tree, drawn))
    options = peft_trainer.TrainingConfig(eval_every_n_steps=10**9)
    trainer = peft_trainer.PeftTrainer(model, optax.adamw(1e-5), options)
    trainer.is_managed_externally = True  # so that it can train more than once
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (rows, length))
    mask = jnp.ones(tokens.shape, bool)
    batch = dict(
        input_tokens=jnp.asarray(tokens),
        input_mask=mask,
        positions=utils.build_positions_from_mask(mask),
        attention_mask=utils.make_causal_attn_mask(mask),
    )
    return trainer.with_loss_fn(sft_loss) if loss == "ours" else trainer, batch


def main() -> None:
    """Trains, and prints a line of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", choices=("ours", "tunix"), default="ours")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    without_its_front_page()
    trainer, batch = trainer_of(args.loss, args.layers, args.rows, args.length)
    step = trainer.jit_train_and_eval_step(cache_nnx_graph=True)[0]
    first = float(step(batch)[0])
    trainer.train([batch] * 3)
    start = time.perf_counter()
    trainer.train([batch] * args.steps)
    jax.block_until_ready(nnx.state(trainer.model))
    seconds = (time.perf_counter() - start) / args.steps
    device = jax.devices()[0]
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30
    print(
        f"{device.device_kind}, {args.layers} layers, {args.rows} × {args.length}, loss {args.loss}: "
        f"first loss {first:.5f}, {1e3 * seconds:.1f} ms a step, "
        f"{args.rows * args.length / seconds:,.0f} tokens/s, peak {peak:.2f} GiB"
    )


if __name__ == "__main__":
    main()
