"""How an op chooses its kernel: the device, the names, and the one loop behind every `implementation=`.

Each op hands over its kernel modules by name. A module says in `unsupported(...)` why it cannot run a case, or
returns `None`; the same sentence serves the error, the warning and the tests.
"""

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractDevice

from liger_jax.ops._mesh import needs_shard_map, opaque
from liger_jax.pallas_kernels import _hopper

Implementation = str | tuple[str, ...] | None

_TWICE = "pass implementation='xla', which is plain JAX"
_PLATFORM_OF = {"triton": "gpu", "mosaic_gpu": "gpu", "cudnn": "gpu", "mosaic_tpu": "tpu", "splash": "tpu"}
_PARTITIONED = ("xla", "cudnn")  # by the compiler, over a mesh; and these have no interpreter
_GPU_NAMES = ("gpu", "cuda", "rocm")
_HOPPER = ("H100", "H200", "H800", "H20", "GH200")
# Triton's matrix instructions need sm_80; these begin the product names of what came before it. Not "RTX 20": the
# RTX 2000 Ada is newer.
_BEFORE_AMPERE = (
    *("T4", "V100", "GV100", "P100", "P40", "P4", "M40", "M60", "K80"),
    *("GTX", "TITAN", "RTX 2060", "RTX 2070", "RTX 2080", "Quadro RTX", "Quadro P", "Quadro T"),
)


def device_of(*inputs: jax.Array | None) -> AbstractDevice:
    """Says for which device a computation on `inputs` is meant.

    In this order: the device that holds a concrete input, the mesh in an input's type, the mesh in context,
    `jax_default_device`, the default backend. Meshes know their device without its being there, so programs
    can be compiled ahead of time.

    Args:
        *inputs: arrays or tracers of any shape and dtype; `None` entries are passed over.

    Returns:
        A `jax.sharding.AbstractDevice` whose `platform` is `"cpu"`, `"gpu"` or `"tpu"`.
    """
    arrays = [x for x in inputs if x is not None]
    for x in arrays:
        if not isinstance(x, Tracer) and isinstance(x, jax.Array):
            return described(next(iter(x.devices())))
    meshes = [jax.typeof(x).sharding.mesh for x in arrays] + [jax.sharding.get_abstract_mesh()]
    for mesh in meshes:
        if mesh.abstract_device is not None:
            device = mesh.abstract_device
            return AbstractDevice(device.device_kind, device.num_cores, _platform_name(device.platform))
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]  # made at run time
    if isinstance(default, jax.Device):
        return described(default)
    platform = default if isinstance(default, str) else jax.default_backend()
    return described(jax.local_devices(backend=platform)[0])


def described(device: Any) -> AbstractDevice:
    """What programs can know of a device: its kind and platform."""
    return AbstractDevice(device.device_kind, None, _platform_name(device.platform))


def memory_of_device(*inputs: jax.Array | None) -> int | None:
    """The memory in bytes of the device that `device_of` names, where it is there and tells."""
    kind = device_of(*inputs).device_kind
    try:
        device = next(device for device in jax.local_devices() if device.device_kind == kind)
        return (device.memory_stats() or {}).get("bytes_limit")
    except (RuntimeError, StopIteration):
        return None


def _platform_name(platform: str) -> str:
    return "gpu" if platform in _GPU_NAMES else platform


def choose(
    op: str,
    kernels: Mapping[str, Any],
    defaults: Mapping[str, tuple[str, ...]],
    implementation: Implementation,
    *inputs: jax.Array | jax.ShapeDtypeStruct | None,
    device: AbstractDevice | None = None,
    **case: Any,
) -> str:
    """Chooses the kernel that runs `op` on `inputs`.

    Args:
        op: the op's public name, for messages.
        kernels: the op's kernels by name; each has `unsupported(*inputs, **case) -> str | None`.
        defaults: for a platform, the names to try in order when `implementation` is `None`; `"xla"` follows.
        implementation: `None`, one name, or several names to try in order. `":interpret"` behind a Pallas
            kernel's name runs it in the Pallas interpreter, on any platform.
        *inputs: the op's array arguments, or their types.
        device: the device to choose for; `None` for `device_of(*inputs)`.
        **case: its static options, as `unsupported` takes them.

    Returns:
        The name chosen, for `bind`.

    Raises:
        ValueError: a name is unknown, or no named kernel can run this case; the message says why for each.
        TypeError: `implementation` is neither a string, a tuple of strings nor `None`.
    """
    device = device or device_of(*inputs)
    if implementation is None:
        candidates = (*defaults.get(device.platform, ()), "xla")
    elif isinstance(implementation, str):
        candidates = (implementation,)
    elif isinstance(implementation, tuple) and implementation and all(isinstance(n, str) for n in implementation):
        candidates = implementation
    else:
        raise TypeError(
            f"{op}: implementation must be None, a name or a tuple of names, got {implementation!r}; "
            f"this op has {_names(kernels)}."
        )
    for name in candidates:
        # A tuple, which a model hands to all of its ops, may name kernels that only others have.
        if name not in _names(("xla", *_PLATFORM_OF) if isinstance(implementation, tuple) else kernels):
            raise ValueError(
                f"{op}: implementation={name!r} is unknown; this op has {_names(kernels)}. Pass one of these, "
                "or None for the default of the platform."
            )
    if any(x is not None and x.size == 0 for x in inputs):
        return "xla"  # nothing to compute, and Pallas has no empty grids
    reasons = []
    for name in candidates:
        kernel, _, interpret = name.partition(":")
        if kernel not in kernels:
            reason = f"this op has {_names(kernels)} only."
        else:
            reason = _no_interpreter(kernel) if interpret else _wrong_device(kernel, device)
            if kernel not in _PARTITIONED:
                reason = reason or needs_shard_map(*(x for x in inputs if isinstance(x, jax.Array)))
            reason = reason or kernels[kernel].unsupported(*inputs, **case)
        if reason is None:
            return name
        reasons.append(f"{name!r}: {reason}")
        if implementation is not None and name != candidates[-1]:
            warnings.warn(f"{op}: stepping down from {reasons[-1]}", stacklevel=3)
    raise ValueError(f"{op} cannot run here with implementation={implementation!r}. " + " ".join(reasons))


