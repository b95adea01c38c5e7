"""The losses of pairs and of single answers by the names of `--loss`, and their options."""

import argparse
import dataclasses
import inspect
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from liger_jax import _options, losses
from liger_jax._options import option
from liger_jax.losses import DPOOutput, KTOOutput
from liger_jax.losses.preference import DPO_TYPES, READERS, SORTING_TYPES
from liger_jax.losses.unpaired import KTO_TYPES
from liger_jax.user_errors import UserError, in_options

CPO = {"cpo": "sigmoid", "cpo_hinge": "hinge", "cpo_ipo": "ipo"}  # as `cpo_loss` calls them
FREE = ("orpo", *CPO, "simpo", "alphapo")  # losses without a reference
OF_MEANS = ("orpo", "cpo_ipo", "simpo", "alphapo")  # those that read the mean of an answer's tokens, and not the sum
NAMES = (*DPO_TYPES, *FREE, *KTO_TYPES)

_FUNCTIONS: dict[str, Any] = {
    **dict.fromkeys(DPO_TYPES, losses.dpo_loss), "orpo": losses.orpo_loss, **dict.fromkeys(CPO, losses.cpo_loss),
    "simpo": losses.simpo_loss, "alphapo": losses.alphapo_loss, **dict.fromkeys(KTO_TYPES, losses.kto_loss),
}  # fmt: skip
_FAR = 1e9  # beyond every log-probability, so that entries that are not pairs are sorted last


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers separated by commas, as in 1,0.5.") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The options of a loss, which are those of its function in `losses`; `None` for the function's own default."""

    # In a file of options it is called otherwise than plan's --loss.
    loss_type: str = option(
        "sigmoid",
        f"{', '.join(NAMES)}; or several of DPO's, separated by commas (default: sigmoid)",
        flag="--loss", first=True
    )  # fmt: skip
    loss_weights: tuple[float, ...] | None = option(
        None, "a weight for each of several losses, separated by commas", type=_numbers, metavar="NUMBERS"
    )
    beta: float = option(
        0.1,
        "weight of the penalty towards the reference; a scale for losses without one, 2 to 10 for simpo (default: 0.1)",
        first=True,
    )
    label_smoothing: float | None = option(
        None, "the fraction of pairs whose preference may be the wrong way round (default: 0)"
    )
    f_divergence: str | None = option(
        None, "reverse_kl, forward_kl, js_divergence or alpha_divergence (default: reverse_kl)"
    )
    f_alpha: float | None = option(None, "alpha of alpha_divergence (default: 0.5)")
    discopop_tau: float | None = option(None, "temperature of discopop (default: 0.05)")
    cpo_alpha: float | None = option(None, "weight of the chosen answer's likelihood, for cpo (default: 1)")
    gamma: float | None = option(None, "the margin of simpo and alphapo (default: 0.5)")
    reward_alpha: float | None = option(None, "alpha of alphapo's reward, which needs it")
    ld_alpha: float | None = option(
        None, "weight of the tokens of a response beyond the shorter one's length, as in LD-DPO (default: 1)"
    )
    desirable_weight: float | None = option(None, "weight of good answers, for kto (default: 1)")
    undesirable_weight: float | None = option(None, "weight of bad answers, for kto (default: 1)")


def flag(name: str) -> str:
    """An option's name on the command line."""
    return next(_options.flag(field) for field in dataclasses.fields(LossOptions) if field.name == name)


def of_settings(settings: Any) -> dict[str, Any]:
    """The options of a run by name."""
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(LossOptions)}


def _given(options: LossOptions) -> dict[str, Any]:
    """The options that a loss's function takes, where they are set."""
    others = ("loss_type", "ld_alpha")  # the second is of the sums over tokens
    return {name: x for name, x in of_settings(options).items() if x is not None and name not in others}


def _check_read(options: LossOptions, types: tuple[str, ...]) -> None:
    """Refuses an option that the function of a loss does not take."""
    for loss in types:
        unread = [name for name in _given(options) if name not in inspect.signature(_FUNCTIONS[loss]).parameters]
        unread += ["ld_alpha"] if options.ld_alpha is not None and loss not in DPO_TYPES else []
        if unread:
            raise UserError(f"{flag(unread[0])} does not go with --loss {loss}. Leave it out.")


