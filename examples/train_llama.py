"""Trains a small LLaMA on real text, on a CPU in minutes, or on whatever accelerator JAX finds.

    python -m examples.train_llama                              # the text that comes with Python
    python -m examples.train_llama --data 'books/*.txt'         # one's own
    python -m examples.train_llama --size 100m --steps 100      # for a GPU or TPU
    python -m examples.train_llama --pack                       # whole documents share rows, and none sees another
    python -m examples.train_llama --no-rms-norm --loss logits  # without this kernel, and on logits
    python -m examples.train_llama --kernels off                # all in plain jnp
    python -m examples.train_llama --mesh fsdp=2,tensor=2       # one model over four devices

If Ctrl-C or kill stops it, it saves its state, and the same command continues the run. In its folder (--out) it leaves
loss.png, memory.png, its checkpoints and the text's tokens. `python PATH/examples/train_llama.py` is the same from any
folder. Compiled programs are kept for the next start in the user's folder for caches, unless --no-cache is passed.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:  # started by its path, from any folder: Python must find the packages of the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from examples._lib.command import needed_packages, run

with needed_packages(__name__):
    import jax
    import numpy as np
    import optax
    import tqdm  # noqa: F401  (the loop's progress bar)
    from flax import nnx

    from examples._lib import memory, report, text
    from examples._lib.configuration import Training, add_flags, from_flags, with_loss
    from liger_jax.models import LlamaConfig, LlamaForCausalLM
    from liger_jax.planner.compilers import memory_of
    from liger_jax.trainers.errors import training_errors, writable_folder
    from liger_jax.training import Checkpoints, Loop, language_model_loss, make_step, meshes, optimizer_named
    from liger_jax.training.waiting import Compiling, telling
    from liger_jax.user_errors import user_errors


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and how it is trained.

    Attributes:
        model: fields of `LlamaConfig`, without the vocabulary's size.
        vocab: entries of the vocabulary to train.
        training: all that does not depend on the model.
        characters: as many of the text that comes with Python are read; `None` for all.
    """

    model: dict[str, int]
    vocab: int
    training: Training
    characters: int | None = None


HELD_OUT_TOKENS = 65_536  # scored at the start and at the end
SECONDS_BETWEEN_CHECKPOINTS = 30
SIZES = {
    "tiny": Size(  # for tests
        dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1),
        vocab=1024, training=Training(batch=2, length=64, steps=8, learning_rate=1e-2),
        characters=1_000_000,
    ),
    "small": Size(  # 2 million parameters: minutes on two CPU cores
        dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2),
        vocab=8192, training=Training(batch=4, length=512, steps=300, learning_rate=3e-3),
    ),
    "100m": Size(  # 100 million parameters: minutes on a datacentre GPU
        dict(
            hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4
        ),
        vocab=32000, training=Training(batch=16, length=2048, steps=200, learning_rate=6e-4),
    ),
}  # fmt: skip


@training_errors()
def main(argv: list[str] | None = None) -> None:
    """Runs the program.

    Args:
        argv: its arguments; the command line's if none.

    Raises:
        UserError: a flag, a file or a folder cannot be used, or the loss is no longer finite.
    """
    args = _arguments(argv)
    size = SIZES[args.size]
    training = from_flags(args, size.training)
    out = Path(args.out or f"runs/llama-{args.size}")
    writable_folder(out)
    with telling("reading the text, and tokenising it the first time"):
        corpus = text.load(args.data, size.vocab, out, size.characters)
    print(f"text: {corpus.source}, vocabulary {corpus.vocab_size:,}")

    model = lambda training: make_model(size.model, corpus.vocab_size, training)
    optimizer = make_optimizer(training)
    with user_errors():
        devices = _devices(args.mesh, model, training)
    settings = dataclasses.asdict(training) | {"model": size.model, "vocab": size.vocab, "data": corpus.source}
    with devices.context():
        is_done = _train(_on(devices, training), corpus, model, optimizer, devices, settings, out, args.fresh)
    if is_done and not args.no_memory:
        losses = lambda loss: model(dataclasses.replace(training, kernels=with_loss(training.kernels, loss)))
        _report_memory(losses, optimizer, training, corpus.vocab_size, out / "memory.png")


