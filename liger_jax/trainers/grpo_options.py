"""The options of `liger-jax grpo`, beside those of every training run."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax._options import above_0, at_least_0, in_memory, of_float32, option, texts, up_to_1, within
from liger_jax.losses import policy_loss
from liger_jax.losses.policy_batch import LOSS_TYPES
from liger_jax.trainers.method import Method
from liger_jax.user_errors import UserError

LEVELS = ("token", "sequence")
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
REWARD_CALL = "reward_call"  # the key in a checkpoint for the way in which its run calls rewards
ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce", "reinforce_baseline")
_MICRO_BATCHES = 8  # at most, where none is given
_MOST_SECONDS = 1e7  # what the timers of all systems accept


def _seconds(value: float) -> str:
    holds = 0 < value <= _MOST_SECONDS
    return "" if holds else f"must be a number of seconds above 0, and at most {_MOST_SECONDS:g}."


@dataclasses.dataclass(frozen=True)
class GrpoOptions(Method):
    """A policy is trained by rewards. A row of a batch is a completion."""

    reward: Sequence[str] = option(
        (),
        "functions that score completions; MODULE:FUNCTION=0.5 sets a weight",
        metavar="MODULE:FUNCTION",
        first=True,
        required=True,
    )
    reward_timeout: float = option(
        1800.0, "the most seconds that a call of a reward may take (default: {default:g})", check=_seconds,
        of_run=False, metavar="SECONDS",
    )  # fmt: skip
    group: int = option(8, "completions sampled per prompt (default: {default})", check=within(2), first=True)
    prompt_length: int = option(512, "the most tokens of a prompt (default: {default})", check=within(1))
    completion_length: int = option(
        256, "the most tokens of a completion (default: {default})", check=within(1), first=True
    )
    temperature: float = option(
        1.0, "temperature of sampling, and of the policy's probabilities (default: {default:g})", check=of_float32
    )
    top_p: float = option(
        1.0, "sample from the most likely tokens whose probabilities add up to this (default: {default:g})",
        check=up_to_1,
    )  # fmt: skip
    top_k: int | None = option(None, "sample from this many of the most likely tokens (default: all)", check=within(1))
    loss_type: str = option("dapo", "type of the policy loss (default: {default})", choices=LOSS_TYPES)
    importance_level: str = option(
        "token", "compute importance ratios per token or per sequence (default: token)", choices=LEVELS
    )
    advantages: str = option(
        "grpo", "how advantages are computed from rewards (default: {default})", choices=ADVANTAGES
    )
    epsilon_low: float | None = option(None, "clip the ratio at 1 minus this (default: 0.2)")
    epsilon_high: float | None = option(None, "clip the ratio at 1 plus this (default: --epsilon-low)")
    delta: float | None = option(
        None, "upper bound of the ratio where the advantage is negative, as in two-sided clipping (default: none)"
    )
    beta: float = option(
        0.0, "weight of the KL penalty towards the model without its adapters (default: {default:g})", check=at_least_0
    )
    importance_sampling: str | None = option(
        None, "correct for the sampler's rounding differing from the policy's (default: no)", choices=CORRECTIONS
    )
    importance_max: float = option(3.0, "the correction's largest ratio (default: {default})", check=above_0)
    updates: int = option(1, "updates of the policy for each step's completions (default: {default})", check=within(1))
    mask_truncated: bool = option(False, "exclude truncated completions from the loss")
    functions: Mapping[str, Any] = in_memory()  # reward functions of a program, by their names in `reward`

    command = "grpo"
    group_of_options = "rewards and completions"
    rows_stay_whole = True
    peak_rates = 1e-6, 1e-5
    changes = dict(
        data=dict(help="lines with a prompt: files, globs, folders, a dataset's id; FILE=2 takes its lines twice"),
        # 0 for a prompt and a completion of the longest lengths.
        length=dict(
            default=0, first=False, help="tokens in a packed row (default: --prompt-length plus --completion-length)"
        ),
        batch=dict(default=64, help="completions in a step, a multiple of --group (default: {default})"),
        micro_batches=dict(
            help="micro-batches into which a batch is cut for gradient accumulation "
            f"(default: the most up to {_MICRO_BATCHES} that divide --batch)"
        ),
        samples=dict(
            help="how many of each step's completions to write to OUT/completions.jsonl, with their rewards "
            "(default: {default})"
        ),
        lora_dropout=dict(default=0.0),
        mesh=dict(
            help="devices along each mesh axis: fsdp=2,tensor=2 (default: auto, data where whole weights fit on a "
            "device, else fsdp)"
        ),
        quantize=dict(first=False),
        pack=dict(default=True),
        eval_share=dict(default=0.0),
        out=dict(default="runs/grpo"),
    )
    no_options = ("column", "format", "stream", "eval_data", "pack", "eval_share")

    def __post_init__(self):
        object.__setattr__(self, "reward", texts(self.reward))
        super().__post_init__()
        if not self.reward:
            raise UserError("A run needs a reward: pass --reward module:function.")
        self._check_loss()
        if self.importance_sampling is None and self.importance_max != GrpoOptions.importance_max:
            raise UserError(
                f"--importance-max={self.importance_max} is for --importance-sampling: pass that, or leave it out."
            )

    @property
    def longest(self) -> int:
        """The most tokens of a prompt and its completion."""
        return self.prompt_length + self.completion_length

    def decided(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The length of packed rows and the number of micro-batches, where none is given."""
        fitting = (number for number in range(_MICRO_BATCHES, 1, -1) if values["batch"] % number == 0)
        micro_batches = values.get("micro_batches")
        return {
            "length": values["length"] or self.longest,
            "micro_batches": next(fitting, 1) if micro_batches is None else micro_batches,
        }

    def check(self, settings: Any) -> None:
        """Refuses options of rows, batch and reference that sampled completions cannot have. No data is held out."""
        if (patience := settings.recipe.patience) is not None:
            raise UserError(
                f"--patience={patience} is for held-out data, and this command holds none out: a step's rewards are "
                "those of completions that the model has just sampled. Leave it out."
            )
        if settings.rows.length < self.longest:
            raise UserError(
                f"--length={settings.rows.length} is less than --prompt-length={self.prompt_length} and "
                f"--completion-length={self.completion_length} together. Pass --length {self.longest}, or leave it out."
            )
        if settings.recipe.batch % self.group:
            raise UserError(f"--batch={settings.recipe.batch} completions must be a multiple of --group={self.group}.")
        if self.beta and not settings.has_adapters:
            raise UserError(
                f"--beta={self.beta} needs a reference, which is the model with its adapters off: pass --lora, such as "
                "--lora 16, or leave --beta out."
            )

    def shorter(self, length: int) -> str:
        """The options by which rows have a length, in which the longest prompt and completion must fit."""
        if (prompt := length - self.completion_length) > 0:
            return f"--prompt-length {prompt} without --length"
        return f"--prompt-length {length // 2} --completion-length {length - length // 2} without --length"

    def keeps(self, settings: Any) -> tuple[str, ...]:
        """What the run stores in OUT; not its prompts, which are tokenised at each start."""
        return ("completions",) if settings.folder.samples else ()

    def of_the_run(self) -> dict[str, Any]:
        """How rewards are called."""
        return {REWARD_CALL: "lists over the batch"}

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

    def loss_options(self) -> dict[str, Any]:
        """Options of `losses.policy_loss`."""
        names = "loss_type importance_level epsilon_low epsilon_high delta beta".split()
        longest = self.completion_length if self.loss_type == "dr_grpo" else None
        return {name: getattr(self, name) for name in names} | {"max_length": longest}
