"""Fine-tunes Qwen2, or another family's model, and leaves a checkpoint that Hugging Face reads.

    python -m examples.finetune_qwen2 --model Qwen/Qwen2-0.5B --data 'books/*.txt'
    python -m examples.finetune_qwen2 --model ./qwen2 --dataset Salesforce/wikitext --subset wikitext-2-raw-v1

Started again, it goes on from its last checkpoint. The second form needs the package `datasets`.
"""

import argparse
import glob
import importlib
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer
from tqdm import tqdm

from examples.checkpoints import Checkpoints
from examples.text import Text
from examples.train_step import loss_and_accuracy, make_train_step
from liger_jax.models import AutoModelForCausalLM, checkpoint

TOKENIZER = "tokenizer.json"


def main(argv: list[str] | None = None) -> None:
    """Runs the program with these arguments, or the command line's."""
    args = _arguments(argv)
    folder, out = checkpoint.find(args.model), Path(args.out)
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder, param_dtype=dtype, remat=args.remat)
    corpus = _tokens(_documents(args), folder / TOKENIZER, model.config.vocab_size, args.length)

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(args.learning_rate, weight_decay=0.01))
    graph, params = nnx.split(model)
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "fresh", "steps", "every")}
    checkpoints = Checkpoints(out / "checkpoints", settings, fresh=args.fresh)
    start = (params, optimizer.init(params))
    state, log = checkpoints.restore(start) or (start, {"loss": [], "train_mean_token_accuracy": []})
    del model, params, start  # the step overwrites the state in place: nothing else may hold it

    train_step = make_train_step(graph, optimizer, loss_and_accuracy, has_aux=True)
    with tqdm(total=args.steps, initial=len(log["loss"]), unit="step", dynamic_ncols=True) as bar:
        while len(log["loss"]) < args.steps:
            batch = corpus.batch(len(log["loss"]), args.batch, args.length)
            state, (loss, accuracy) = train_step(state, batch)
            log["loss"].append(float(loss))
            log["train_mean_token_accuracy"].append(float(accuracy))
            bar.set_postfix({name: f"{values[-1]:.3f}" for name, values in log.items()}, refresh=False)
            bar.update()
            if len(log["loss"]) % args.every == 0:
                checkpoints.save(len(log["loss"]), state, log)
    checkpoints.save(len(log["loss"]), state, log)
    nnx.merge(graph, state[0]).save_pretrained(out / "model")
    shutil.copy(folder / TOKENIZER, out / "model")
    print(f"{len(log['loss'])} steps; loss {log['loss'][0]:.3f} → {log['loss'][-1]:.3f}; model in {out / 'model'}")


def _arguments(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen2-0.5B", help="a folder, or an id (default: %(default)s)")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", help="a UTF-8 text file, or a quoted glob")
    source.add_argument("--dataset", help="a dataset that `datasets` loads")
    parser.add_argument("--subset", help="of the dataset")
    parser.add_argument("--column", default="text", help="of the dataset (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step")
    parser.add_argument("--length", type=int, default=512, help="tokens in a sequence")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--remat", default="none", help="what layers keep: none, full, dots or offload")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--out", default="runs/finetune_qwen2", help="folder for checkpoints and the model")
    parser.add_argument("--fresh", action="store_true", help="start over, whatever checkpoint there is")
    return parser.parse_args(argv)


def _documents(args) -> list[str]:
    if args.dataset:
        rows = importlib.import_module("datasets").load_dataset(args.dataset, args.subset, split="train")
        return [text for text in rows[args.column] if text]
    return [Path(path).read_text(encoding="utf-8") for path in sorted(glob.glob(args.data, recursive=True))]


def _tokens(documents, tokenizer, vocab_size, length) -> Text:
    encoded = Tokenizer.from_file(str(tokenizer)).encode_batch_fast(documents)
    tokens = np.array([token for document in encoded for token in document.ids], np.int32)
    if len(tokens) < length:
        raise ValueError(f"The text has {len(tokens)} tokens; --length={length} of them are the least.")
    return Text(tokens, tokens[:0], vocab_size, "")


if __name__ == "__main__":
    main()
