"""The losses of pairs by the names of `--loss`, from the log-probabilities of whole responses."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from liger_jax import losses
from liger_jax.commands._errors import UserError, in_options
from liger_jax.commands._loss_options import CPO, FREE, LossOptions, flag
from liger_jax.losses import DPOOutput
from liger_jax.losses.preference import DPO_TYPES, READERS, SORTING_TYPES
from liger_jax.losses.unpaired import KTO_TYPES

_FAR = 1e9  # beyond every log-probability, so that what is no pair is sorted behind all pairs
# Which losses read an option, where their functions do not say it themselves.
_READ_BY = {
    "cpo_alpha": tuple(CPO), "gamma": ("simpo",), "loss_weights": DPO_TYPES, "ld_alpha": DPO_TYPES,
    "desirable_weight": KTO_TYPES, "undesirable_weight": KTO_TYPES,
}  # fmt: skip


class Pairs(NamedTuple):
    """What a loss reads of P pairs, (P,) float32 each."""

    chosen: jax.Array  # log-probability of the chosen response, summed over its tokens
    rejected: jax.Array  # the other response's
    chosen_tokens: jax.Array  # how many tokens the first sum has
    rejected_tokens: jax.Array  # how many the second has
    exist: jax.Array  # bool, which are pairs; others count nowhere
    nll: jax.Array  # negative log-likelihood of chosen, in such a unit that its mean over pairs is the mean over tokens
    # Log-probabilities of both under the reference; zeros for a loss without one.
    references: tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preference(LossOptions):
    """A loss of pairs with its options."""

    def __post_init__(self):
        for name in self._types:
            if name in KTO_TYPES:
                raise UserError(f"--loss={self.loss_type}: {name} is of single answers, and goes with no other.")
            if name not in (*DPO_TYPES, *FREE) or name in FREE and len(self._types) > 1:
                known = ", ".join((*DPO_TYPES, *FREE, *KTO_TYPES))
                raise UserError(f"--loss={self.loss_type}: {name!r} must be one of {known}; DPO's also go together.")
        for option, readers in _READ_BY.items():
            if getattr(self, option) is not None and not set(self._types) <= set(readers):
                raise UserError(f"{flag(option)} goes with --loss {', '.join(readers)}. Leave it out.")
        if self.ld_alpha is not None and not 0 <= self.ld_alpha <= 1:
            raise UserError(f"--ld-alpha={self.ld_alpha} must be in [0, 1]; 1 weighs all tokens alike.")
        if self.sorts and len(self._types) > 1:
            raise UserError(f"--loss={self.loss_type}: a loss that sorts a batch's pairs goes with no other.")
        for name, option in self._options.items():
            values = getattr(self, name)
            for value in values if isinstance(values, tuple) else (values,):
                if isinstance(value, float) and not math.isfinite(value):
                    raise UserError(f"{option}={value} must be a finite number.")
        two = jax.ShapeDtypeStruct((2,), jnp.float32)
        try:
            pairs = Pairs(two, two, two, two, exist=two, nll=two, references=(two, two))
            jax.eval_shape(self.losses, pairs, jax.ShapeDtypeStruct((), jnp.float32))
        except (ValueError, TypeError) as error:
            raise UserError(f"--loss={self.loss_type}: {in_options(str(error), self._options)}") from error

    @property
    def _options(self) -> dict[str, str]:
        """The options of the command line by the fields' names."""
        return {field.name: flag(field.name) for field in dataclasses.fields(self)}

    @property
    def _types(self) -> tuple[str, ...]:
        return tuple(self.loss_type.split(","))

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the reference's log-probabilities."""
        return self._types[0] not in FREE

    @property
    def sorts(self) -> bool:
        """Whether the loss sorts a batch's pairs, so that it is no sum over them."""
        return any(name in SORTING_TYPES for name in self._types)

    @property
    def reads_prompts(self) -> bool:
        """Whether the likelihood of chosen is that of prompt and response, as for ORPO."""
        return self.loss_type == "orpo"

    def losses(self, pairs: Pairs, tokens_per_pair: Any) -> DPOOutput:
        """The losses of pairs; where there is no pair, a loss has no meaning."""
        chosen, rejected = pairs.chosen, pairs.rejected
        counts = [jnp.maximum(n, 1).astype(jnp.int32) for n in (pairs.chosen_tokens, pairs.rejected_tokens)]
        if self.loss_type in ("orpo", "simpo", "cpo_ipo"):
            chosen, rejected = (x / n for x, n in zip((chosen, rejected), counts, strict=True))
        if not self.needs_reference:  # a mean of 0 has infinite odds: what is no pair has another
            chosen, rejected = (jnp.where(pairs.exist, x, -1.0) for x in (chosen, rejected))
        if self.loss_type == "orpo":
            return losses.orpo_loss(chosen, rejected, pairs.nll, **self._given("beta"))
        if self.loss_type == "simpo":
            return losses.simpo_loss(chosen, rejected, **self._given("beta", "gamma", "label_smoothing"))
        if self.loss_type in CPO:
            nll = None if self.cpo_alpha == 0 else pairs.nll
            options = self._given("beta", "label_smoothing", "cpo_alpha")
            return losses.cpo_loss(chosen, rejected, nll, loss_type=CPO[self.loss_type], **options)
        return self._dpo(pairs, counts, tokens_per_pair)

    def _dpo(self, pairs: Pairs, counts: list[jax.Array], tokens_per_pair: Any) -> DPOOutput:
        given = dict(chosen_tokens=counts[0], rejected_tokens=counts[1], sft_tokens_per_pair=tokens_per_pair)
        read = {name: value for name, value in given.items() if set(self._types) & set(READERS[name])}
        chosen, rejected, references = pairs.chosen, pairs.rejected, pairs.references
        if self.sorts:
            last = jnp.where(pairs.exist, 0.0, _FAR)
            chosen = chosen + last
            if self.loss_type == "aot":  # the policy's margins are sorted, and the reference's
                references = references[0] + last, references[1]
            else:  # the log-ratios of chosen, and those of rejected
                rejected = rejected + last
        options = self._given("beta", "label_smoothing", "f_divergence", "f_alpha", "discopop_tau", "loss_weights")
        output = losses.dpo_loss(chosen, rejected, *references, loss_type=self._types, **read, **options)
        if not self.sorts:
            return output
        responses = zip((pairs.chosen, pairs.rejected), pairs.references, strict=True)
        rewards = jax.lax.stop_gradient([self.beta * (x - y) for x, y in responses])
        return DPOOutput(losses=output.losses, chosen_rewards=rewards[0], rejected_rewards=rewards[1])

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}
