"""What a step of short documents costs by the commands' defaults and with --pack: counted tokens a second.

    python -m benchmarks.padding [--model llama-3.2-1b] [--only texts pairs long few stream prompts] [--steps 60]
        [--layouts default pack] [--folder FOLDER] [--options OPTION=VALUE ...]

Data are made: lengths are log-normal with σ = 0.6, seed 0, cut at 2,048, as 8,000 texts of 172 tokens on average, 2,000
pairs of 510, 1,000 texts of 1,800, and 60 of 33, which fill one row; prompts of 100 have completions of 128. The model
has random weights. Each cell is one run of a trainer on a new folder; tokens a second are those of its log, the median
over the steps from the eleventh on. The model stays in `--folder` for a later call.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks._measure import heading, show_or_save, table
from benchmarks._models import SIZES, family_of
from liger_jax import trainers

_TOKENS = lambda completion_ids, **_: [float(np.mean(ids)) for ids in completion_ids]
_STREAM: dict[str, Any] = dict(stream=True)
_GRPO: dict[str, Any] = dict(rewards=[_TOKENS], group=8, batch=64, prompt_length=192, completion_length=128)
_HELD_OUT: dict[str, Any] = dict(eval_share=0.002)
CASES: dict[str, tuple[Any, int, int, dict[str, Any]]] = {  # trainer, mean, count, options
    "texts": (trainers.finetune, 172, 8000, _HELD_OUT),
    "pairs": (trainers.dpo, 510, 2000, _HELD_OUT),
    "long": (trainers.finetune, 1800, 1000, _HELD_OUT),
    "few": (trainers.finetune, 33, 60, dict(eval_share=0.02)),
    "stream": (trainers.finetune, 172, 8000, _STREAM),
    "prompts": (trainers.grpo, 100, 2000, _GRPO),
}
LAYOUTS: dict[str, dict[str, Any]] = {"default": {}, "pack": dict(pack=True)}
_WORDS, _SIGMA, _LONGEST, _SCORED = 500, 0.6, 2048, 16


def lengths(mean: float, count: int) -> np.ndarray:
    """Log-normal numbers of tokens of this mean before they are cut."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - _SIGMA**2 / 2, _SIGMA, count)
    return np.clip(drawn, 8, _LONGEST - 1).astype(int)  # an end-of-text token follows


def rows_of(case: str) -> list[dict[str, Any]]:
    """The rows of a case, whose words are tokens."""
    rng, (trainer, mean, count, options) = np.random.default_rng(0), CASES[case]
    text = lambda size: " ".join(f"w{word}" for word in rng.integers(0, _WORDS, size))
    sizes = lengths(mean, count).tolist()
    if trainer is trainers.grpo:
        return [{"prompt": text(min(size, options["prompt_length"]))} for size in sizes]
    if trainer is trainers.finetune:
        return [{"text": text(size)} for size in sizes]
    sides = [(text(n // 5), text(n // 2 - n // 5 - 1), text(n - n // 2 - n // 5 - 1)) for n in sizes]
    return [dict(zip(("prompt", "chosen", "rejected"), each, strict=True)) for each in sides]  # a pair has n tokens


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


def speed(folder: Path, case: str, layout: str, steps: int, more: dict[str, Any]) -> float:
    """Counted tokens a second of a run."""
    trainer, _, _, options = CASES[case]
    rows: list[dict[str, Any]] = rows_of(case)
    if "stream" in options:
        options = dict(stream=True, eval_data=rows[:_SCORED])
        rows = rows[_SCORED:]
    asked = dict(steps=steps, every=steps, adapters=trainers.LoRA(16)) | options | LAYOUTS[layout] | more
    with tempfile.TemporaryDirectory() as out:
        each = trainer(folder / "model", rows, out=out, **asked).metrics["tokens_per_second"]
    print(f"RESULT {case}, {layout}: {(found := statistics.median(each[10:])):,.0f} counted tokens/s", flush=True)
    return found


def is_there(case: str, layout: str) -> bool:
    """Whether the trainer has the layout: completions are packed always."""
    return not (layout == "pack" and CASES[case][0] is trainers.grpo)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b", choices=SIZES)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=Path, help="where the model is, or is written and stays")
    parser.add_argument("--save", metavar="NAME", help="write the table to benchmarks/results/NAME.md")
    parser.add_argument("--options", nargs="+", default=[], metavar="OPTION=VALUE", help="of the trainers, in JSON")
    args = parser.parse_args()
    more = {name: json.loads(value) for name, value in (option.split("=", 1) for option in args.options)}
    with tempfile.TemporaryDirectory() as place:
        folder = args.folder or Path(place)
        if not (folder / "model/tokenizer_config.json").is_file():  # the last that is written
            write_model(args.model, folder / "model")
        cells = {
            case: [
                f"{speed(folder, case, layout, args.steps, more):,.0f}" if is_there(case, layout) else "–"
                for layout in args.layouts
            ]
            for case in args.only
        }
    rows = [[f"{CASES[case][0].__name__}, {case}", *cells[case]] for case in args.only]
    command = f"python -m benchmarks.padding --model {args.model} --steps {args.steps}"
    show_or_save(args.save, heading(command) + "\n\n" + table(["counted tokens/s", *args.layouts], rows))
