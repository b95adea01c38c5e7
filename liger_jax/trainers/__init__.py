"""Training runs: what `liger-jax finetune`, `dpo`, `grpo` and `distill` do, from options to the folder that they leave.

`run` has the stages of every run: settings (`decided_run`), rows (`training_inputs`), first state (`initial_state`),
loop (`run_loop`), resuming (`resume`) and result (`finish`, `result`). `task` is what a method implements, in the
order in which a run calls it: `text`, `scored_answers` (of pairs in `pairs`, of single answers in `kto`), `policy`
with its sampling, and `distillation` with its teacher. `calls` starts runs from Python, and `liger_jax.commands` from
the command line, both through `start`. A run's `options.Settings` hold five groups of options and its method's; a
function is given the group that it reads, and all of them only if it reads several. This package knows options by their
flags, which `arguments` translates from the arguments of a call; it has no parser.
"""

from liger_jax.trainers.arguments import LoRA as LoRA
from liger_jax.trainers.calls import Result as Result
from liger_jax.trainers.calls import distill as distill
from liger_jax.trainers.calls import dpo as dpo
from liger_jax.trainers.calls import finetune as finetune
from liger_jax.trainers.calls import grpo as grpo
