"""What a step of short documents costs by the commands' defaults and with --pack: counted tokens a second.

    python -m benchmarks.padding [--model llama-3.2-1b] [--only texts pairs long] [--steps 60] [--layouts default pack]

Data are made: lengths are log-normal with σ = 0.6, seed 0, cut at 2,048, as 8,000 texts of 172 tokens on average, 2,000
pairs of 510, and 1,000 texts of 1,800. The model has random weights. Each cell is one run of a command on a new folder;
tokens a second are those of its log, the median over the steps from the eleventh on.
"""

import argparse
import csv
import json
import statistics
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks._measure import heading, show_or_save, table
from benchmarks._models import SIZES, family_of
from liger_jax.commands import main

DATA = {"texts": ("finetune", 172, 8000), "pairs": ("dpo", 510, 2000), "long": ("finetune", 1800, 1000)}
LAYOUTS = {"default": [], "pack": ["--pack"]}
_WORDS, _SIGMA, _LONGEST = 1000, 0.6, 2048


def lengths(mean: float, count: int) -> np.ndarray:
    """Log-normal numbers of tokens of this mean before they are cut."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - _SIGMA**2 / 2, _SIGMA, count)
    return np.clip(drawn, 8, _LONGEST - 1).astype(int)  # an end-of-text token follows


def write_data(folder: Path) -> None:
    """Writes the files of data, whose words are tokens."""
    rng = np.random.default_rng(0)
    text = lambda size: " ".join(f"w{word}" for word in rng.integers(0, _WORDS, size))
    for name, (command, mean, count) in DATA.items():
        sizes = lengths(mean, count).tolist()
        lines = [{"text": text(size)} for size in sizes]
        if command == "dpo":  # both answers after a prompt of a fifth of the pair
            sides = [(text(n // 5), text(n // 2 - n // 5 - 1), text(n - n // 2 - n // 5 - 1)) for n in sizes]
            lines = [dict(zip(("prompt", "chosen", "rejected"), each, strict=True)) for each in sides]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))


def write_model(name: str, folder: Path) -> None:
    """Writes a model of this shape with random weights in bfloat16, and a tokenizer of words."""
    config = SIZES[name]
    model = family_of(config)(config, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    model.save_pretrained(folder, config_fields={"eos_token_id": _WORDS})
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(_WORDS)} | {"<end>": _WORDS}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["<end>"])
    words.save(str(folder / "tokenizer.json"))
    fields = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token="<end>", pad_token="<end>")
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def speed(folder: Path, data: str, layout: str, steps: int, more: list[str]) -> float:
    """Counted tokens a second of a run."""
    with tempfile.TemporaryDirectory() as out:
        asked = [DATA[data][0], f"--model={folder / 'model'}", f"--data={folder / data}.jsonl", f"--out={out}"]
        asked += ["--lora=16", f"--steps={steps}", f"--every={steps}", "--eval-share=0.002", *LAYOUTS[layout], *more]
        if main(asked):
            raise SystemExit(f"{asked} failed")
        with (Path(out) / "log.csv").open(newline="") as file:
            each = [float(row["tokens_per_second"]) for row in csv.DictReader(file)]
        print(f"{data}, {layout}: {(found := statistics.median(each[10:])):,.0f} counted tokens/s", flush=True)
        return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b", choices=SIZES)
    parser.add_argument("--only", nargs="+", default=list(DATA), choices=DATA)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save", metavar="NAME", help="write the table to benchmarks/results/NAME.md")
    args, others = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as place:
        write_model(args.model, Path(place) / "model")
        write_data(Path(place))
        cells = {
            name: [speed(Path(place), name, layout, args.steps, others) for layout in args.layouts]
            for name in args.only
        }
    rows = [[f"{DATA[name][0]}, {name}", *(f"{each:,.0f}" for each in cells[name])] for name in args.only]
    command = f"python -m benchmarks.padding --model {args.model} --steps {args.steps}"
    show_or_save(args.save, heading(command) + "\n\n" + table(["counted tokens/s", *args.layouts], rows))
