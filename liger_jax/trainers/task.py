"""What differs between methods of training: a run asks its task, and all else is the same for each of them."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from liger_jax.data.tokenizer import Tokenizer
from liger_jax.models import KernelOptions, Layout
from liger_jax.training import meshes

TEACHER = "teacher"  # the attribute of a model that has one, and a part of the paths of the teacher's variables


@runtime_checkable
class FrozenModel(Protocol):
    """A model that is not trained, and whose numbers are not read yet."""

    @property
    def stays(self) -> bool:
        """Whether it is beside the trained model in each step, as its attribute `TEACHER`; else it is there before the
        first one alone.
        """
        ...

    @property
    def config(self) -> Any:
        """Its config."""
        ...

    def num_bytes(self, dtype: str, devices: meshes.Devices, tokens: int) -> int:
        """The memory that it takes on each device."""
        ...

    def new(self, dtype: str, layout: Layout | None) -> Any:
        """A model of its structure with random weights, for its shapes."""
        ...

    def made_of(self) -> dict[str, str]:
        """Texts by which it can be told from another one."""
        ...

    def read(self, dtype: str, mesh: Any, kernels: KernelOptions) -> Any:
        """Reads it."""
        ...


@runtime_checkable
class Sampling(Protocol):
    """How the model that is trained makes the batches of its steps, from rows that are prompts."""

    def rows(self, settings: Any) -> int:
        """The number that must be divided by as many devices as split a batch."""
        ...

    def prepared(self, settings: Any, tokenizer: Tokenizer, sources: Mapping[str, list[Any]] | None = None) -> Any:
        """Makes the rows of a run. `sources`: what its data name."""
        ...

    def updates(self, settings: Any) -> int:
        """How many updates a step has, which share its learning rate."""
        ...

    def begin(self, settings: Any, data: Any, tokenizer: Tokenizer, place: Callable[[Any], Any]) -> Any:
        """What makes the steps, `rollouts.Rollouts`. `place`: puts a batch on the run's devices."""
        ...


@runtime_checkable
class Task(Protocol):
    """What a run trains for. The members are in the order in which a run asks for them; `settings` are the run's."""

    # What few methods have.
    teacher: FrozenModel | None = None  # a frozen model that the loss reads
    sampling: Sampling | None = None  # what makes the batches; `None` where the rows are the batches

    # What it trains on.
    tokenizer: type[Tokenizer] = Tokenizer  # what encodes documents

    def add_columns(self, settings: Any, data: Any) -> None:
        """Adds columns to the rows, which `before` may fill."""

    # The programs, each made of the run and its rows.
    @abc.abstractmethod
    def loss(self, settings: Any, data: Any) -> Callable[..., Any]:
        """The loss function, as `make_step` takes it with `has_aux=True`."""

    @abc.abstractmethod
    def normalizer(self, settings: Any, data: Any) -> Callable[[Any], Any]:
        """What makes the loss's denominator of a batch, as `make_step` takes it."""

    @abc.abstractmethod
    def sums(self, graph: Any, settings: Any, data: Any) -> Callable[..., Any]:
        """What some rows add to the scores of a model of structure `graph`: a jitted function of parameters, frozen
        variables and rows, which returns an array.
        """

    # What is done once and in each evaluation.
    def before(self, settings: Any, data: Any, model: Any, made_of: Mapping[str, str]) -> None:
        """Is called before the first step. `model`: the model as it was read. `made_of`: texts by which model and data
        can be told from others.
        """

    @abc.abstractmethod
    def scores(self, totals: Sequence[float]) -> dict[str, float]:
        """The scores by the names of `scored`, from the sums over all rows."""

    # What is shown and written.
    figures: tuple[str, ...] = ()  # names of what the loss function returns beside the loss
    scored: tuple[str, ...] = ()  # names of the scores, among them "eval_loss"
    shown: tuple[str, ...] = ()  # names of the figures in the progress bar
    main_figure: str = "loss"  # name of the figure whose first and last value end the run's words

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the run's table."""
        return ("step", "loss", *self.figures, "learning_rate", "tokens_per_second", "memory_gib", *self.scored)