def bind(op: str, kernels: Mapping[str, Any], choice: str, function: str) -> Callable[..., Any]:
    """Takes `function` from the module that `choose` named; Pallas kernels are `opaque`.

    Args:
        op: the op's public name, for messages.
        kernels: the op's kernels by name.
        choice: what `choose` returned.
        function: the function's name there.

    Returns:
        The function; it takes arrays and the op's static options.
    """
    name, _, interpret = choice.partition(":")
    kernel = getattr(kernels[name], function)
    if name in _PARTITIONED:
        return kernel
    if name == "splash":  # JAX's own, which has derivatives and refuses to be partitioned
        return functools.partial(kernel, interpret=bool(interpret))

    def run(*arrays, **options):
        arrays = opaque(arrays, op, _TWICE)
        if name == "mosaic_gpu":
            return _mosaic_gpu(kernel, bool(interpret), tuple(options.items()))(*arrays)
        return kernel(*arrays, **options, interpret=bool(interpret))

    return run


@functools.cache
def _mosaic_gpu(
    kernel: Callable[..., Any], interpret: bool, options: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    """The kernel under jit, by which a model's layers share one: it takes half a second and more to lower.

    Simulated it is traced each time, for tests that change what it is traced for.
    """

    @jax.custom_batching.sequential_vmap  # these kernels have no batching rule
    def one(*arrays):
        with _hopper.interpreter(interpret):
            return kernel(*arrays, **dict(options))

    return one if interpret else jax.jit(one)


def current_precision(precision: Any) -> Any:
    """The precision of an op's products, fixed now: the backward is traced after a user's context manager is left.

    Args:
        precision: as `jax.lax.dot_general` takes it; None for `jax.default_matmul_precision`.

    Returns:
        A precision, a preset, or None where nothing is set.
    """
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]  # as above
    try:
        return jax.lax.Precision(precision) if isinstance(precision, str) else precision
    except ValueError:
        return jax.lax.DotAlgorithmPreset[precision]


def _names(kernels: Iterable[str]) -> tuple[str, ...]:
    kernels = tuple(kernels)
    return kernels + tuple(f"{name}:interpret" for name in kernels if name not in _PARTITIONED)


def _no_interpreter(kernel: str) -> str | None:
    if kernel == "mosaic_gpu" and jax.__version_info__ < (0, 12):
        return f"JAX interprets Mosaic GPU kernels since 0.12, and this is {jax.__version__}; use a newer JAX."
    return None


def _wrong_device(kernel: str, device: AbstractDevice) -> str | None:
    """The reason why `kernel` cannot be compiled for `device`, or None."""
    wanted = _PLATFORM_OF.get(kernel, device.platform)
    if device.platform != wanted:
        return (
            f"it is compiled for {wanted} only, and this computation is for {device.platform}; "
            f"use 'xla', or '{kernel}:interpret' to debug."
        )
    if kernel in ("triton", "cudnn") and is_before_ampere(device.device_kind):
        library = "Pallas-Triton" if kernel == "triton" else "cuDNN attention"
        return (
            f"{library} needs compute capability 8.0 (Ampere) or newer, and this is a {device.device_kind}; use 'xla'."
        )
    if kernel == "mosaic_gpu" and not is_hopper(device.device_kind):
        return (
            f"its instructions are Hopper's (compute capability 9.0), and this is a {device.device_kind}; "
            "use 'triton' or 'xla'."
        )
    return None


def is_hopper(device_kind: str) -> bool:
    """Whether a GPU of this name has Hopper's matrix units."""
    return any(f" {name}" in f" {device_kind.replace('-', ' ')} " for name in _HOPPER)


def is_before_ampere(device_kind: str) -> bool:
    """Whether a GPU of this name is too old for Triton's matrix instructions."""
    words = f" {device_kind.replace('-', ' ')} "
    return any(f" {name}" in words for name in _BEFORE_AMPERE)
