"""That annotations are checked: shapes by their letters, other arguments, results, methods and fields."""

import jax.numpy as jnp
import jaxtyping
import pytest
from jaxtyping import Array, Float

from liger_jax import rms_norm
from liger_jax.planner import plan, target
from liger_jax.planner.estimate import Estimate
from tests import _annotations

pytestmark = pytest.mark.skipif(not _annotations.CHECKED, reason="beartype is not installed")


def checked(function):
    """As the import hook has it for the package's functions."""
    if not _annotations.CHECKED:
        return function
    import beartype

    return jaxtyping.jaxtyped(function, typechecker=beartype.beartype)


@checked
def a_name() -> str:
    return 8  # pyright: ignore[reportReturnType]


@checked
def row_sums(x: Float[Array, "N D"]) -> Float[Array, "N"]:
    return x


WRONG = {
    "letters": lambda: rms_norm(jnp.ones((2, 3)), jnp.ones(4)),
    "argument": lambda: target(8),
    "method": lambda: plan("qwen2-0.5b", device="h200").changes_to_fit("all"),
    "field": lambda: Estimate({}, "loss", "many", 0),
    "result": a_name,
    "shape of a result": lambda: row_sums(jnp.ones((2, 3))),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_an_annotation_excludes_is_refused(wrong):
    for _ in range(2):  # a function's first call and a later one
        with pytest.raises(TypeError, match="(?i)type.check|violates type hint"):
            wrong()


@pytest.mark.usefixtures("unchecked_types")
def test_a_test_may_let_wrong_arguments_through():
    assert Estimate({}, "loss", "many", 0).loss_bytes == "many"
    assert a_name() == 8
