"""A training step of tunix's `PeftTrainer` on its own Qwen2.5-0.5B, with its loss or with ours: speed and memory.

    python -m benchmarks.tunix_step [--task sft|dpo|grpo] --loss ours|tunix --rows 8 --length 1024

DPO and GRPO are the steps that tunix's `DPOTrainer` and GRPO's learner make of a batch, after the passes of references
and the sampling. Half of each row is the prompt; rows of DPO are both answers of rows / 2 pairs.

Weights are random, parameters float32, computation bfloat16, AdamW; tunix recomputes each layer in the backward. The
steps are those of `trainer.train`, with all that tunix does between them.
"""

import argparse
import dataclasses
import importlib.util
import math
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from liger_jax.integrations.tunix import sft_loss, with_fused_log_probs


def without_its_front_page() -> None:
    """Imports of parts of tunix then leave out what `import tunix` loads for other parts."""
    spec = importlib.util.find_spec("tunix")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("tunix is not installed: pip install google-tunix")
    sys.modules["tunix"] = types.ModuleType("tunix")
    sys.modules["tunix"].__path__ = list(spec.submodule_search_locations)


def sft_task(rows: int, length: int, vocab: int):
    """The loss of `PeftTrainer`, ours, and a batch for both."""
    from tunix.sft import peft_trainer, utils  # pyright: ignore[reportMissingImports]

    mask = jnp.ones((rows, length), bool)
    batch = dict(
        input_tokens=_tokens(rows, length, vocab),
        input_mask=mask,
        positions=utils.build_positions_from_mask(mask),
        attention_mask=utils.make_causal_attn_mask(mask),
    )
    return peft_trainer._default_loss_fn, sft_loss, batch


def dpo_task(rows: int, length: int, vocab: int):
    """The loss of `DPOTrainer`, ours, and pairs whose reference is known."""
    from tunix.sft import utils  # pyright: ignore[reportMissingImports]
    from tunix.sft.dpo import dpo_trainer  # pyright: ignore[reportMissingImports]

    mask, kept = jnp.ones((rows, length), bool), length // 2
    example = dpo_trainer.TrainExample(
        input_ids=_tokens(rows, length, vocab),
        positions=utils.build_positions_from_mask(mask),
        attention_mask=utils.make_causal_attn_mask(mask),
        ref_chosen_logps=jnp.full(rows // 2, -kept * math.log(vocab)),
        ref_rejected_logps=jnp.full(rows // 2, -kept * math.log(vocab)),
        completion_mask=jnp.ones((rows, kept), int),
        logits_to_keep=kept,
    )
    return dpo_trainer.dpo_loss_fn, with_fused_log_probs(dpo_trainer.dpo_loss_fn), dict(train_example=example)


def grpo_task(rows: int, length: int, vocab: int):
    """The loss of GRPO's learner, ours, and completions whose old and reference probabilities are known."""
    from tunix.rl import algo_core, common  # pyright: ignore[reportMissingImports]

    # Tunix's `GRPOConfig` with its defaults, without what its module imports.
    config = types.SimpleNamespace(
        beta=0.04, epsilon=0.2, epsilon_high=0.2, loss_algo="grpo", loss_agg_mode="sequence-mean-token-mean",
        kl_loss_mode="kl", kl_clamp_value=None, temperature=1.0, entropy_coef=0.0,
    )  # fmt: skip
    tokens, kept = 1 + _tokens(rows, length, vocab - 1), length // 2
    known = jnp.full((rows, kept), -math.log(vocab))
    example = common.TrainExample(
        prompt_ids=tokens[:, kept:],
        prompt_mask=jnp.ones((rows, length - kept), int),
        completion_ids=tokens[:, :kept],
        completion_mask=jnp.ones((rows, kept), int),
        advantages=jnp.linspace(-1, 1, rows),
        ref_per_token_logps=known,
        old_per_token_logps=known,
    )
    bind = lambda f: lambda model, train_example: f(model, train_example, config, pad_id=0, eos_id=vocab)
    own = algo_core.grpo_loss_fn
    return bind(own), bind(with_fused_log_probs(own)), dict(train_example=example)


TASKS = dict(sft=sft_task, dpo=dpo_task, grpo=grpo_task)


def _tokens(rows: int, length: int, vocab: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, vocab, (rows, length)))


def trainer_of(task: str, loss: str, layers: int, rows: int, length: int):
    """Tunix's trainer with a task's loss, tunix's own or ours, and a batch."""
    from tunix.models.qwen2 import model as qwen2  # pyright: ignore[reportMissingImports]
    from tunix.sft import peft_trainer  # pyright: ignore[reportMissingImports]

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
    theirs, ours, batch = TASKS[task](rows, length, config.vocab_size)
    return trainer.with_loss_fn(ours if loss == "ours" else theirs, has_aux=task != "sft"), batch


def main() -> None:
    """Trains, and prints a line of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=tuple(TASKS), default="sft")
    parser.add_argument("--loss", choices=("ours", "tunix"), default="ours")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    without_its_front_page()
    trainer, batch = trainer_of(args.task, args.loss, args.layers, args.rows, args.length)
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
        f"{device.device_kind}, {args.layers} layers, {args.rows} × {args.length}, {args.task}, loss {args.loss}: "
        f"first loss {first:.5f}, {1e3 * seconds:.1f} ms a step, "
        f"{args.rows * args.length / seconds:,.0f} tokens/s, peak {peak:.2f} GiB"
    )


if __name__ == "__main__":
    main()
