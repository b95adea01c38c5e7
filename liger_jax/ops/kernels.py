"""An op's implementations, and the choice between them, which is the same for every `implementation=`.

    Kernels ── choose(implementation, *inputs) ──► Choice ── kernel("forward", eps=eps) ──► Kernel

An op has one `Kernels`: its modules by name. A module's `unsupported(...)` says why it cannot run a case, or returns
None; "xla" has none, since it runs every case. The same sentence serves the error, the warning and the tests. A
`Kernel` is a function of the module that was chosen, with its static options. The op's differentiation rules take it as
a static argument, and call it so:

    y = kernel.run(*kernel.guarded(x, scale))
"""

import contextlib
import contextvars
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from liger_jax.ops.eager import compiled_once
from liger_jax.ops.meshes import opaque
from liger_jax.ops.place import Place, place_of
from liger_jax.pallas_kernels import hopper
from liger_jax.pallas_kernels.devices import AMPERE
from liger_jax.pallas_kernels.tiles import is_symbolic

Implementation = str | tuple[str, ...] | None

_PLATFORM_OF = {"triton": "gpu", "mosaic_gpu": "gpu", "cudnn": "gpu", "mosaic_tpu": "tpu", "splash": "tpu"}
_PARTITIONED = ("xla", "cudnn")  # the compiler splits these over a mesh; they have no interpreter
_DIFFERENTIABLE = (*_PARTITIONED, "splash")  # splash is JAX's own, and says itself that it is not partitioned
_SECOND_DERIVATIVES = "pass implementation='xla', which is plain JAX"


_noted: contextvars.ContextVar[list["Chosen"] | None] = contextvars.ContextVar("noted", default=None)


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What an op chose for a case."""

    op: str  # the op's public name
    name: str  # the implementation's
    # For each other implementation, why it cannot run the case; `None` if it could.
    others: Mapping[str, str | None]


@contextlib.contextmanager
def choices_noted() -> Iterator[list[Chosen]]:
    """A context that records the choice of each op, in the list that it yields."""
    noted: list[Chosen] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A function of the chosen module, for arrays. Kernels of the same function and options are equal."""

    op: str  # the op's public name, for messages
    is_guarded: bool  # whether the compiler can neither partition nor differentiate it
    run: Callable[..., Any]  # the function. If the kernel is guarded, pass its arrays through `guarded` first.

    def guarded(self, *arrays: Any) -> tuple[Any, ...]:
        """The arrays, or trees of them, for `run`: it is an error to partition or to differentiate its results."""
        return opaque(arrays, self.op, _SECOND_DERIVATIVES) if self.is_guarded else arrays


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation that runs a case."""

    op: str  # the op's public name, for messages
    name: str  # the implementation's, with ":interpret" if the Pallas interpreter runs it
    module: Any  # the module, or another value, that has its functions

    def kernel(self, function: str, *, is_shared: bool = True, **options: Any) -> Kernel:
        """The module's function of this name, with its static options, which must be hashable.

        All calls with equal options share it, in a cache that keeps them. `is_shared` is False where an option closes
        over what belongs to one call.
        """
        name, _, interpret = self.name.partition(":")
        label = f"{self.op}_{function}"
        make = _shared_with_options if is_shared else _with_options
        run = make(getattr(self.module, function), tuple(options.items()), name, bool(interpret), label)
        return Kernel(self.op, name not in _DIFFERENTIABLE, run)


@dataclasses.dataclass(frozen=True, eq=False)
class Kernels:
    """The implementations of an op."""

    op: str  # the op's public name, for messages
    # By name, the module with the functions, or another value with them. Each but "xla" has `unsupported(*inputs,
    # **case) -> str | None`.
    modules: Mapping[str, Any]
    # For a platform, the names to try in order when `implementation` is None; "xla" follows.
    defaults: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def choose(
        self,
        implementation: Implementation,
        *inputs: jax.Array | jax.ShapeDtypeStruct | None,
        place: Place | None = None,
        **case: Any,
    ) -> Choice:
        """The implementation that runs the op on `inputs`, arrays or their types, which is hashable.

        `implementation` is None, one name, or several names to try in order; ":interpret" after a Pallas kernel's name
        runs it in the Pallas interpreter. `place` is None for `place_of(*inputs)`, and `case` the static options, as
        `unsupported` takes them. An error says for each name that was tried why it cannot run this case.
        """
        place = place or place_of(*inputs)
        candidates = self._candidates(implementation, place.platform)
        if any(x is not None and x.size == 0 for x in inputs):
            return self.named("xla")  # nothing to compute, and Pallas has no empty grids
        reasons = []
        for name in candidates:
            reason = self._why_not(name, place, inputs, case)
            if reason is None:
                if (noted := _noted.get()) is not None:
                    others = {other: self._why_not(other, place, inputs, case) for other in self.modules}
                    noted.append(Chosen(self.op, name, {other: why for other, why in others.items() if other != name}))
                return self.named(name)
            reasons.append(f"{name!r}: {reason}")
            if implementation is not None and name != candidates[-1]:
                warnings.warn(f"{self.op}: stepping down from {reasons[-1]}", stacklevel=3)
        raise ValueError(f"{self.op} cannot run here with implementation={implementation!r}. " + " ".join(reasons))

    def named(self, name: str) -> Choice:
        """The choice of this name, as `choose` made it before."""
        return Choice(self.op, name, self.modules[name.partition(":")[0]])

    def _candidates(self, implementation: Implementation, platform: str) -> tuple[str, ...]:
        """The names to try in order. Each of them is known."""
        if implementation is None:
            candidates = (*self.defaults.get(platform, ()), "xla")
        elif isinstance(implementation, str):
            candidates = (implementation,)
        elif isinstance(implementation, tuple) and implementation and all(isinstance(n, str) for n in implementation):
            candidates = implementation
        else:
            raise TypeError(
                f"{self.op}: implementation must be None, a name or a tuple of names, got {implementation!r}; "
                f"this op has {_names(self.modules)}."
            )
        # A model hands one tuple to all of its ops, so a tuple may name kernels that only other ops have.
        known = _names(("xla", *_PLATFORM_OF) if isinstance(implementation, tuple) else self.modules)
        for name in candidates:
            if name not in known:
                raise ValueError(
                    f"{self.op}: implementation={name!r} is unknown; this op has {_names(self.modules)}. Pass one of "
                    "these, or None for the default of the platform."
                )
        return candidates

    def _why_not(self, name: str, place: Place, inputs: tuple[Any, ...], case: dict[str, Any]) -> str | None:
        """The reason why an implementation cannot run a case, or None."""
        name, _, interpret = name.partition(":")
        if name not in self.modules:
            return f"this op has {_names(self.modules)} only."
        reason = _no_interpreter(name) if interpret else _wrong_device(name, place)
        if name not in _PARTITIONED:
            reason = reason or place.mesh_refusal
        if name != "xla" and any(is_symbolic(size) for x in inputs if x is not None for size in x.shape):
            reason = reason or "its kernels are compiled for known sizes, and a shape is symbolic; use 'xla'."
        return reason or (None if name == "xla" else self.modules[name].unsupported(*inputs, **case))


def only_xla(op: str) -> Kernels:
    """The implementations of an op that is plain jnp."""
    return Kernels(op, {"xla": None})


def _with_options(
    function: Callable[..., Any], options: tuple[tuple[str, Any], ...], name: str, interpret: bool, label: str
) -> Callable[..., Any]:
    """The function of arrays alone, for the implementation of this name. A profile shows the label.

    Kernels are under jit, so that all layers of a model share one trace and lowering, which take a tenth of a second
    for a kernel of Triton's, and half a second or more for one of Hopper's.
    """
    function = functools.partial(function, **dict(options))
    if name in _PARTITIONED:
        return compiled_once(function)
    if name != "mosaic_gpu":
        function = functools.partial(function, interpret=interpret)
    else:  # These kernels have no batching rule.
        function = functools.partial(_interpreted, function) if interpret else function
    function = functools.partial(_without_x64, function)
    if name == "mosaic_gpu":
        function = jax.custom_batching.sequential_vmap(function)
    if interpret:  # Each call traces it anew, because tests patch what a trace depends on.
        return function
    vars(function)["__name__"] = label
    return jax.jit(function)


_shared_with_options = functools.cache(_with_options)


def _without_x64(function: Callable[..., Any], *arrays: Any) -> Any:
    """With `jax_enable_x64` a kernel's Python numbers would be of 64 bits beside indices of 32."""
    with jax.enable_x64(False):
        return function(*arrays)


