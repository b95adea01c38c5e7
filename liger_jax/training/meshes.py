"""The devices of a run: the mesh that its text names, or the largest one that divides it, and how arrays are sharded
over it.

A text is `axis=N` with commas, such as "fsdp=2,tensor=2". The axes are those of `Layout`:

    data       each device has its own sequences and a copy of the model
    fsdp       each device has its own sequences and a shard of the parameters and of the optimizer's state
    sequence   each device has a shard of every sequence
    expert     as fsdp, but each device has some of a mixture's experts, and computes them for all tokens
    tensor     heads, feed-forwards and the vocabulary are sharded; its devices share sequences
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax.models import KernelOptions, Layout
from liger_jax.models.core.parallel.mesh_axes import nearest_divisor
from liger_jax.ops.layout import devices_along
from liger_jax.training.compiling import compiler_options
from liger_jax.user_errors import counted

NO_MESH = Mesh(np.empty((), object), ())  # in context, calls run where they would without a mesh
AUTO = "auto"  # the text of the mesh that is chosen, which is also that of no text
BATCH_AXES = Layout.batch  # axes along which each device has its own sequences, and "expert"
# Neighbouring devices are along the last axis, "tensor", which sends most and must be within one host.
AXES = (*BATCH_AXES, "expert", "sequence", "tensor")


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a run: one device, or a mesh of several and how a model is sharded over it."""

    mesh: Mesh | None = None  # the mesh, with Auto axes; `None` for the one device that JAX takes by default
    layout: Layout | None = None  # the meaning of its axes; `None` for one device
    line: str = ""  # the devices in words, with those that stay idle; empty for a single one

    @property
    def kernels(self) -> KernelOptions:
        """The options of a model that runs on these devices."""
        return KernelOptions(layout=self.layout)

    @property
    def sizes(self) -> dict[str, int]:
        """The devices along each axis of `AXES`."""
        return dict.fromkeys(AXES, 1) | ({} if self.mesh is None else dict(self.mesh.shape))

    @property
    def layout_of_rows(self) -> Layout | None:
        """The layout of a model that generates: each device has its own rows, and with them their caches."""
        if self.sizes["tensor"] * self.sizes["sequence"] * self.sizes["expert"] == 1:
            return self.layout
        return Layout(batch=AXES, fsdp=AXES[1:])

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Puts the mesh in context, as tracing and calling a model need it."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def shardings(self, tree: Any, optimizer: Any = None) -> Any:
        """The shardings of parameters, or of parameters and an optimizer's state."""
        if self.mesh is None or self.layout is None:
            return None
        return self.layout.shardings(tree, self.mesh, optimizer)

    @property
    def whole(self) -> NamedSharding | None:
        """The sharding of a number that every device has; `None` on one device."""
        return None if self.mesh is None else NamedSharding(self.mesh, P())

    def placed(self, tree: Any, optimizer: Any = None) -> Any:
        """Puts parameters, or parameters and an optimizer's state, on their devices."""
        return tree if self.mesh is None else jax.device_put(tree, self.shardings(tree, optimizer))

    def typed(self, tree: Any, optimizer: Any = None) -> Any:
        """The types of arrays with their future shardings, for lowering a program before the arrays exist."""
        if self.mesh is None:
            return tree
        typed = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.tree.map(typed, tree, self.shardings(tree, optimizer))

    def started(self, params: Any, optimizer: Any) -> tuple[Any, Any]:
        """The first state of a run."""
        if self.mesh is None:
            return params, jax.jit(optimizer.init)(params)
        params = self.placed(params)
        _, of_state = self.shardings((params, jax.eval_shape(optimizer.init, params)), optimizer)
        return params, jax.jit(optimizer.init, out_shardings=of_state)(params)

    def jitted(self, step: Callable[..., Any], state: Any, optimizer: Any) -> Any:
        """A training step that overwrites its state in place and keeps its sharding."""
        out = {} if self.mesh is None else dict(out_shardings=(self.shardings(state, optimizer), self.whole))
        return jax.jit(step, donate_argnums=0, compiler_options=compiler_options(self.mesh), **out)

    def own_rows(self, batch: int) -> np.ndarray | None:
        """The rows of a batch that this process's devices compute."""
        if self.mesh is None or self.layout is None or jax.process_count() == 1:
            return None
        of_rows = NamedSharding(self.mesh, P(self.layout.batch))
        indices = of_rows.addressable_devices_indices_map((batch,)).values()
        places = np.arange(batch)
        return np.unique(np.concatenate([places[index] for index in indices if index is not None]))

    def place(self, batch: Any) -> Any:
        """Puts a batch on the devices, each row on the device that computes it."""
        return batch if self.mesh is None or self.layout is None else self.layout.place(batch, self.mesh)


def devices_of(model: Any) -> Devices:
    """The devices of a model of `liger_jax.models`, whose mesh is in context."""
    layout = model.kernels.layout
    return Devices() if layout is None else Devices(jax.sharding.get_mesh(), layout)


def parse_mesh(text: str) -> dict[str, int]:
    """The sizes of a mesh's axes."""
    named: dict[str, int] = {}
    for item in text.split(","):
        name, _, size = (word.strip() for word in item.partition("="))
        if name not in AXES:
            raise ValueError(
                f"mesh={text!r}: {name!r} is not an axis. The axes are {', '.join(AXES[:-1])} and {AXES[-1]}, as in "
                "'fsdp=2,tensor=2'."
            )
        if not (size.isascii() and size.isdecimal() and int(size) >= 1):
            raise ValueError(f"mesh={text!r}: {name} needs a number of devices of at least 1, as in '{name}=2'.")
        if name in named:
            raise ValueError(f"mesh={text!r} names {name} twice. Name it once.")
        named[name] = int(size)
    return dict.fromkeys(AXES, 1) | named


