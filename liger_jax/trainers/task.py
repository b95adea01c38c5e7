"""The interface of a method of training. A run calls its task for what differs; the rest is common to all methods."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from liger_jax.data.tokenizer import Tokenizer
from liger_jax.models import KernelOptions, Layout
from liger_jax.training import meshes
from liger_jax.training.row_sizes import Size

TEACHER = "teacher"  # the attribute of a student's model with the teacher, also in the paths of the teacher's variables


@runtime_checkable
class FrozenModel(Protocol):
    """A model that is not trained, and whose weights are not read yet."""

    @property
    def stays(self) -> bool:
        """Whether it runs beside the trained model in each step, as its attribute `TEACHER`; else it runs only before
        the first step.
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
        """A model of its structure with random weights, of which only the shapes are used."""
        ...

    def made_of(self) -> dict[str, str]:
        """Texts that identify it."""
        ...

    def read(self, dtype: str, mesh: Any, kernels: KernelOptions) -> Any:
        """Reads its weights."""
        ...


@runtime_checkable
class Sampling(Protocol):
    """How the model that is trained samples the batches of its steps, from rows that are prompts."""

    def rows(self, settings: Any) -> int:
        """The number of rows that must be divisible by the number of devices over which a batch is split."""
        ...

    def prepared(self, settings: Any, tokenizer: Tokenizer, sources: Mapping[str, list[Any]] | None = None) -> Any:
        """Makes the rows of a run. `sources`: its files and datasets."""
        ...

    def updates(self, settings: Any) -> int:
        """How many updates a step has, which share its learning rate."""
        ...

    def sizes(self, settings: Any, steps: int, shards: int) -> list[Size]:
        """The sizes that the rows of a step may have, for a number of devices that split its rows."""
        ...

    def begin(
        self, settings: Any, data: Any, tokenizer: Tokenizer, place: Callable[[Any], Any], sizes: Sequence[Size]
    ) -> Any:
        """The object that makes the steps, `rollouts.Rollouts`. `place`: puts a batch on the run's devices."""
        ...


@runtime_checkable
class Task(Protocol):
    """A method of training. The members are in the order in which a run uses them; `settings` are the run's."""

    # Only some methods have these.
    teacher: FrozenModel | None = None  # a frozen model that the loss reads
    sampling: Sampling | None = None  # how batches are sampled; `None` where the rows are the batches

    # The data.
    tokenizer: type[Tokenizer] = Tokenizer  # the class that encodes documents

    def add_columns(self, settings: Any, data: Any) -> None:
        """Adds columns to the rows, which `before` may fill."""

    # The programs, each made of the run and its rows.
    @abc.abstractmethod
    def loss(self, settings: Any, data: Any) -> Callable[..., Any]:
        """The loss function, as `make_step` takes it with `has_aux=True`."""

    @abc.abstractmethod
    def normalizer(self, settings: Any, data: Any) -> Callable[[Any], Any]:
        """The function that computes the loss's denominator for a batch, as `make_step` takes it."""

    @abc.abstractmethod
    def sums(self, graph: Any, settings: Any, data: Any) -> Callable[..., Any]:
        """The sums over some rows from which the scores of a model of structure `graph` are computed: a jitted function
        of parameters, frozen variables and rows, which returns an array.
        """

    # What is done once, and in each evaluation.
    def before(self, settings: Any, data: Any, model: Any, made_of: Mapping[str, str]) -> None:
        """Is called before the first step. `model`: the model as it was read. `made_of`: texts that identify model and
        data.
        """

    @abc.abstractmethod
    def scores(self, totals: Sequence[float]) -> dict[str, float]:
        """The scores by the names of `scored`, from the sums over all rows."""

    # What is printed and written.
    figures: tuple[str, ...] = ()  # names of what the loss function returns beside the loss
    scored: tuple[str, ...] = ()  # names of the scores, among them "eval_loss"
    shown: tuple[str, ...] = ()  # names of the figures in the progress bar
    main_figure: str = "loss"  # name of the figure that the run's last line has where nothing is held out
    compared: tuple[str, ...] = ("eval_loss",)  # names of the scores that the last line has, before and after the run
    only_after: tuple[str, ...] = ()  # those of them that mean nothing before the first step

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the run's table."""
        of_the_step = ("grad_norm", "learning_rate", "tokens_per_second", "memory_gib")
        return ("step", "loss", *self.figures, *of_the_step, *self.scored)
