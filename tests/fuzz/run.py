"""Draws cases for a while, and reports what they find."""

import time
import traceback
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

from tests.fuzz import attention, elementwise, linear
from tests.fuzz.case import Case, Draw
from tests.fuzz.compare import Where, misses
from tests.fuzz.models import MODELS

# A drawing function for each public op, by the op's name.
OPS: dict[str, Callable[[Draw], Case]] = {
    **{name: getattr(elementwise, name) for name in (
        "rms_norm", "fused_add_rms_norm", "layer_norm", "group_norm", "dyt", "poly_norm", "relu_squared", "softmax",
        "sparsemax", "swiglu", "geglu", "gated_mlp",
    )},
    **{name: getattr(attention, name) for name in ("causal_attention", "apply_rope", "apply_mrope")},
    **{name: getattr(linear, name) for name in (
        "cross_entropy", "fused_linear_cross_entropy", "fused_linear_log_probs", "fused_linear_token_loss",
        "fused_linear_distillation", "fused_linear_topk_distillation",
    )},
}  # fmt: skip
DRAWN = {**OPS, **MODELS}

# Faults that are known and being mended: parts of their sentences, by the op. Empty when none is.
KNOWN: dict[str, tuple[str, ...]] = {}


def case_of(seed: int, number: int, names: tuple[str, ...], large: bool) -> tuple[Case, Draw]:
    """The case of this number. Every name comes once before one comes again, in an order of the seed's own."""
    turn, place = divmod(number, len(names))
    name = names[np.random.default_rng([seed, turn]).permutation(len(names))[place]]
    draw = Draw(np.random.default_rng([seed, turn, place]), large)
    return DRAWN[name](draw), draw


def fuzz(
    seed: int, numbers: Iterator[int], names: tuple[str, ...], platform: str, seconds: float = float("inf")
) -> Iterator[tuple[int, str, list[str]]]:
    """(number, name, misses) of each case, until the time is over."""
    end = time.monotonic() + seconds
    for number in numbers:
        if time.monotonic() > end:
            return
        case, draw = case_of(seed, number, names, large=platform != "cpu")
        where = Where(platform, draw.pick(None, "highest"))
        try:
            found = list(misses(case, draw, where))
        except Exception:  # noqa: BLE001  # a fault of the fuzz's own: the formula or the draw
            found = [f"the fuzz itself fails\n{traceback.format_exc()}"]
        yield number, case.name, [s for s in found if not any(part in s for part in KNOWN.get(case.name, ()))]
