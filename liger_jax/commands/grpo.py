"""`liger-jax grpo`: trains a model by rewarding its completions.

liger-jax grpo --model Qwen/Qwen2.5-0.5B-Instruct --data prompts.jsonl --reward rewards:right --lora 16
liger-jax grpo --model ./llama --data prompts.jsonl --reward rewards:right rewards:short=0.2 --out runs/short
liger-jax grpo --config runs/grpo/settings.toml --beta 0.02 --out runs/near

Each line of the data has a `prompt`, a text or messages. A reward is a function in a module of the current folder,
or in an installed one, with TRL's signature: it takes `completions`, `prompts` and the lines' fields by name,
each a list over the whole batch, and returns a number for each completion.
"""

from liger_jax.commands._training_command import ALTERNATIVES as ALTERNATIVES
from liger_jax.commands._training_command import of_method
from liger_jax.trainers.grpo_options import GrpoOptions

SUMS = {"length": ("prompt_length", "completion_length")}
SUMMARY = "train a model by rewarding its completions"
add_arguments, run = of_method(GrpoOptions, "policy.TASK")
