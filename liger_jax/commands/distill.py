"""`liger-jax distill`: trains a model to match the probabilities of a larger one.

liger-jax distill --model Qwen/Qwen2.5-0.5B --teacher Qwen/Qwen2.5-7B --data 'letters/*.txt' --pack --out runs/letters
liger-jax distill --model ./small --teacher ./large --teacher-quantize nf4 --data chats.jsonl --divergence reverse_kl
liger-jax distill --model ./small --teacher ./large --data chats.jsonl --top-k 64 --lora 16 --out runs/top-k

Teacher and student have the same vocabulary. With --top-k the teacher scores the data once, before the first step, and
its most likely tokens are stored in OUT; else it runs beside the student in each step.

All else is as in `liger-jax finetune`: the same command goes on with a run that was stopped, OUT/settings.toml has the
options, and transformers loads OUT/model or OUT/adapters.
"""

from liger_jax.commands._training_command import ALTERNATIVES as ALTERNATIVES
from liger_jax.commands._training_command import of_method
from liger_jax.trainers.distill_options import DistillOptions

SUMMARY = "train a model to match the probabilities of a larger one"
add_arguments, run = of_method(DistillOptions, "distillation.of_run")
