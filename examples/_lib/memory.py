"""The memory of a training step with and without the fused loss, by the compiler's own account.

Nothing is run: each step is compiled for abstract arrays, and the compiler says what it will allocate.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from liger_jax.planner.compilers import memory_of
from liger_jax.training import language_model_loss, make_step

BATCHES = (1, 2, 4, 8)
LOSSES = ("fused", "logits")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one training step at one batch size.

    Attributes:
        batch: sequences in the batch.
        total: for each of `LOSSES`, arguments, results and temporaries.
        own: for each of `LOSSES`, its total minus the total with a plain sum of hidden states for a loss.
    """

    batch: int
    total: dict[str, int]
    own: dict[str, int]


def compiled_bytes(step: Any, *arguments: jax.ShapeDtypeStruct) -> int:
    """Compiles a jitted function for abstract arguments and adds up what it allocates.

    Args:
        step: the jitted function.
        *arguments: shapes and dtypes.

    Returns:
        Bytes of arguments, results and temporaries, donated arguments counted once.
    """
    # What a CPU's program allocates is settled before LLVM optimises its code, which takes more than half of the time.
    quickly = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return memory_of(step.lower(*arguments).compile(quickly)).total


def measure(
    make_model: Callable[[str], nnx.Module], optimizer: optax.GradientTransformation, length: int
) -> list[Memory]:
    """Compiles the step for each batch size and loss.

    Args:
        make_model: makes the model for one of `LOSSES`; it is only traced.
        optimizer: the step's optimizer.
        length: tokens in a sequence.

    Returns:
        One entry for each of `BATCHES`.
    """

    def total(loss, batch):
        graph, params = nnx.split(nnx.eval_shape(lambda: make_model("fused" if loss == "sum" else loss)))
        loss_fn = _sum_of_hidden_states if loss == "sum" else language_model_loss
        step = jax.jit(make_step(graph, optimizer, loss_fn), donate_argnums=0)
        state = (params, jax.eval_shape(optimizer.init, params))
        return compiled_bytes(step, state, jax.ShapeDtypeStruct((batch, length), jnp.int32))

    rows = []
    for batch in BATCHES:
        without = total("sum", batch)
        totals = {loss: total(loss, batch) for loss in LOSSES}
        rows.append(Memory(batch, totals, {loss: totals[loss] - without for loss in LOSSES}))
    return rows


def table(rows: list[Memory]) -> str:
    """Sets the figures as text.

    Args:
        rows: what `measure` returns.

    Returns:
        Lines for a terminal, in MiB.
    """
    lines = [
        f"{'':>6}  {'step in total, MiB':^22}  {'the loss alone, MiB':^22}",
        f"{'batch':>6}  {'fused':>10}  {'logits':>10}  {'fused':>10}  {'logits':>10}",
    ]
    for row in rows:
        values = [row.total["fused"], row.total["logits"], row.own["fused"], row.own["logits"]]
        lines.append(f"{row.batch:>6}  " + "  ".join(f"{round(value / 2**20, 1) + 0.0:>10.1f}" for value in values))
    return "\n".join(lines)


def _sum_of_hidden_states(model: Any, tokens: jax.Array, normalizer: None) -> jax.Array:
    return jnp.sum(model.hidden_states(tokens), dtype=jnp.float32)
