"""`liger-jax finetune`: trains a model on your text or conversations.

liger-jax finetune --model Qwen/Qwen2.5-0.5B --data 'letters/*.txt' --pack --out runs/letters
liger-jax finetune --model ./llama --data chats.jsonl --lora 16 --batch 8 --micro-batches 4
liger-jax finetune --model ./llama --data org/dataset --lora 16 --quantize nf4 --log csv,tensorboard --out runs/dataset
liger-jax finetune --config runs/finetune/settings.toml --learning-rate 1e-4 --out runs/slower

A run writes its options to OUT/settings.toml, which --config reads.

If Ctrl-C, kill or a closed terminal stops a run, it saves its state, and the same command continues it. transformers
loads OUT/model or OUT/adapters.
"""

from liger_jax.commands._training_command import ALTERNATIVES as ALTERNATIVES
from liger_jax.commands._training_command import of_method
from liger_jax.trainers.finetune_options import FinetuneOptions

SUMMARY = "train a model on your text or conversations"
add_arguments, run = of_method(FinetuneOptions, "text.TASK")
