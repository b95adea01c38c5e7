"""The options of `liger-jax grpo`, beside those of every training run."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.losses import policy_loss
from liger_jax.models.hugging_face.checkpoint import ADAPTERS
from liger_jax.trainers.options import LEAST_FLOAT, MOST_FLOAT, Settings
from liger_jax.user_errors import UserError

LOSS_TYPES = ("dapo", "bnpo", "grpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo", "gmpo")
LEVELS = ("token", "sequence")
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
REWARD_CALL = "reward_call"  # names in a checkpoint how its run has called rewards
ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce", "reinforce_baseline")
_MOST_SECONDS = 1e7  # which every system's timers take


@dataclasses.dataclass(frozen=True)
class GrpoSettings(Settings):
    """A run that trains a policy by rewards. A row of its batch is a completion.

    `samples`: how many of each step's completions are written to OUT/completions.jsonl.
    """

    reward: Sequence[str] = ()  # reward functions, each "module:function", perhaps with a weight: "rewards:right=0.5"
    reward_timeout: float = 1800.0  # seconds that one call of a reward function may take
    group: int = 8  # completions of a prompt, at least 2
    prompt_length: int = 512  # the most tokens of a prompt
    completion_length: int = 256  # the most tokens of a completion
    temperature: float = 1.0  # of sampling, and of the policy's log-probabilities
    top_p: float = 1.0  # the share of the likeliest tokens' probability that is drawn from
    top_k: int | None = None  # how many of the likeliest tokens are drawn from; `None` for all
    loss_type: str = "dapo"  # a type of `losses.policy_loss`
    importance_level: str = "token"  # "token" or "sequence", as in `losses.policy_loss`
    advantages: str = "grpo"  # how rewards become advantages, a name of `ADVANTAGES`
    epsilon_low: float | None = None  # as in `losses.policy_loss`
    epsilon_high: float | None = None  # as in `losses.policy_loss`
    delta: float | None = None  # as in `losses.policy_loss`
    beta: float = 0.0  # weight of the penalty for the distance from the reference, the model with its adapters off
    # How losses are corrected for a sampler that rounds otherwise than the policy, a `mode` of
    # `losses.importance_sampling_ratio`; `None` for not at all.
    importance_sampling: str | None = None
    importance_max: float = 3.0  # the largest ratio of that correction
    updates: int = 1  # how often the policy is updated on a step's completions
    mask_truncated: bool = False  # leave completions out of the loss that were cut off at their longest length
    length: int = 0  # tokens in a packed row; 0 for a prompt and a completion of the longest lengths
    batch: int = 64
    micro_batches: int = 8
    lora_dropout: float | None = 0.0
    pack: bool = True
    eval_share: float | None = 0.0
    out: str = "runs/grpo"

    command = "grpo"
    is_alone = True
    peak_rates = 1e-6, 1e-5
    what_samples = "how many of each step's completions to write to OUT/completions.jsonl, with their rewards"

    def __post_init__(self):
        object.__setattr__(self, "reward", (self.reward,) if isinstance(self.reward, str) else tuple(self.reward))
        for name, least in (("group", 2), ("prompt_length", 1), ("completion_length", 1), ("top_k", 1), ("updates", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise UserError(f"--{name.replace('_', '-')}={value} must be at least {least}.")
        longest = self.prompt_length + self.completion_length
        object.__setattr__(self, "length", self.length or longest)
        super().__post_init__()
        if not self.reward:
            raise UserError("A run needs a reward: pass --reward module:function.")
        if self.length < longest:
            raise UserError(
                f"--length={self.length} is less than --prompt-length={self.prompt_length} and "
                f"--completion-length={self.completion_length} together. Pass --length {longest}, or leave it out."
            )
        if not 0 < self.reward_timeout <= _MOST_SECONDS:
            raise UserError(
                f"--reward-timeout={self.reward_timeout} must be a number of seconds above 0, and at most "
                f"{_MOST_SECONDS:g}."
            )
        if self.batch % self.group:
            raise UserError(f"--batch={self.batch} completions must be a multiple of --group={self.group}.")
        if not LEAST_FLOAT <= self.temperature <= MOST_FLOAT:
            raise UserError(
                f"--temperature={self.temperature} must be a finite number above 0, of those that float32 holds."
            )
        if not LEAST_FLOAT <= self.top_p <= 1:
            raise UserError(f"--top-p={self.top_p} must be above 0, of the numbers that float32 holds, and at most 1.")
        if not 0 <= self.beta < math.inf:
            raise UserError(f"--beta={self.beta} must be a finite number, at least 0.")
        self._check_loss()
        if not 0 < self.importance_max < math.inf:
            raise UserError(f"--importance-max={self.importance_max} must be a finite number above 0.")
        if self.importance_sampling is None and self.importance_max != GrpoSettings.importance_max:
            raise UserError(
                f"--importance-max={self.importance_max} is for --importance-sampling: pass that, or leave it out."
            )
        if self.beta and self.lora is None and not (Path(self.model) / ADAPTERS.config).is_file():
            raise UserError(
                f"--beta={self.beta} needs a reference, which is the model with its adapters off: pass --lora, such as "
                "--lora 16, or leave --beta out."
            )

    def _check_loss(self) -> None:
        numbers = jax.ShapeDtypeStruct((1, 2), jnp.float32)
        options = self.loss_options()
        reference = numbers if self.beta else None
        try:
            jax.eval_shape(
                lambda x, a, m, r: policy_loss(x, x, a, mask=m, reference_log_probs=r, **options).loss,
                numbers, jax.ShapeDtypeStruct((1,), jnp.float32), jax.ShapeDtypeStruct((1, 2), jnp.bool_), reference,
            )  # fmt: skip
        except ValueError as error:
            raise UserError(str(error), in_python=True) from error

    def _check_scored(self) -> None:
        if self.patience is not None:
            raise UserError(
                f"--patience={self.patience} is for data that is held out, and this command holds out none: a step's "
                "rewards are of what the model has just written. Leave it out."
            )

    @property
    def keeps(self) -> tuple[str, ...]:
        """What the run keeps in OUT: its prompts are tokenised at each start."""
        return ("completions",) if self.samples else ()

    def of_the_run(self) -> dict[str, Any]:
        """The settings that must stay the same when a run is continued."""
        return super().of_the_run() | {REWARD_CALL: "lists over the batch"}

    def loss_options(self) -> dict[str, Any]:
        """Options of `losses.policy_loss`."""
        names = "loss_type importance_level epsilon_low epsilon_high delta beta".split()
        longest = self.completion_length if self.loss_type == "dr_grpo" else None
        return {name: getattr(self, name) for name in names} | {"max_length": longest}