def _interpreted(function: Callable[..., Any], *arrays: Any) -> Any:
    with hopper.interpreter(True):
        return function(*arrays)


def _names(modules: Iterable[str]) -> tuple[str, ...]:
    """All names that a user may give."""
    modules = tuple(modules)
    return modules + tuple(f"{name}:interpret" for name in modules if name not in _PARTITIONED)


def _no_interpreter(name: str) -> str | None:
    """The reason why this version of JAX cannot interpret an implementation's kernels, or None."""
    if name == "mosaic_gpu" and jax.__version_info__ < (0, 12):
        return f"JAX interprets Mosaic GPU kernels since 0.12, and this is {jax.__version__}; use a newer JAX."
    return None


def _wrong_device(name: str, place: Place) -> str | None:
    """The reason why an implementation cannot be compiled for a place's device, or None."""
    wanted, kind = _PLATFORM_OF.get(name, place.platform), place.device.device_kind
    if place.platform != wanted:
        debug = "" if name in _PARTITIONED else f", or '{name}:interpret' to debug"  # the others have an interpreter
        return f"it is compiled for {wanted} only, and this computation is for {place.platform}; use 'xla'{debug}."
    if name in ("triton", "cudnn") and place.capability < AMPERE:
        library = "Pallas-Triton" if name == "triton" else "cuDNN attention"
        return f"{library} needs compute capability 8.0 (Ampere) or newer, and this is a {kind}; use 'xla'."
    if name == "mosaic_gpu" and not place.is_hopper:
        return (
            "its instructions are Hopper's (wgmma, compute capability 9.x), and a "
            f"{kind} has none of them; use 'triton' or 'xla'."
        )
    return None
