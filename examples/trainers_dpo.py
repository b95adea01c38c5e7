"""`trainers.dpo` from rows of pairs to a model that prefers: a tiny LLaMA learns to count up rather than down.

    python -m examples.trainers_dpo

It writes a checkpoint that has learnt to count both ways, and trains it on pairs of answers. In its folder (--out) it
leaves the run, and dpo.png: the margin between the rewards of chosen and rejected answers.
"""

import sys
from pathlib import Path

if not __package__:  # started by its path, from any folder: Python must find the packages of the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from examples._lib.command import needed_packages, run, steps_and_folder

with needed_packages(__name__):
    import numpy as np

    from examples import dpo
    from examples._lib import numbers, report, tiny
    from liger_jax import trainers

END = dpo.VOCAB  # the token that ends a text; those before it are numbers


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    """Runs the program.

    Args:
        argv: its arguments; the command line's if none.

    Returns:
        The mean reward margin of each step's pairs, and of the pairs held out at each evaluation.
    """
    steps, out = steps_and_folder(argv, 40, "runs/trainers_dpo")
    result = trainers.dpo(
        write_model(out / "base"),
        pairs(),
        out=out / "run",
        fresh=True,
        steps=steps,
        every=10,
        pack=True,
        length=64,
        batch=8,
        learning_rate=1e-3,
        weight_decay=0,
        eval_share=0.125,
    )
    margins, scored = result.metrics["rewards/margins"], result.metrics["eval_rewards/margins"]
    at = np.flatnonzero(~np.isnan(scored))  # the steps after which the pairs held out were scored
    print(f"reward margin of pairs held out after step {at[-1] + 1}: {scored[at[-1]]:.3f}")
    log = {"trained": margins.tolist(), "held out": scored[at].tolist()}
    lines = {
        "trained pairs": (range(1, len(margins) + 1), log["trained"]),
        "pairs held out": ((at + 1).tolist(), log["held out"]),
    }
    report.curves({"reward margin": lines}, "trainers.dpo: chosen answers gain on rejected ones", out / "dpo.png")
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


def pairs() -> list[dict[str, str]]:
    """Makes the rows: a prompt, which is a number, and two answers, of which the chosen one counts upwards.

    Returns:
        A dict for each pair.
    """
    rows = []
    for way_up, way_down in dpo.make_pairs()[0].tolist():
        chosen, rejected = (" " + " ".join(map(str, numbers[1:])) for numbers in (way_up, way_down))
        rows.append({"prompt": str(way_up[0]), "chosen": chosen, "rejected": rejected})
    return rows


if __name__ == "__main__":
    sys.exit(run(main))
