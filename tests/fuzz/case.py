"""What is drawn: a call as a user writes it, its formula, and the numbers that both are given."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One program, which is compiled once, and the inputs that it is run on.

    Attributes:
        name: the op or the model's family.
        ours: the call, with no `implementation=`: a function of the arrays by name. It returns floats.
        truth: the formula of the same arrays, in float64.
        inputs: draws (arrays, constants); derivatives are by the first.
        says: shapes and options, for the line that reports a miss.
        has_products: whether it multiplies matrices, whose operands an accelerator may round.
        refuses: the argument that makes this case illegal; a ValueError or TypeError must name it.
        may_refuse: arguments that may be too much to ask for, such as a small budget of memory.
        silent: gradients by name, and for each the constant that marks the rows where it must be exactly 0.
        computes_in: a dtype that it computes in, if no array has it.
        depth: how many ops follow each other.
        cancels: whether gradients may be differences of two products that are equal, as those of the scores of a token
            that sees itself alone are. The formula has 0 there, and a kernel that sums both has their rounding.
    """

    name: str
    ours: Callable[..., Any]
    truth: Callable[..., Any]
    inputs: Callable[["Draw"], tuple[Arrays, Arrays]]
    says: str = ""
    has_products: bool = False
    refuses: str | None = None
    may_refuse: tuple[str, ...] = ()
    silent: Arrays = dataclasses.field(default_factory=dict)
    computes_in: Any = None
    depth: int = 1
    cancels: bool = False


class Draw:
    """Random choices, mostly odd ones. `large` is for devices whose kernels run at sizes that a CPU would wait for."""

    def __init__(self, rng: np.random.Generator, large: bool = False) -> None:
        self.rng, self.large = rng, large

    def chance(self, probability: float) -> bool:
        return bool(self.rng.uniform() < probability)

    def pick(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def size(self, most: int, most_if_large: int | None = None, least: int = 1) -> int:
        """A length: each order of magnitude as often as the next, and three of four odd."""
        most = most_if_large if self.large and most_if_large else most
        n = int(np.exp(self.rng.uniform(np.log(max(least, 1)), np.log(most + 1))))
        n = n | 1 if self.chance(0.75) else n
        return min(max(n, least), most)

    def leading(self, most: int = 40, most_if_large: int = 700) -> tuple[int, ...]:
        """The axes before the last: of no, one or many rows, in one axis or two, or a single row without an axis."""
        rows = self.pick(0, 1, *[self.size(most, most_if_large)] * 6)
        if self.chance(0.1):
            return ()
        return (rows,) if self.chance(0.6) else (self.size(3), rows)

    def dtype(self) -> Any:
        return self.pick(*DTYPES)

    def like(self, dtype: Any) -> Any:
        """The same dtype, or now and then another."""
        return self.dtype() if self.chance(0.25) else dtype

    def optional(self, **choices: tuple[Any, ...]) -> dict[str, Any]:
        """Options, each left out half of the time, so that its default counts."""
        return {name: self.pick(*values) for name, values in choices.items() if self.chance(0.5)}

    def normal(self, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> Any:
        return jnp.asarray(scale * self.rng.standard_normal(shape), dtype)

    def uniform(self, shape: tuple[int, ...], dtype: Any, low: float = 0.5, high: float = 2.0) -> Any:
        return jnp.asarray(self.rng.uniform(low, high, shape), dtype)

    def integers(self, below: int, shape: tuple[int, ...]) -> Any:
        return jnp.asarray(self.rng.integers(0, max(below, 1), shape), jnp.int32)

    def magnitude(self) -> float:
        """A factor of a whole array: mostly 1."""
        return self.pick(1.0, 1.0, 1.0, 1e-2, 8.0)


def described(arrays: Arrays) -> str:
    """Dtypes and shapes."""
    return ", ".join(f"{name} {x.dtype}{tuple(x.shape)}" for name, x in arrays.items())


def options_text(options: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())
