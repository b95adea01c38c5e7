"""Compilers for devices that are not attached, and the memory of a training step that they report.

A TPU is compiled for by libtpu, which knows every topology; an NVIDIA GPU by JAX's CUDA plugin, from a description of
the device. Neither needs a driver, and the extra `planner` brings both. A step is compiled and never run.
"""

import dataclasses
import importlib.util
import math
import os
import pathlib
import re
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from liger_jax._install import install_command
from liger_jax.pallas_kernels.attention import cudnn
from liger_jax.pallas_kernels.devices import GPU, GPUS, TPUS
from liger_jax.planner.devices import Target, target
from liger_jax.planner.mesh import make_mesh
from liger_jax.planner.step import Run, training_step
from liger_jax.training.compiling import compiler_options

COMPILERS = {"gpu": "jax_plugins.xla_cuda13", "tpu": "libtpu"}
# libtpu asks a cloud's metadata server for these otherwise, and refuses a second process.
TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}  # in which libtpu counts bytes
LOWERING = {"gpu": "cuda", "tpu": "tpu"}  # JAX's names of platforms when it lowers


def devices_of(of: Target) -> list[Any]:
    """The devices of a target, for meshes and shardings."""
    if of.platform == "gpu" and of.name.partition(":")[0] not in GPUS:
        raise ValueError(
            "Compiling needs to know the chip: name one, such as device='rtx4090', in addition to the memory."
        )
    need_compiler(of.platform)
    kind = of.name.partition(":")[0]
    all_devices = tpu_devices(kind, of.topology) if of.platform == "tpu" else gpu_devices(kind, of.count)
    return all_devices[: of.count]


def missing_compiler(platform: str) -> str | None:
    """Says why nothing can be compiled for a platform here."""
    try:
        is_installed = importlib.util.find_spec(COMPILERS[platform]) is not None
    except ModuleNotFoundError:
        is_installed = False
    if is_installed:
        return None
    return (
        f"the compiler for {platform} targets, {COMPILERS[platform]}, is not installed: {install_command('planner')} "
        "brings it on Linux on x86-64"
    )


def need_compiler(platform: str) -> None:
    """Refuses a platform for which nothing can be compiled here."""
    if (reason := missing_compiler(platform)) is not None:
        raise ImportError(reason)


def gpu_devices(name: str, count: int = 1) -> list[Any]:
    """GPUs that need not be there."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    jax.devices()  # JAX's own discovery of plugins goes first
    shape = target(f"{name}:{count}").topology

    def described_devices():
        return topologies.get_topology_desc(
            platform="cuda", topology_name=shape, topology=shape, target_config=_description(GPUS[name])
        ).devices

    try:
        return described_devices()
    except Exception:  # the plugin is installed and was passed over, because there is no GPU
        import jax_plugins.xla_cuda13 as plugin
        from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]  # a compiled module

        library = pathlib.Path(plugin.__file__).parent / "xla_cuda_plugin.so"
        _jax.load_pjrt_plugin("cuda", str(library), None)
        _jax.initialize_pjrt_plugin("cuda")
        return described_devices()


def _description(gpu: GPU) -> str:
    """A GPU's figures as a text protocol buffer, as the CUDA plugin's topologies take them for `target_config`.

    All have one memory bandwidth and one clock.
    """
    major, minor = gpu.capability
    return f"""gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
      shared_memory_per_core: {gpu.shared_bytes} shared_memory_per_block_optin: {gpu.block_shared_bytes}
      threads_per_core_limit: {gpu.threads} core_count: {gpu.cores} fpus_per_core: {gpu.float32_units}
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      memory_bandwidth: 2000000000000 l2_cache_size: {gpu.l2_bytes} clock_rate_ghz: 1.5
      device_memory_size: {gpu.memory_bytes} registers_per_core_limit: 65536 registers_per_block_limit: 65536
      cuda_compute_capability {{ major: {major} minor: {minor} }}
    }}
    platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
    device_description_str: "{gpu.kind}" """


def tpu_devices(name: str, topology: str | None = None) -> list[Any]:
    """TPUs that need not be there."""
    if jax.default_backend() != "tpu":
        for variable, value in TPU_ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
    tpu = TPUS[name]
    return topologies.get_topology_desc(
        platform="tpu", topology_name=f"{name}:{topology or tpu.smallest}", chip_config_name=tpu.chip_config
    ).devices


def described(device: Any, platform: str) -> AbstractDevice:
    """What ops know of a device."""
    return AbstractDevice(device.device_kind, getattr(device, "num_cores", None), platform)


def compile_for(
    function: Any, arguments: Any, device: Any, platform: str, compiler_options: dict[str, str] | None = None
) -> Any:
    """A function compiled for one device."""
    return lowered_for(function, arguments, device, platform).compile(compiler_options)


def lowered_for(function: Any, arguments: Any, device: Any, platform: str) -> jax.stages.Lowered:
    """A function lowered for one device."""
    sharding = SingleDeviceSharding(device)
    types = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in arguments]
    # By the mesh in context ops know for which device they are traced.
    mesh = AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=described(device, platform))
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(function).trace(*types)
        return traced.lower(lowering_platforms=(LOWERING[platform],))


def without_cudnn() -> str | None:
    """Says what differs where cuDNN is not installed: the models run its attention on NVIDIA GPUs."""
    gpu_devices("h200")  # where JAX looks for cuDNN before its plugin is there, it never finds it
    q = jax.ShapeDtypeStruct((1, 128, 1, 64), jax.numpy.bfloat16)
    if cudnn.why_not(q, q, capability=GPUS["h200"].capability) is None:
        return None
    return (
        "cuDNN is not installed, so attention was compiled as XLA's chunks, which need other memory: "
        + install_command("planner")
    )


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
        The memory that each device needs.

    Raises:
        ImportError: the compiler for these devices is not installed.
    """
    mesh = make_mesh(devices_of(run.target) if devices is None else devices, run.mesh)
    step, arguments = training_step(run, mesh)
    platforms = (LOWERING[run.target.platform],) if devices is None else None
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
