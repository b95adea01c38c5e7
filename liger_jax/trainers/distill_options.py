"""The options of `liger-jax distill`, beside those of every training run."""

import dataclasses
from typing import Any

from liger_jax._options import of_float32, option, share, within
from liger_jax.ops.block_quantized import KINDS
from liger_jax.ops.linear.fused_linear_distillation import DIVERGENCES
from liger_jax.ops.linear.fused_linear_topk_distillation import TAILS
from liger_jax.trainers.method import Method
from liger_jax.user_errors import UserError


@dataclasses.dataclass(frozen=True)
class DistillOptions(Method):
    """A student is trained on its teacher's probabilities."""

    teacher: str = option(
        "", "a folder or an id, with the tokenizer of --model", required=True, metavar="MODEL", first=True
    )
    teacher_quantize: str | None = option(None, "quantize the teacher's weights to 4 or 8 bits", choices=KINDS)
    divergence: str = option(
        "forward_kl", "divergence between student and teacher (default: {default})", choices=DIVERGENCES
    )
    beta: float | None = option(None, "the teacher's weight in the mixture, for jsd (default: 0.5)")
    temperature: float = option(1.0, "temperature of both distributions (default: {default:g})", check=of_float32)
    hard_weight: float = option(
        0.0, "weight, from 0 to 1, of the labels' cross-entropy in the loss (default: {default:g})",
        check=share("0 leaves the labels out, and with 1 there would be no teacher, as in liger-jax finetune"),
    )  # fmt: skip
    top_k: int | None = option(
        None, "store the teacher's K most likely tokens before training (default: run the teacher in each step)",
        check=within(1), metavar="K", first=True
    )  # fmt: skip
    tail: str | None = option(
        None, "ignore the tokens that are not stored, or treat them as one event, a bucket (default: bucket)",
        choices=TAILS,
    )  # fmt: skip

    command = "distill"
    group_of_options = "the teacher"
    changes = dict(out=dict(default="runs/distill"), quantize=dict(first=False), length=dict(first=False))

    def __post_init__(self):
        super().__post_init__()
        if not self.teacher:
            raise UserError("A run needs a teacher: pass --teacher, a checkpoint's folder or id.")
        if self.divergence == "cosine" and self.temperature != 1:
            raise UserError(
                f"--temperature={self.temperature} changes no angle between logits, which --divergence cosine "
                "compares. Leave it out."
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
        if self.divergence != "forward_kl":
            raise UserError(
                f"--divergence={self.divergence} needs all of the teacher's probabilities, and --top-k stores some. "
                "Leave one of them out."
            )

    def check(self, settings: Any) -> None:
        """Refuses a stream for a teacher that scores all rows before the first step."""
        super().check(settings)
        if self.top_k is not None and settings.rows.stream:
            raise UserError("--top-k reads the data once before the first step, and --stream has no end. Leave it out.")

    def keeps(self, settings: Any) -> tuple[str, ...]:
        """What the run stores in OUT."""
        return (*super().keeps(settings), *(("teacher",) if self.top_k is not None else ()))

    def divergence_options(self) -> dict[str, Any]:
        """Options of `fused_linear_distillation`, or with `top_k` of `fused_linear_topk_distillation`.

        Returns values by name; not the `hard_weight`, which is 0 where a divergence is wanted alone.
        """
        if self.top_k is not None:
            return {"temperature": self.temperature, "tail": self.tail or "bucket"}
        beta = {} if self.beta is None else {"beta": self.beta}
        return {"temperature": self.temperature, "divergence": self.divergence} | beta
