"""Long rows: positions that the model was not trained on, and layers' inputs in the host's memory."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

from liger_jax.data.options import RowOptions
from liger_jax.models import KernelOptions, stretched
from liger_jax.models.core.memory import LayerMemory
from liger_jax.models.core.remat import Remat, is_offloaded
from liger_jax.models.core.stretched import kinds_for
from liger_jax.models.core.tiles import tokens_at_once
from liger_jax.planner import devices
from liger_jax.planner.architectures import Architecture, architecture_of
from liger_jax.planner.choosing import ways_to_offload
from liger_jax.planner.devices import GIB, PINNED_GIB, PINNED_LIMIT
from liger_jax.planner.estimate import estimate
from liger_jax.planner.step import AUTO, Run
from liger_jax.trainers import adapters
from liger_jax.trainers.options import Settings
from liger_jax.user_errors import UserError

_FEWEST = 2**14  # tokens of a micro-batch below which no model's layer inputs fill XLA's pool


def within(options: RowOptions, model: Architecture) -> tuple[RowOptions, str]:
    """Rows no longer than the model has positions for, where no length was given.

    Returns its options, and a line that says so; the line is empty if the rows are as they were.
    """
    longest = model.config.longest_sequence
    if options.rope_scaling is not None or options.length <= longest:
        return options, ""
    line = f"length: rows of {longest:,} tokens, the most that {model.name} takes, and not of {options.length:,}"
    return dataclasses.replace(options, length=longest), line


def stretched_for(
    options: RowOptions,
    model: Architecture,
    only_adapters: bool = False,
    shorter: Callable[[int], str] = "--length {}".format,
) -> Architecture:
    """The architecture for the run's rows: with a longer rotary embedding if `--rope-scaling` asks for one and rows
    need it. This is printed, since a program that loads the result must know it. `shorter`: the options of a length.
    """
    longest = model.config.longest_sequence
    try:
        config = stretched(model.config, options.length, options.rope_scaling)
    except ValueError as error:
        if options.rope_scaling is None:
            kinds = "|".join(kinds_for(model.config))
            more = f", or ask for positions that it has not seen: --rope-scaling {kinds}" if kinds else ""
            raise UserError(
                f"--length={options.length} is more than the {longest} positions of {model.name}. Pass "
                f"{shorter(longest)}{more}."
            ) from error
        raise UserError(f"--rope-scaling={options.rope_scaling}: {error}") from error
    if options.rope_scaling is None:
        return model
    if config is model.config:
        print(f"positions: {longest:,} are the model's own, and --rope-scaling changes nothing")
        return model
    print(f"positions: {config.longest_sequence:,} by {config.rope_scaling}, where the model's own are {longest:,}")
    if only_adapters:
        print(
            "the adapters belong to a model with these positions: load it with from_pretrained(…, "
            f"length={options.length}, rope_scaling={options.rope_scaling!r})"
        )
    return dataclasses.replace(model, config=config)


def let_pool_grow(settings: Settings) -> str:
    """Lets XLA's pool of pinned memory hold the layers' inputs of the run, before JAX has devices.

    The limit is no reservation: the pool grows as far as it is needed.

    Returns a line that says so; empty if the pool stays as it is.
    """
    options, placement, at_once = settings.rows, settings.placement, settings.recipe.rows_at_once
    remat: Any = placement.remat
    if remat in (None, AUTO):
        remat = ways_to_offload(options.length, whole=not options.pack)[0]
    if at_once * options.length < _FEWEST or PINNED_LIMIT in os.environ or not is_offloaded(remat):
        return ""
    config = architecture_of(adapters.found(placement.model, settings.adapters)[-1]).config
    described, dtype = devices.target(memory="2GiB").description, placement.dtype or "bfloat16"
    layer = LayerMemory(config, KernelOptions(), remat, dtype, at_once, options.length, described)
    if (limit := devices.pinned_limit(sum(count * one.offloaded for one, count in layer.each))) is None:
        return ""
    if (there := devices.machine_memory()) is not None:
        limit = min(limit, max(PINNED_GIB, there // GIB))
    os.environ[PINNED_LIMIT] = str(limit)
    return f"XLA may pin {limit} GiB of the host's memory ({PINNED_LIMIT}; by itself it stops at {PINNED_GIB})"


def in_words(remat: Remat) -> str:
    """Which of the layers' arrays are stored in the host's memory."""
    return "inputs and attention's results" if remat == "offload_attention" else "inputs"


def places(run: Run) -> Iterator[str]:
    """Lines that say where a step's arrays are stored, where that is not on the device as a whole."""
    if run.micro_batches > 1:
        yield f"batch: {run.batch} rows in {run.micro_batches} micro-batches"
    tokens = run.tokens
    at_once = tokens
    if not run.dora:
        at_once = tokens_at_once(tokens, run.model.config.hidden_size, run.layer.remat, run.tensor)
    if at_once < tokens:
        yield f"device: weights, and one layer's work, whose wide arrays are made for {at_once:,} tokens at a time"
    if host := estimate(run).host * run.target.count_on_host:
        of = "" if run.host_memory is None else f" of {run.host_memory / GIB:.1f}"
        what = f"{in_words(run.layer.remat)} of {run.model.config.num_hidden_layers} layers"
        yield f"host: the {what}, {host / GIB:.1f}{of} GiB"
