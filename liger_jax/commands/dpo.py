"""`liger-jax dpo`: trains a model on pairs of answers, of which one is preferred.

liger-jax dpo --model ./tuned/model --data pairs.jsonl --lora 16
liger-jax dpo --model ./llama --data org/pairs --lora 16 --pack --loss ipo --beta 0.2 --out runs/ipo
liger-jax dpo --model ./llama --data pairs.parquet --loss orpo --learning-rate 5e-6 --out runs/orpo
liger-jax dpo --model ./llama --data answers.jsonl --loss kto --lora 16 --out runs/kto

A row has chosen and rejected, and perhaps prompt: texts or lists of messages. For kto it has completion and label.

All else is as in `liger-jax finetune`: the same command goes on with a run that was stopped, OUT/settings.toml has the
options, and transformers loads OUT/model or OUT/adapters.
"""

from liger_jax.commands._training_command import ALTERNATIVES as ALTERNATIVES
from liger_jax.commands._training_command import of_method
from liger_jax.trainers.dpo_options import PairOptions

SUMMARY = "train a model on pairs of answers, of which one is preferred"
add_arguments, run = of_method(PairOptions, "pairs.of_run")