def _devices(mesh: str | None, model: Callable[[Training], Any], training: Training) -> meshes.Devices:
    """The devices that --mesh names; without it, the first one."""
    if mesh is None:
        return meshes.Devices()
    of_layout = lambda layout: nnx.eval_shape(lambda: model(_on(meshes.Devices(layout=layout), training)))
    return meshes.chosen(mesh, jax.devices(), training.batch // training.micro_batches, of_layout)


def _on(devices: meshes.Devices, training: Training) -> Training:
    """The training of a model that is split over these devices."""
    return dataclasses.replace(training, kernels=dataclasses.replace(training.kernels, layout=devices.layout))


def _train(training, corpus, model, optimizer, devices, settings, out, fresh) -> bool:
    """Trains, prints and draws; whether it came to its end."""
    with user_errors():
        graph, params = nnx.split(model(training))
    device = jax.devices()[0]
    millions = sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6
    print(f"model: LLaMA, {millions:.1f} million parameters, on {device.device_kind}")
    print(f"training: {training}", *filter(None, [devices.line]), sep="\n")

    rows_of = text.batches(corpus, training.batch, training.length, packed=training.pack)
    held_out = corpus.held_out_batches(
        training.batch, training.length, most=max(1, HELD_OUT_TOKENS // training.batch // training.length)
    )
    batch_of = lambda step: devices.place(rows_of(step))
    start, compiling = devices.started(params, optimizer), Compiling()
    train_step = devices.jitted(make_step(graph, optimizer, micro_batches=training.micro_batches), start, optimizer)
    scored = [devices.place(tokens) for tokens in held_out]
    evaluate = jax.jit(lambda params, tokens: language_model_loss(nnx.merge(graph, params), tokens))
    with user_errors(), telling("tracing"):  # which tells whether kernels can run as the flags say
        programs = compiling.start(train_step, start, batch_of(0)), compiling.start(evaluate, start[0], scored[0])
    mean_loss = lambda params: float(np.mean([evaluate(params, tokens) for tokens in scored]))
    checkpoints = Checkpoints(out / "checkpoints", settings, fresh=fresh)
    if (restored := checkpoints.restore(start)) is not None:
        print(f"resumed at step {checkpoints.latest_step}")
    with telling("compiling"):
        train_step, evaluate = (program.result() for program in programs)
    state, log = restored or (start, {"steps": [], "held_out_start": mean_loss(start[0])})

    loop = Loop(
        step=train_step,
        batch_of=batch_of,
        steps=training.steps,
        checkpoints=checkpoints,
        seconds=SECONDS_BETWEEN_CHECKPOINTS,
        check=lambda params, step: float(evaluate(params, scored[0])),
    )
    done = len(log["steps"])
    state, stopped_by = loop.run(state, log)
    if stopped_by:
        print(f"stopped after step {len(log['steps'])} of {training.steps}; the same command goes on from there")
        return False
    rates = [step["tokens_per_second"] for step in log["steps"][done:]]
    _print_speed(train_step, rates, device)
    scores = {
        "start": log["held_out_start"],
        "unigram model": text.unigram_loss(corpus, held_out),
        "end": mean_loss(state[0]),
    }
    print("held-out loss: " + ", ".join(f"{name} {score:.3f}" for name, score in scores.items()))
    report.loss_curve([step["loss"] for step in log["steps"]], scores, out / "loss.png")
    return True


def _arguments(argv):
    parser = argparse.ArgumentParser(description="Trains a small LLaMA on real text.")
    parser.add_argument("--data", help="a UTF-8 text file, or a quoted glob; default: the text that comes with Python")
    parser.add_argument("--size", choices=SIZES, default="small", help="model and training (default: %(default)s)")
    parser.add_argument("--out", help="folder for pictures and checkpoints (default: runs/llama-SIZE)")
    parser.add_argument("--fresh", action="store_true", help="start over, whatever checkpoint there is")
    parser.add_argument("--no-memory", action="store_true", help="leave the memory table out")
    parser.add_argument("--mesh", help="several devices, such as fsdp=2,tensor=2 (default: the first one alone)")
    add_flags(parser)
    return parser.parse_args(argv)


def make_model(model: dict[str, int], vocab_size: int, training: Training) -> LlamaForCausalLM:
    """A random model.

    Args:
        model: fields of `LlamaConfig`, as a `Size` has them.
        vocab_size: entries of the vocabulary.
        training: says which ops run as kernels, and in which dtypes.

    Returns:
        The model.
    """
    config = LlamaConfig(
        vocab_size=vocab_size, tie_word_embeddings=True, max_position_embeddings=training.length, **model
    )
    return LlamaForCausalLM(config, **training.model_options(), rngs=nnx.Rngs(0))


def make_optimizer(training: Training) -> optax.GradientTransformation:
    """AdamW, or the one with moments in 8 bits, with warm-up, cosine decay and clipped gradients.

    Parameters in bfloat16 are rounded stochastically.

    Args:
        training: says how many steps, and the rate.

    Returns:
        The transformation.
    """
    steps, peak = training.steps, training.learning_rate
    warm_up = max(1, steps // 10)
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, warm_up, max(steps, warm_up + 1), peak / 10)
    return optimizer_named(training.optimizer, rate, b2=0.95)


def _print_speed(train_step, rates, device):
    warm = rates[min(3, len(rates) - 1) :]
    if not warm:
        return
    print(f"speed: {statistics.median(warm):,.0f} tokens/s, median of {len(warm)} warm steps")
    peaks = [f"{memory_of(train_step).total / 2**20:,.0f} MiB by the compiler"]
    if allocator := device.memory_stats():
        peaks.append(f"{allocator['peak_bytes_in_use'] / 2**20:,.0f} MiB by the allocator")
    print(f"peak memory of the training step: {', '.join(peaks)}")


def _report_memory(make_model, optimizer, training, vocab_size, path):
    title = f"sequences of {training.length}, vocabulary {vocab_size:,}, remat {training.remat}"
    with telling("compiling the training step for batches of 1, 2, 4, 8, with and without the fused loss"):
        rows = memory.measure(make_model, optimizer, training.length)
    print(f"memory of a training step: {title}\n{memory.table(rows)}\n{report.MEMORY_CAPTION}")
    report.memory_picture(rows, title, path)


if __name__ == "__main__":
    sys.exit(run(main))