def in_words(sizes: Mapping[str, int]) -> str:
    """A mesh as `parse_mesh` reads it."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def layout_of(sizes: Mapping[str, int]) -> Layout:
    """The layout of such a mesh, by the names of its axes."""
    others = {name: name for name in ("tensor", "sequence", "expert") if sizes.get(name, 1) > 1}
    return Layout(**others)


def shards_of_batch(sizes: Mapping[str, int]) -> int:
    """The number of shards into which such a mesh splits a batch."""
    return devices_along(layout_of(sizes).batch, sizes)


def mesh_of(sizes: Mapping[str, int], devices: Sequence[Any]) -> Mesh:
    """The mesh of the first devices, with Auto axes. The devices of a tensor axis are neighbours."""
    shape = tuple(sizes[name] for name in AXES)
    first = devices[: math.prod(shape)]
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=first)


def chosen(
    text: str | None,
    devices: Sequence[Any],
    rows: int,
    model: Callable[[Layout], Any],
    choose: Callable[[list[Mapping[str, int]]], tuple[int, str]] | None = None,
    words: str = "",
    experts: int = 0,
) -> Devices:
    """The devices of a run: the requested mesh, or else the most devices along data and fsdp that divide batch and
    weights, or as many along expert.

    `choose` is given the sizes of such meshes of equally many devices, the most split one first and that of experts
    last, and returns an index and the reason. Without it all devices are along fsdp. `words`: what the number of rows
    is, where it is not that of the rows that are computed at once. `experts`: a number that the devices along expert
    must divide; 0 for none.
    """
    words = words or f"the {counted(rows, 'row')} that {'is' if rows == 1 else 'are'} computed at once"
    if text not in (None, AUTO):
        return _asked(text, devices, rows, model, words)
    if len(devices) == 1:
        return Devices()
    model, why = functools.cache(model), ""
    for number in range(len(devices), 0, -1):
        divisors = [n for n in range(1, number + 1) if number % n == 0] if choose else [1]
        found: list[tuple[dict[str, int], Devices]] = []
        for copies in divisors:
            named = f"fsdp={number}" if copies == 1 else f"data={copies},fsdp={number // copies}"
            try:
                found.append((sizes := parse_mesh(named), _checked(named, sizes, devices, rows, model, words)))
            except ValueError as error:
                if number == 1:  # no mesh is the cause
                    raise
                why = why or str(error)
        if choose and experts and experts % number == 0 and found and found[0][0]["fsdp"] == number > 1:
            with contextlib.suppress(ValueError):
                sizes = parse_mesh(named := f"expert={number}")
                found.append((sizes, _checked(named, sizes, devices, rows, model, words)))
        if not found and jax.process_count() > 1:
            raise ValueError(why)
        if found:
            index, reason = choose([sizes for sizes, _ in found]) if choose and len(found) > 1 else (0, "")
            sizes, of_run = found[index]
            return dataclasses.replace(of_run, line=_line(sizes, devices, reason, why))
    raise AssertionError("one device divides everything")


def _asked(text: str, devices: Sequence[Any], rows: int, model: Callable[[Layout], Any], words: str) -> Devices:
    sizes = parse_mesh(text)
    number, processes = math.prod(sizes.values()), jax.process_count()
    if number > len(devices) or processes > 1 and number != len(devices):
        most = "at most " if processes == 1 else ""
        among = "" if processes == 1 else f" in {processes} processes, all of which have to be in it"
        raise ValueError(
            f"mesh={text!r} has {number} devices, and there are {len(devices)}{among}. Let the sizes multiply to "
            f"{most}{len(devices)}, as fsdp={len(devices)} does."
        )
    return dataclasses.replace(_checked(text, sizes, devices, rows, model, words), line=_line(sizes, devices))


def _checked(
    text: str,
    sizes: Mapping[str, int],
    devices: Sequence[Any],
    rows: int,
    model: Callable[[Layout], Any],
    words: str,
) -> Devices:
    """The mesh, after a check that it divides the rows and the model; `None` for a single device."""
    shards = shards_of_batch(sizes)
    if rows % shards:
        raise ValueError(
            f"mesh={text!r} splits the batch into {shards} shards, which do not divide {words}. The nearest number "
            f"that does is {nearest_divisor(rows, shards)}; or change the batch, or its micro-batches."
        )
    layout, mesh = layout_of(sizes), mesh_of(sizes, devices)
    layout.shardings(model(layout), mesh)
    if mesh.size == 1 and devices[0] == jax.devices()[0]:
        return Devices()
    return Devices(mesh, layout)


def _line(sizes: Mapping[str, int], devices: Sequence[Any], reason: str = "", why: str = "") -> str:
    """The devices in words, the reason for their mesh, and why others are idle."""
    idle = len(devices) - math.prod(sizes.values())
    axes = in_words({name: size for name, size in sizes.items() if size > 1}) or "one"
    line = f"devices: {axes} of {len(devices)} × {devices[0].device_kind}" + (f"; {reason}" if reason else "")
    if not idle:
        return line
    return f"{line}; {idle} {'is' if idle == 1 else 'are'} idle" + (f", since {why}" if why else "")
