"""Draws cases for a while, and reports what they find."""

import time
import traceback
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from tests.fuzz import attention, distillation, elementwise, experts, linear, losses, others
from tests.fuzz.case import Case, Draw
from tests.fuzz.compare import Where, misses
from tests.fuzz.models import MODELS

# A drawing function for each public op, by the op's name.
OPS: dict[str, Callable[[Draw], Case]] = {
    **{name: getattr(elementwise, name) for name in (
        "rms_norm", "fused_add_rms_norm", "layer_norm", "group_norm", "dyt", "poly_norm", "relu_squared", "softmax",
        "sparsemax", "swiglu", "geglu", "gated_mlp", "gated_rms_norm",
    )},
    **{name: getattr(attention, name) for name in (
        "causal_attention", "apply_rope", "apply_mrope", "gated_delta_rule", "causal_conv1d",
    )},
    **{name: getattr(linear, name) for name in (
        "cross_entropy", "fused_linear_cross_entropy", "fused_linear_log_probs", "fused_linear_token_loss",
    )},
    **{name: getattr(distillation, name) for name in ("fused_linear_distillation", "fused_linear_topk_distillation")},
    **{name: getattr(experts, name) for name in ("grouped_matmul", "moe_mlp")},
    **{name: getattr(others, name) for name in ("rope_table", "block_quantized", "plan_fused_linear_cross_entropy")},
}  # fmt: skip
FAMILIES_IN_A_TURN = 2  # a model takes the time of ten ops
BEYOND: dict[str, Callable[[Draw], Case]] = {
    name: getattr(losses, name)
    for name in (
        "softmax_cross_entropy_with_integer_labels",
        "group_advantages",
        "policy_loss",
        "split_log_probs",
        "quantized_head",
    )
}
DRAWN = {**OPS, **BEYOND, **MODELS}


def case_of(seed: int, number: int, names: tuple[str, ...], large: bool) -> tuple[Case, Draw]:
    """The case of this number. In every turn each op comes once, and two of the families, in its own order."""
    families = [name for name in names if name in MODELS]
    length = len(names) - max(len(families) - FAMILIES_IN_A_TURN, 0)
    turn, place = divmod(number, length)
    rng = np.random.default_rng([seed, turn])
    families = list(rng.permutation(families)[:FAMILIES_IN_A_TURN])
    name = str(rng.permutation([*(name for name in names if name not in MODELS), *families])[place])
    draw = Draw(np.random.default_rng([seed, turn, place]), large)
    return DRAWN[name](draw), draw


def fuzz(
    seed: int, numbers: Iterable[int], names: tuple[str, ...], platform: str, seconds: float = float("inf")
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
        yield number, case.name, found
