"""What layers keep, and in how many micro-batches, where a run leaves it open: the fastest way that fits.

The planner decides, for commands, trainers and plans alike: from the run, the devices' memory and the host's, by
estimates of memory and time alone. So equal runs on equal devices have equal choices.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from liger_jax.models.core.layer_stack import kinds_of, modes_of
from liger_jax.models.core.remat import Mode
from liger_jax.planner.devices import AMPERE, NEAR
from liger_jax.planner.estimate import estimate
from liger_jax.planner.speed import speed
from liger_jax.planner.step import Run

# The share of a device's memory that stays free where layers keep products that they need not: an estimate is as near
# as this on one GPU, and as `NEAR` elsewhere.
SPARE = 0.06
_OLD = 0.2  # the same before Ampere, where arrays in bfloat16 are computed in float32
# What a number of layers must save of the time: a second loop is compiled for it.
_SECOND_LOOP = 0.02
# Tokens of a row from which it is faster to fetch attention's result from the host than to recompute it: on an H200 a
# step with rows of 32,768 takes 0.94 of the time, and with rows of 16,384 0.96, for twice the host's memory.
_LONG = 2**15


@dataclasses.dataclass(frozen=True)
class Choice:
    """A run, decided, and why.

    Attributes:
        run: the run with its `remat` and `micro_batches`.
        reason: in a few words.
        is_first: whether more memory would change nothing.
    """

    run: Run
    reason: str
    is_first: bool

    @property
    def line(self) -> str:
        """The choice in a line of a run."""
        return f"remat: {in_words(self.run)}; {self.reason}"


def in_words(run: Run) -> str:
    """What layers keep.

    Returns such as "16: the products of 16 of 32 layers".
    """
    count = run.model.config.num_hidden_layers
    kept = modes_of(kinds_of(run.model.config), run.remat).count("dots")
    if isinstance(run.remat, int):
        return f"{run.remat}, the products of {kept} of {count} layers are kept"
    return {
        "none": "none, layers keep all that is not made in one pass",
        "dots": f"dots, the products of all {count} layers are kept",
        "full": "full, layers keep their inputs and are computed again",
        "offload": "offload, layers' inputs are kept on the host",
        "offload_attention": "offload_attention, layers' inputs and attention's results are kept on the host",
    }[run.remat]


def chosen(
    run: Run,
    *,
    remat_is_open: bool = True,
    cuts_are_open: bool = True,
    keeps_products: bool = True,
    needs: Callable[[Run], int] = lambda run: estimate(run).total,
    spare: float | None = None,
    reserved: int = 0,
    in_steps: Callable[[Run], Run] = lambda run: run,
) -> Choice | None:
    """The fastest way of a run that fits.

    On a CPU, which shares its memory and compiles for seconds, layers are computed again: "full", in as few
    micro-batches as fit. The losses of a mixture's routers depend on the number of micro-batches, so that one is taken
    if any way of it fits.

    Args:
        run: the run. Its `remat` and `micro_batches` stay as they are where they are not open.
        remat_is_open: whether `remat` is decided.
        cuts_are_open: whether `micro_batches` is decided.
        keeps_products: whether layers may keep products. Without them the first way that fits is taken: few
            micro-batches before more, and the device before the host.
        needs: the bytes of a run on each device.
        spare: the share of the memory that products leave free; `None` for one by the devices.
        reserved: bytes that they leave free beside that.
        in_steps: returns a way with the rows that its steps have.

    Returns:
        The choice; `None` where nothing fits.
    """
    if spare is None:
        is_one_gpu = run.target.platform == "gpu" and run.target.count == 1
        is_old = (0, 0) < run.target.capability < AMPERE
        spare = NEAR if not is_one_gpu else _OLD if is_old else SPARE
    capacity, host_memory = run.target.capacity_bytes, run.host_memory
    seconds = lambda way: speed(in_steps(way)).seconds
    bytes_of = lambda way: needs(in_steps(way))
    fits = lambda way: bytes_of(way) <= capacity and (host_memory is None or _on_host(in_steps(way)) <= host_memory)
    roomy = lambda way, spare=spare: bytes_of(way) <= (1 - spare) * capacity - reserved
    ways = _ways(run, remat_is_open, cuts_are_open)
    if not keeps_products or run.target.platform == "cpu" or not remat_is_open:
        first = next(filter(fits, ways), None)
        return None if first is None else Choice(first, "the first that fits", first == ways[0])
    fitting: list[Run] = []
    least = min(way.micro_batches for way in ways)
    for count in sorted({way.micro_batches for way in ways}):
        own = [way for way in ways if way.micro_batches == count and fits(way)]
        if own:  # products take more than any of these
            own += _with_products(dataclasses.replace(run, micro_batches=count), roomy, seconds)
        fitting += own
        # More micro-batches only leave room for more products.
        if fitting and depends_on_cuts(run) or any(way.remat in ("dots", "none") for way in own):
            break
    if not fitting:
        return None
    plain = next((way for way in fitting if way.remat == "full"), None)
    # What fits on the device leaves the host half of its memory.
    half = lambda way: plain is None or host_memory is None or 2 * _on_host(in_steps(way)) <= host_memory
    best = min(filter(half, fitting), key=seconds)
    share = None if plain in (None, best) else seconds(best) / seconds(plain)
    room = any(way.micro_batches == least and way.remat in ("dots", "none") for way in fitting)
    is_first = room and best.micro_batches == least
    return Choice(best, _reason(best, plain, share), is_first)


def smallest(
    run: Run,
    *,
    remat_is_open: bool = True,
    cuts_are_open: bool = True,
    in_steps: Callable[[Run], Run] = lambda run: run,
) -> Run:
    """The way of a run that needs least of the devices' memory, and no more of the host's than there is."""

    def size(way: Run) -> tuple[bool, int]:
        way = in_steps(way)
        return run.host_memory is not None and _on_host(way) > run.host_memory, estimate(way).total

    return min(_ways(run, remat_is_open, cuts_are_open), key=size)


def _ways(run: Run, remat_is_open: bool, cuts_are_open: bool) -> list[Run]:
    """The ways of a run in which layers keep no products: few micro-batches before more, the device before the host."""
    remats: list[Any] = ["full", *ways_to_offload_of(run)] if remat_is_open else [run.remat]
    counts = run.micro_batch_choices if cuts_are_open else [run.micro_batches]
    return [dataclasses.replace(run, remat=remat, micro_batches=count) for remat in remats for count in counts]


def _on_host(run: Run) -> int:
    """Bytes that the run's devices have in their host's memory."""
    return estimate(run).host * run.target.count_on_host


def _with_products(run: Run, roomy: Callable[..., bool], seconds: Callable[[Run], float]) -> Iterator[Run]:
    """The ways in which layers keep products, and that leave room."""
    way = lambda remat: dataclasses.replace(run, remat=remat)
    count = run.model.config.num_hidden_layers
    most = count if roomy(way("dots")) else _most(count, lambda n: roomy(way(n)))
    if most == count:
        yield way("dots")
        if roomy(way("none"), NEAR):
            yield way("none")
        return
    kept = modes_of(kinds_of(run.model.config), most).count("dots")
    if kept and seconds(way(kept)) <= (1 - _SECOND_LOOP) * seconds(way("full")):
        yield way(kept)


def ways_to_offload(length: int, *, whole: bool) -> list[Mode]:
    """The values of `remat` that offload layers' arrays to the host's memory.

    `whole`: whether a row is one document, and its layers have no windows.
    """
    return ["offload_attention", "offload"] if length >= _LONG and whole else ["offload"]


def ways_to_offload_of(run: Run) -> list[Mode]:
    """The same for a run; none on a CPU."""
    if run.target.platform == "cpu":
        return []
    config = run.model.config
    windows = any(config.window_of(kind) for kind in config.layer_types)
    return ways_to_offload(run.seq, whole=not run.packed and not windows)


def _most(count: int, fits: Callable[[int], bool]) -> int:
    """The largest number of layers below `count` that fits; 0 if none does."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def depends_on_cuts(run: Run) -> bool:
    """Whether the loss depends on the number of micro-batches: the losses of routers are of a micro-batch's tokens."""
    config: Any = run.model.config
    return config.experts is not None and bool(config.output_router_logits or config.router_z_loss_coef)


def _reason(best: Run, plain: Run | None, share: float | None) -> str:
    changes = " (their number changes the routers' losses)" if depends_on_cuts(best) and best.micro_batches > 1 else ""
    if plain is None:
        return f"the fastest that fits, where full does not fit{changes}"
    if share is None:
        return f"the fastest that fits, by the planner's estimate{changes}"
    return f"the fastest that fits: {share:.2f} of the time of full by the planner's estimate{changes}"
