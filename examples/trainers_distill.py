"""`trainers.distill` from a teacher to its student: a tiny LLaMA learns the probabilities of a larger one.

    python -m examples.trainers_distill

It makes a teacher that has seen much of a random Markov chain, a student with random weights, and little text, and
trains the student twice: with the teacher's 16 likeliest tokens, stored once, and with all probabilities. In its
folder (--out) it leaves distill.png: the student's divergence from its teacher on text that is held out.
"""

import sys
from pathlib import Path

if not __package__:  # started by its path, from any folder: Python must find the packages of the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from examples._lib.command import needed_packages, run, steps_and_folder

with needed_packages(__name__):
    import numpy as np

    from examples import distill
    from examples._lib import numbers, report, tiny
    from liger_jax import trainers

END = distill.VOCAB  # the token that ends a text; those before it are numbers
SEQUENCES = 80
WAYS = {"16 stored tokens": 16, "all probabilities": None}


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    """Runs the program.

    Args:
        argv: its arguments; the command line's if none.

    Returns:
        The student's divergence on held-out text at each evaluation, by what it learns from.
    """
    steps, out = steps_and_folder(argv, 60, "runs/trainers_distill")
    student, teacher = write_models(out)
    rows = [{"text": " ".join(map(str, each))} for each in distill.markov_text(-1, SEQUENCES).tolist()]
    log, lines = {}, {}
    for way, top_k in WAYS.items():
        result = trainers.distill(
            student,
            rows,
            teacher=teacher,
            top_k=top_k,
            steps=steps,
            every=10,
            pack=True,
            length=65,
            batch=16,
            learning_rate=3e-3,
            weight_decay=0,
            eval_share=0.2,
        )
        scored = result.metrics["eval_divergence"]
        at = np.flatnonzero(~np.isnan(scored))  # the steps after which the text held out was scored
        log[way] = scored[at].tolist()
        lines[way] = (at + 1).tolist(), log[way]
        print(f"{way}: held-out divergence {log[way][0]:.3f} → {log[way][-1]:.3f}")
    title = "trainers.distill: a student nears its teacher"
    report.curves({"divergence, nats a token": lines}, title, out / "distill.png")
    return log


def write_models(folder: Path) -> tuple[Path, Path]:
    """Writes the student and its teacher.

    Args:
        folder: where they go.

    Returns:
        Both folders.
    """
    graph, params = tiny.llama(END + 1, hidden_size=128)
    text = lambda step: distill.markov_text(step, distill.BATCH)
    params = tiny.pretrain(graph, params, text, distill.PRETRAINING_STEPS, "teacher")
    teacher = numbers.write_checkpoint(folder / "teacher", graph, params, END)
    student = tiny.llama(END + 1, hidden_size=64, num_hidden_layers=1, seed=1)
    return numbers.write_checkpoint(folder / "student", *student, END), teacher


if __name__ == "__main__":
    sys.exit(run(main))
