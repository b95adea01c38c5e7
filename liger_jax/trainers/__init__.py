"""Training runs: what `liger-jax finetune`, `dpo`, `grpo` and `distill` do, from options to the folder that they leave.

`run` is the way of every run: what it is (`decided_run`), trains on (`training_inputs`), begins with (`initial_state`),
repeats (`run_loop`), resumes (`resume`) and leaves (`finish`, `result`). `task` is what a method implements, in the
order in which a run asks for it: `text`, `scored_answers` (of pairs in `pairs`, of single answers in `kto`), `policy`
with its sampling, and `distillation` with its teacher. `calls` starts runs from Python, and `liger_jax.commands` from
the command line, both through `start`. A run's `options.Settings` are those of five owners and of its method; a
function is given the owner that it reads, and all of them only if it reads several. The room knows options by their
flags, which `arguments` turns into the words of Python, and no parser.
"""

from liger_jax.trainers.arguments import LoRA as LoRA
from liger_jax.trainers.calls import Result as Result
from liger_jax.trainers.calls import distill as distill
from liger_jax.trainers.calls import dpo as dpo
from liger_jax.trainers.calls import finetune as finetune
from liger_jax.trainers.calls import grpo as grpo
