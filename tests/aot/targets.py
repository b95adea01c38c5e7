"""Devices that are not there, as compilation targets.

    python -m tests.aot.targets gpu|tpu default|full

compiles all cases for all targets of a kind and prints one line of JSON for each. It runs in a process of its own:
the compilers are loaded as plugins, and libtpu takes its settings from the environment.
"""

import json
import os
import sys

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

GIB = 2**30
# cores, shared memory a core and (opt-in) a block, compute capability, memory, L2, float32 units a core
GPUS = {
    "NVIDIA H200": (132, 233472, 232448, (9, 0), 140 * GIB, 50 * 2**20, 128, 2048),
    "NVIDIA A100-SXM4-80GB": (108, 167936, 166912, (8, 0), 80 * GIB, 40 * 2**20, 64, 2048),
    "Tesla T4": (40, 65536, 65536, (7, 5), 15843721216, 4 * 2**20, 64, 1024),
}
TPUS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
DEFAULT = ("NVIDIA H200", "v5e")  # the others are compiled for in the full suite: two minutes more
TPU_ENVIRONMENT = {  # libtpu asks a cloud's metadata server for these otherwise
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    **TPU_ENVIRONMENT,
}


def gpu_description(name: str) -> str:
    """The compiler's description of a GPU, as a text protocol buffer."""
    cores, shared, shared_optin, (major, minor), memory, l2, fpus, threads = GPUS[name]
    return f"""gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
      shared_memory_per_core: {shared} threads_per_core_limit: {threads} core_count: {cores} fpus_per_core: {fpus}
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      memory_bandwidth: 2000000000000 l2_cache_size: {l2} clock_rate_ghz: 1.5 device_memory_size: {memory}
      shared_memory_per_block_optin: {shared_optin} registers_per_core_limit: 65536 registers_per_block_limit: 65536
      cuda_compute_capability {{ major: {major} minor: {minor} }}
    }}
    platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "{name}" """


def gpu_devices(name: str, count: int = 1):
    """`count` devices of that GPU on one host."""
    jax.devices()  # JAX's own discovery of plugins goes first
    shape = f"1x1x{count}"
    describe = lambda: topologies.get_topology_desc(
        platform="cuda", topology_name=shape, topology=shape, target_config=gpu_description(name)
    )
    try:
        return describe().devices
    except Exception:  # the plugin is installed and was passed over, because there is no GPU
        import pathlib

        import jax_plugins.xla_cuda13 as plugin
        from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]  # a compiled module

        library = pathlib.Path(plugin.__file__).parent / "xla_cuda_plugin.so"
        _jax.load_pjrt_plugin("cuda", str(library), None)
        _jax.initialize_pjrt_plugin("cuda")
        return describe().devices


def tpu_devices(name: str):
    return topologies.get_topology_desc(platform="tpu", topology_name=TPUS[name]).devices


def context(device, platform: str):
    """A mesh context by which ops know for which device they are traced."""
    mesh = AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=described(device, platform))
    return jax.sharding.use_abstract_mesh(mesh)


def described(device, platform: str) -> AbstractDevice:
    return AbstractDevice(device.device_kind, None, platform)


def compile_for(function, arguments, device, platform: str, compiler_options: dict[str, str] | None = None):
    """The program of `function` compiled for `device`; arguments are (shape, dtype) pairs."""
    sharding = SingleDeviceSharding(device)
    types = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in arguments]
    with context(device, platform):
        traced = jax.jit(function).trace(*types)
        lowered = traced.lower(lowering_platforms=("cuda" if platform == "gpu" else "tpu",))
        return lowered.compile(compiler_options)


def main(kind: str, extent: str) -> None:
    from tests.aot.programs import BOTH, GPU_ONLY, HOPPER_ONLY, TPU_ONLY

    names = [name for name in GPUS if name != "Tesla T4"] if kind == "gpu" else list(TPUS)
    names = [name for name in names if extent == "full" or name in DEFAULT]
    cases = [case for case in BOTH + (GPU_ONLY if kind == "gpu" else TPU_ONLY) if extent == "full" or not case.full]
    for name in names:
        device = (gpu_devices(name) if kind == "gpu" else tpu_devices(name))[0]
        hopper = [case for case in HOPPER_ONLY if name == "NVIDIA H200" and (extent == "full" or not case.full)]
        for case in cases + hopper:
            extra_bytes = None
            try:
                kernel = "mosaic_gpu" if case in hopper else "triton" if kind == "gpu" else "mosaic_tpu"
                function = case.function(kernel)
                compiled = compile_for(function, case.arguments, device, kind)
                text, extra_bytes = compiled.as_text() or "", compiled.memory_analysis().temp_size_in_bytes
                missing = [kernel for kernel in case.kernels if kernel not in text]
                error = f"the compiled program lacks {missing}" if missing else None
            except Exception as e:
                error = f"{type(e).__name__}: {e}"[:2000]
            row = {"target": name, "case": case.name, "error": error, "extra_bytes": extra_bytes}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main(*sys.argv[1:])
