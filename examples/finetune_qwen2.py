"""Fine-tunes Qwen2, or another family's model, and leaves a checkpoint that Hugging Face reads.

    python -m examples.finetune_qwen2 --model Qwen/Qwen2-0.5B --data 'books/*.txt'
    python -m examples.finetune_qwen2 --model ./qwen2 --dataset Salesforce/wikitext --subset wikitext-2-raw-v1
    python -m examples.finetune_qwen2 --data 'letters/*.txt' --pack  # whole documents share rows, none sees another

Started again, it goes on from its last checkpoint. The second form needs the package `datasets`.
"""

import argparse
import dataclasses
import importlib
import sys
from pathlib import Path

if not __package__:  # started by its path, from any folder: Python must find the packages of the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from examples._lib.command import UserError, needed_packages, run, user_errors

with needed_packages(__name__):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from tokenizers import Tokenizer
    from tqdm import tqdm

    from examples._lib import text
    from examples._lib.checkpoints import Checkpoints
    from examples._lib.configuration import Training, add_flags, from_flags
    from liger_jax.models import AutoModelForCausalLM
    from liger_jax.models.hugging_face import checkpoint
    from liger_jax.training import Batch, make_step, model_arguments

TOKENIZER = "tokenizer.json"
DEFAULT = Training(batch=8, length=512, steps=100, learning_rate=1e-5, remat="none")


def main(argv: list[str] | None = None) -> None:
    """Runs the program with these arguments, or the command line's."""
    args = _arguments(argv)
    out, training = Path(args.out), from_flags(args, DEFAULT)
    with user_errors():
        folder = checkpoint.find(args.model)
        model = AutoModelForCausalLM.from_pretrained(folder, **training.model_options())
    corpus = _tokens(_documents(args), folder / TOKENIZER, model.config.vocab_size, training.length)
    batch_of = text.batches(corpus, training.batch, training.length, packed=training.pack)

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(training.learning_rate, weight_decay=0.01))
    graph, params = nnx.split(model)
    settings = {name: getattr(args, name) for name in ("model", "data", "dataset", "subset", "column")}
    settings |= dataclasses.asdict(dataclasses.replace(training, steps=0))  # more steps go on
    checkpoints = Checkpoints(out / "checkpoints", settings, fresh=args.fresh)
    start = (params, optimizer.init(params))
    state, log = checkpoints.restore(start) or (start, {"loss": [], "train_mean_token_accuracy": []})
    del model, params, start  # the step overwrites the state in place: nothing else may hold it

    step = make_step(graph, optimizer, loss_and_accuracy, has_aux=True, micro_batches=training.micro_batches)
    train_step = jax.jit(step, donate_argnums=0)
    with tqdm(total=training.steps, initial=len(log["loss"]), unit="step", dynamic_ncols=True) as bar:
        while len(log["loss"]) < training.steps:
            state, (loss, accuracy) = train_step(state, batch_of(len(log["loss"])))
            log["loss"].append(float(loss))
            log["train_mean_token_accuracy"].append(float(accuracy))
            bar.set_postfix({name: f"{values[-1]:.3f}" for name, values in log.items()}, refresh=False)
            bar.update()
            if len(log["loss"]) % args.every == 0:
                checkpoints.save(len(log["loss"]), state, log)
    checkpoints.save(len(log["loss"]), state, log)
    nnx.merge(graph, state[0]).save_pretrained(out / "model", tokenizer_from=folder)
    print(f"{len(log['loss'])} steps; loss {log['loss'][0]:.3f} → {log['loss'][-1]:.3f}; model in {out / 'model'}")


def loss_and_accuracy(
    model: nnx.Module, batch: Batch, normalizer: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The mean loss and the share of tokens that the model predicts, which costs nothing more.

    Args:
        model: a causal language model.
        batch: (B, T) token ids, or the model's arguments.
        normalizer: the denominator of both means; `None` for the batch's own number of scored tokens.

    Returns:
        Two float32 scalars, which add up over micro-batches.
    """
    out = model(**model_arguments(batch), loss_normalizer=normalizer, return_metrics=True)
    share = 1.0 if normalizer is None else out.metrics.num_tokens / normalizer
    return out.loss, jnp.asarray(share * out.metrics.accuracy)


def _arguments(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen2-0.5B", help="a folder, or an id (default: %(default)s)")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", help="a UTF-8 text file, or a quoted glob")
    source.add_argument("--dataset", help="a dataset that `datasets` loads")
    parser.add_argument("--subset", help="of the dataset")
    parser.add_argument("--column", default="text", help="of the dataset (default: %(default)s)")
    add_flags(parser)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--out", default="runs/finetune_qwen2", help="folder for checkpoints and the model")
    parser.add_argument("--fresh", action="store_true", help="start over, whatever checkpoint there is")
    return parser.parse_args(argv)


def _documents(args) -> list[str]:
    if args.dataset:
        try:
            datasets = importlib.import_module("datasets")
        except ModuleNotFoundError as error:
            raise UserError("--dataset needs the package datasets: pip install datasets.") from error
        rows = datasets.load_dataset(args.dataset, args.subset, split="train")
        return [row for row in rows[args.column] if row]
    return text.read(args.data)


def _tokens(documents, tokenizer, vocab_size, length) -> text.Text:
    encoded = Tokenizer.from_file(str(tokenizer)).encode_batch_fast(documents)
    tokens = np.array([token for document in encoded for token in document.ids], np.int32)
    ends = np.cumsum([len(document.ids) for document in encoded])
    if len(tokens) < length:
        raise UserError(f"The text has {len(tokens)} tokens; --length={length} of them are the least.")
    return text.Text(tokens, ends, tokens[:0], vocab_size, "")


if __name__ == "__main__":
    sys.exit(run(main))
