"""`liger-jax distill` from a teacher to its student: a tiny LLaMA learns the probabilities of a larger one.

    python -m examples.distill_command

It writes a teacher that has seen much of a random Markov chain, a student with random weights, and a file with little
text, and runs the command twice: with the teacher's 16 likeliest tokens, stored once, and with all probabilities. In
its folder (--out) it leaves distill_command.png: the student's divergence from its teacher on text that is held out.
"""

import csv
import json
import sys
from pathlib import Path

if not __package__:  # started by its path, from any folder: Python must find the packages of the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from examples._lib.command import needed_packages, run, steps_and_folder

with needed_packages(__name__):
    from examples import distill
    from examples._lib import numbers, report, tiny
    from liger_jax import commands
    from liger_jax.user_errors import UserError

END = distill.VOCAB  # the token that ends a text; those before it are numbers
SEQUENCES = 80
OPTIONS = "--pack --length 65 --batch 16 --learning-rate 3e-3 --weight-decay 0 --eval-share 0.2 --every 10 --fresh"
WAYS = {"16 stored tokens": ["--top-k=16"], "all probabilities": []}


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    """Runs the program.

    Args:
        argv: its arguments; the command line's if none.

    Returns:
        The student's divergence on held-out text at each evaluation, by what it learns from.

    Raises:
        UserError: the command has refused a run.
    """
    steps, out = steps_and_folder(argv, 60, "runs/distill_command")
    models, data = write_models(out), write_text(out / "text.jsonl")
    log, lines = {}, {}
    for way, options in WAYS.items():
        folder = out / way.replace(" ", "_")
        asked = [*models, f"--data={data}", f"--out={folder}", f"--steps={steps}", *options]
        print("liger-jax distill", *asked, OPTIONS, flush=True)
        if commands.main(["distill", *asked, *OPTIONS.split()]):
            raise UserError("liger-jax distill has not come to its end.")
        with (folder / "log.csv").open(newline="") as file:
            scored = [row for row in csv.DictReader(file) if row["eval_loss"]]
        log[way] = [float(row["eval_divergence"]) for row in scored]
        lines[way] = [int(row["step"]) for row in scored], log[way]
        print(f"{way}: held-out divergence {log[way][0]:.3f} → {log[way][-1]:.3f}")
    picture = out / "distill_command.png"
    report.curves({"divergence, nats a token": lines}, "liger-jax distill: a student nears its teacher", picture)
    print(f"picture: {picture}")
    return log


def write_models(folder: Path) -> list[str]:
    """Writes the student and its teacher.

    Args:
        folder: where they go.

    Returns:
        The command's options that name them.
    """
    graph, params = tiny.llama(END + 1, hidden_size=128)
    text = lambda step: distill.markov_text(step, distill.BATCH)
    params = tiny.pretrain(graph, params, text, distill.PRETRAINING_STEPS, "teacher")
    teacher = numbers.write_checkpoint(folder / "teacher", graph, params, END)
    student = tiny.llama(END + 1, hidden_size=64, num_hidden_layers=1, seed=1)
    return [f"--model={numbers.write_checkpoint(folder / 'student', *student, END)}", f"--teacher={teacher}"]


def write_text(path: Path) -> Path:
    """Writes JSON lines of sequences that the teacher has not seen.

    Args:
        path: the file.

    Returns:
        The file.
    """
    sequences = distill.markov_text(-1, SEQUENCES).tolist()
    path.write_text("\n".join(json.dumps({"text": " ".join(map(str, each))}) for each in sequences))
    return path


if __name__ == "__main__":
    sys.exit(run(main))
