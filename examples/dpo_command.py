"""`liger-jax dpo` from a file of pairs to a model that prefers: a tiny LLaMA learns to count up rather than down.

    python -m examples.dpo_command

It writes a checkpoint that has learnt to count both ways, and pairs of answers, and runs the command on them. In its
folder (--out) it leaves dpo.png: the margin between the rewards of chosen and rejected answers, from the command's log.
"""

import csv
import json
import sys
from pathlib import Path

if not __package__:  # started by its path, from any folder: Python must find the packages of the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from examples._lib.command import needed_packages, run, steps_and_folder

with needed_packages(__name__):
    from examples import dpo
    from examples._lib import numbers, report, tiny
    from liger_jax import commands
    from liger_jax.user_errors import UserError

END = dpo.VOCAB  # the token that ends a text; those before it are numbers
OPTIONS = "--pack --length 64 --batch 8 --learning-rate 1e-3 --weight-decay 0 --eval-share 0.125 --every 10 --fresh"


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    """Runs the program.

    Args:
        argv: its arguments; the command line's if none.

    Returns:
        The mean reward margin of each step's pairs, and of the pairs held out at each evaluation.

    Raises:
        UserError: the command has refused the run.
    """
    steps, out = steps_and_folder(argv, 40, "runs/dpo_command")
    model, data = write_model(out / "base"), write_pairs(out / "pairs.jsonl")
    folders = [f"--model={model}", f"--data={data}", f"--out={out / 'run'}", f"--steps={steps}"]
    print("liger-jax dpo", *folders, OPTIONS, flush=True)
    if commands.main(["dpo", *folders, *OPTIONS.split()]):
        raise UserError("liger-jax dpo has not come to its end.")

    with (out / "run" / "log.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    name, scored = "rewards/margins", [row for row in table if row["eval_loss"]]
    log = {"trained": [float(row[name]) for row in table], "held out": [float(row[f"eval_{name}"]) for row in scored]}
    print(f"reward margin of pairs held out after step {scored[-1]['step']}: {log['held out'][-1]:.3f}")
    lines = {
        "trained pairs": ([int(row["step"]) for row in table], log["trained"]),
        "pairs held out": ([int(row["step"]) for row in scored], log["held out"]),
    }
    report.curves({"reward margin": lines}, "liger-jax dpo: chosen answers gain on rejected ones", out / "dpo.png")
    print(f"picture: {out / 'dpo.png'}")
    return log


def write_model(folder: Path) -> Path:
    """Writes a checkpoint that counts both ways, with a tokenizer whose tokens are the numbers.

    Args:
        folder: where it goes.

    Returns:
        The folder.
    """
    graph, params = tiny.llama(dpo.VOCAB + 1)
    params = tiny.pretrain(graph, params, dpo.both_ways, dpo.PRETRAINING_STEPS, "counting both ways")
    return numbers.write_checkpoint(folder, graph, params, END)


def write_pairs(path: Path) -> Path:
    """Writes JSON lines of a prompt, a number, and two answers, of which the chosen one counts upwards.

    Args:
        path: the file.

    Returns:
        The file.
    """
    lines = []
    for way_up, way_down in dpo.make_pairs()[0].tolist():
        chosen, rejected = (" " + " ".join(map(str, numbers[1:])) for numbers in (way_up, way_down))
        lines.append(json.dumps({"prompt": str(way_up[0]), "chosen": chosen, "rejected": rejected}))
    path.write_text("\n".join(lines))
    return path


if __name__ == "__main__":
    sys.exit(run(main))
