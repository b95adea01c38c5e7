"""`liger-jax doctor`: checks the installation, and shows which kernels run here.

It prints versions, devices, their memory and links, where compiled programs are kept, and for every op the
implementation that it takes here, with the reason why a faster one does not run. If something is broken, it says the
cure, and the exit code is 1.
"""

import argparse
import os
from collections.abc import Iterator, Sequence

import jax

from liger_jax import _packages
from liger_jax.commands import _machine, _ops_here
from liger_jax.commands._exit_code import exit_code
from liger_jax.ops.kernels import Chosen
from liger_jax.pallas_kernels.devices import GIB
from liger_jax.planner import cards, links
from liger_jax.training.compiled_programs import folder

SUMMARY = "check the installation, and show which kernels run here"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds no arguments: `liger-jax doctor` has none of its own."""


def run(args: argparse.Namespace) -> int:
    """Prints what is here and what is broken. Returns the exit code: 1 if something is broken, else 0."""
    return exit_code(args, _report)


def _report() -> int:
    machine = _machine.found()
    wrong = _machine.problems(machine)
    print(*_versions(machine), *_devices(machine), *_links(machine), *_cache(), sep="\n")
    if not machine.error:
        print(*_ops(_ops_here.chosen()), sep="\n")
    for sentence in wrong:
        print(f"broken: {sentence}")
    if not wrong:
        print("nothing is broken")
    return 1 if wrong else 0


def _versions(machine: _machine.Machine) -> Iterator[str]:
    versions = machine.versions
    yield f"liger-jax {versions['liger-jax']}"
    yield _packages.packages_shown(versions)
    plugins = machine.plugins | {name: versions[name] for name in ("libtpu",) if name in versions}
    yield "plugins: " + (", ".join(f"{name} {version}" for name, version in plugins.items()) or "none")
    if machine.plugins and not machine.has_driver:
        yield "NVIDIA's driver is not here, so that the plugin only compiles for GPUs that are elsewhere"


def _devices(machine: _machine.Machine) -> Iterator[str]:
    chosen_by = f" (JAX_PLATFORMS={machine.platforms})" if machine.platforms else ""
    yield f"devices{chosen_by}: {', '.join(machine.devices) or 'none'}"
    stats = None if machine.error else jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        yield "memory: that of the machine" if machine.platform == "cpu" else "memory: the device does not tell"
        return
    text = f"memory: a process may take {stats['bytes_limit'] / GIB:.1f} GiB of each device"
    if machine.platform == "gpu":
        text += f", with {cards.FRACTION}={os.environ.get(cards.FRACTION, '0.75, the default')}"
        if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0"):
            text += ", as it needs it (XLA_PYTHON_CLIENT_PREALLOCATE)"
    yield text


def _links(machine: _machine.Machine) -> Iterator[str]:
    """The line about the links between several devices, which are measured unless they are known."""
    if machine.error or len(found := jax.devices()) < 2:
        return
    try:
        rates = links.links(found)
    except RuntimeError as error:
        yield f"links: the devices cannot send to each other: {' '.join(str(error).split())}"
        return
    how = "assumed, since they share one memory" if machine.platform == "cpu" else "of 128 MiB over all of them"
    yield f"links: each of {len(found)} devices sends: {rates}, {how}"


def _cache() -> Iterator[str]:
    """The line about compiled programs. JAX's setting is the folder in use, set by the user or by the command."""
    used = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]  # made at run time
    if not jax.config.jax_enable_compilation_cache or not used:  # pyright: ignore[reportAttributeAccessIssue]
        yield f"compiled programs are not kept: --no-cache, JAX's settings, or {folder()} cannot be written"
        return
    sizes = [entry.stat().st_size for entry in os.scandir(used) if entry.is_file()] if os.path.isdir(used) else []
    yield f"compiled programs: {len(sizes):,} files of {sum(sizes) / GIB:.2f} GiB in {used}"


def _ops(chosen: dict[str, list[Chosen]]) -> Iterator[str]:
    yield "ops, by the implementation that a forward in bfloat16 takes:"
    reasons: dict[tuple[str, str], list[str]] = {}
    for op, choices in chosen.items():
        yield f"  {op:28}{', '.join(dict.fromkeys(each.name for each in choices)) or 'xla'}"
        for each in choices:
            for name, why in each.others.items():
                if why is not None and op not in (ops := reasons.setdefault((name, why), [])):
                    ops.append(op)
    if reasons:
        yield "what does not run here, and why:"
    for (name, why), ops in reasons.items():
        yield f"  {name}, of {_listed(ops)}: {why}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
