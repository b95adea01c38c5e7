"""The memory of a training step by its compiler's account: the step is compiled for its devices and never run."""

import dataclasses
import math
import re
from typing import Any

import jax

from liger_jax.planner import compilers
from liger_jax.planner.mesh import make_mesh
from liger_jax.planner.step import Run, training_step
from liger_jax.training.compiling import compiler_options

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Bytes of a step on each device."""

    total: int  # arguments, results and temporaries; a donated argument and its result count once
    arguments: int  # parameters, optimizer state and tokens
    temporaries: int  # what lives only within the step
    # The compiled program, or None where the compiler refused to make one with so much memory.
    program: Any = dataclasses.field(default=None, repr=False, compare=False)


def compile_run(run: Run, devices: list[Any] | None = None) -> Compiled:
    """Compiles the step for the run's devices.

    Args:
        run: what is trained.
        devices: devices to compile for instead, such as this machine's own; as many as the run's.

    Returns:
        What each device needs.

    Raises:
        ImportError: the compiler for these devices is not installed.
    """
    mesh = make_mesh(compilers.devices(run.target) if devices is None else devices, run.mesh)
    step, arguments = training_step(run, mesh)
    platforms = (compilers.LOWERING[run.target.platform],) if devices is None else None
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = step.trace(*arguments).lower(lowering_platforms=platforms)
    try:
        program = lowered.compile(compiler_options(mesh))
    except jax.errors.JaxRuntimeError as error:
        held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(arguments))
        if (total := _refused(str(error), held)) is None:
            raise
        return Compiled(total, held, total - held)
    return memory_of(program)


def memory_of(program: Any) -> Compiled:
    """What a compiled program needs on each device."""
    memory = program.memory_analysis()
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    (device, *_) = jax.tree.leaves(program.output_shardings)[0].device_set
    if device.platform == "tpu":
        # libtpu's temporaries include some whose lives do not overlap, up to a third more than the peak. It compares
        # the peak with the memory: 70 billion parameters pass on v6e:8x8, whose 31 GiB are less than the 38 GiB of
        # arguments and temporaries.
        return Compiled(memory.peak_memory_in_bytes, arguments, memory.peak_memory_in_bytes - arguments, program)
    total = arguments + temporaries + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(total, arguments, temporaries, program)


def _refused(message: str, arguments: int) -> int | None:
    """The bytes that a program needs, from libtpu's refusal, which names all of them or the temporaries alone."""
    if match := re.search(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", message):
        return int(float(match[1]) * _UNITS[match[2]])
    if match := re.search(r"required for HLO temporaries \(([\d.]+)([KMGT]?)\)", message):
        return int(float(match[1]) * _UNITS[match[2]]) + arguments
    return None
