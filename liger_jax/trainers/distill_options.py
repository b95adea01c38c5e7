"""The options of `liger-jax distill`, beside those of every training run."""

import dataclasses
from typing import Any

from liger_jax.ops.block_quantized import KINDS
from liger_jax.ops.linear.fused_linear_distillation import DIVERGENCES
from liger_jax.ops.linear.fused_linear_topk_distillation import TAILS
from liger_jax.trainers.options import LEAST_FLOAT, MOST_FLOAT, Settings
from liger_jax.user_errors import UserError


@dataclasses.dataclass(frozen=True)
class DistillSettings(Settings):
    """A run that trains a student on its teacher's probabilities."""

    teacher: str = ""  # a checkpoint's folder, or an id
    teacher_quantize: str | None = None  # how the teacher's weights are held, "nf4" or "int8"; `None` for as they are
    divergence: str = "forward_kl"  # a name of `DIVERGENCES`, as in `fused_linear_distillation`
    beta: float | None = None  # the teacher's weight in the mixture, for "jsd" alone; `None` for 0.5
    temperature: float = 1.0  # of both distributions
    hard_weight: float = 0.0  # the share of the labels' cross-entropy in the loss
    # How many of the teacher's likeliest tokens are stored, once; `None` for a teacher in each step.
    top_k: int | None = None
    tail: str | None = None  # what the tokens are that are not stored, a name of `TAILS`; `None` for "bucket"
    out: str = "runs/distill"  # folder for checkpoints, logs and the result

    command = "distill"
    is_alone = True

    def __post_init__(self):
        super().__post_init__()
        if not self.teacher:
            raise UserError("A run needs a teacher: pass --teacher, a checkpoint's folder or id.")
        if "\0" in self.teacher:
            raise UserError(f"--teacher={self.teacher!r} holds a null character, which no name has.")
        for name, choices in (("divergence", DIVERGENCES), ("tail", TAILS), ("teacher_quantize", KINDS)):
            if (value := getattr(self, name)) is not None and value not in choices:
                raise UserError(f"--{name.replace('_', '-')}={value} must be one of {', '.join(choices)}.")
        if not LEAST_FLOAT <= self.temperature <= MOST_FLOAT:
            raise UserError(
                f"--temperature={self.temperature} must be a finite number above 0, of those that float32 holds."
            )
        if self.divergence == "cosine" and self.temperature != 1:
            raise UserError(
                f"--temperature={self.temperature} changes no angle between logits, which --divergence cosine "
                "compares. Leave it out."
            )
        if not 0 <= self.hard_weight < 1:
            raise UserError(
                f"--hard-weight={self.hard_weight} must be in [0, 1); 0 leaves the labels out, and with 1 there would "
                "be no teacher, as in liger-jax finetune."
            )
        if self.beta is not None and self.divergence != "jsd":
            raise UserError(f"--beta={self.beta} goes with --divergence jsd. Leave it out.")
        if self.beta is not None and not 0 < self.beta < 1:
            raise UserError(
                f"--beta={self.beta} must be in (0, 1); its limits are --divergence forward_kl and reverse_kl."
            )
        self._check_stored()

    def _check_stored(self) -> None:
        if self.top_k is None:
            if self.tail is not None:
                raise UserError(f"--tail={self.tail} goes with --top-k. Leave it out.")
            return
        if self.top_k < 1:
            raise UserError(f"--top-k={self.top_k} must be at least 1.")
        if self.divergence != "forward_kl":
            raise UserError(
                f"--divergence={self.divergence} needs all of the teacher's probabilities, and --top-k stores some. "
                "Leave one of them out."
            )
        if self.stream:
            raise UserError("--top-k reads the data once before the first step, and --stream has no end. Leave it out.")

    @property
    def keeps(self) -> tuple[str, ...]:
        """What the run keeps in OUT."""
        return (*super().keeps, "teacher") if self.top_k is not None else super().keeps

    def divergence_options(self) -> dict[str, Any]:
        """Options of `fused_linear_distillation`, or with `top_k` of `fused_linear_topk_distillation`.

        Returns values by name; not the `hard_weight`, which is 0 where a divergence is wanted alone.
        """
        if self.top_k is not None:
            return {"temperature": self.temperature, "tail": self.tail or "bucket"}
        beta = {} if self.beta is None else {"beta": self.beta}
        return {"temperature": self.temperature, "divergence": self.divergence} | beta
