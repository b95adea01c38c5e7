"""Fine-tunes Qwen2 on text files: `liger-jax finetune` with a model and its own folder.

    python -m examples.finetune_qwen2 --data 'books/*.txt'
    python -m examples.finetune_qwen2 --data 'letters/*.txt' --pack --lora 16  # all options of the command

If it is started again, it continues from its last checkpoint.
"""

import sys
from pathlib import Path

if not __package__:  # started by its path, from any folder: Python must find the packages of the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from examples._lib.command import needed_packages

with needed_packages(__name__):
    from liger_jax import commands

DEFAULTS = ["--model=Qwen/Qwen2-0.5B", "--out=runs/finetune_qwen2"]


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: its options, which replace those of `DEFAULTS`; the command line's if none.

    Returns:
        The exit code.
    """
    return commands.main(["finetune", *DEFAULTS, *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