class Pairs(NamedTuple):
    """What a loss reads of P pairs, (P,) float32 each."""

    chosen: jax.Array  # log-probability of the chosen response, summed over its tokens
    rejected: jax.Array  # the other response's
    chosen_tokens: jax.Array  # number of tokens in the first sum
    rejected_tokens: jax.Array  # number of tokens in the second sum
    exist: jax.Array  # bool, which entries are pairs; the others are ignored
    nll: jax.Array  # negative log-likelihood of chosen, scaled such that its mean over pairs is the mean over tokens
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
        _check_read(self, self._types)
        if self.ld_alpha is not None and not 0 <= self.ld_alpha <= 1:
            raise UserError(f"--ld-alpha={self.ld_alpha} must be in [0, 1]; 1 weighs all tokens alike.")
        if self.sorts and len(self._types) > 1:
            raise UserError(f"--loss={self.loss_type}: a loss that sorts a batch's pairs goes with no other.")
        for name, named in self._options.items():
            values = getattr(self, name)
            for value in values if isinstance(values, tuple) else (values,):
                if isinstance(value, float) and not math.isfinite(value):
                    raise UserError(f"{named}={value} must be a finite number.")
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
        """Whether the loss sorts a batch's pairs, and so is not a sum over them."""
        return any(name in SORTING_TYPES for name in self._types)

    @property
    def reads_prompts(self) -> bool:
        """Whether the likelihood of chosen is that of prompt and response, as for ORPO."""
        return self.loss_type == "orpo"

    def losses(self, pairs: Pairs, tokens_per_pair: Any) -> DPOOutput:
        """The losses of pairs; meaningless where an entry is not a pair."""
        chosen, rejected = pairs.chosen, pairs.rejected
        counts = [jnp.maximum(n, 1).astype(jnp.int32) for n in (pairs.chosen_tokens, pairs.rejected_tokens)]
        if self.loss_type in OF_MEANS:
            chosen, rejected = (x / n for x, n in zip((chosen, rejected), counts, strict=True))
        if not self.needs_reference:  # a mean of 0 has infinite odds: entries that are not pairs get another
            chosen, rejected = (jnp.where(pairs.exist, x, -1.0) for x in (chosen, rejected))
        if self.loss_type == "orpo":
            return losses.orpo_loss(chosen, rejected, pairs.nll, **_given(self))
        if self.loss_type in ("simpo", "alphapo"):
            return _FUNCTIONS[self.loss_type](chosen, rejected, **_given(self))
        if self.loss_type in CPO:
            nll = None if self.cpo_alpha == 0 else pairs.nll
            return losses.cpo_loss(chosen, rejected, nll, loss_type=CPO[self.loss_type], **_given(self))
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
        output = losses.dpo_loss(chosen, rejected, *references, loss_type=self._types, **read, **_given(self))
        if not self.sorts:
            return output
        responses = zip((pairs.chosen, pairs.rejected), pairs.references, strict=True)
        rewards = jax.lax.stop_gradient([self.beta * (x - y) for x, y in responses])
        return DPOOutput(losses=output.losses, chosen_rewards=rewards[0], rejected_rewards=rewards[1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unpaired(LossOptions):
    """A loss of single answers with its options."""

    needs_reference = True

    def __post_init__(self):
        _check_read(self, (self.loss_type,))
        if not 0 < self.beta < math.inf:
            raise UserError(f"--loss={self.loss_type}: --beta={self.beta} must be a finite number > 0.")
        for name, value in _given(self).items():
            if not 0 <= value < math.inf:
                raise UserError(f"{flag(name)}={value} must be a finite number, at least 0.")

    @property
    def sorts(self) -> bool:
        """Whether the loss is not a sum over answers: KTO's baseline is computed over the whole batch."""
        return self.needs_others

    @property
    def needs_others(self) -> bool:
        """Whether the loss reads answers to other prompts, for its baseline."""
        return self.loss_type == "kto"

    def losses(self, log_probs: jax.Array, references: jax.Array, desirable: jax.Array, kl: jax.Array) -> KTOOutput:
        """The losses of answers."""
        options = _given(self) | ({"kl": kl} if self.needs_others else {})
        return losses.kto_loss(log_probs, references, desirable, loss_type=self.loss_type, **options)
