"""Devices that are not there, as compilation targets.

    python -m tests.aot.targets h200 default|full

compiles all cases for a target and prints one line of JSON for each, in a process of its own: the compilers are
plugins, which read the environment when they start.
"""

import json
import os
import sys

from tests import _annotations

# Before JAX 0.12 Hopper's kernels cannot be interpreted: on a CPU, their annotations are then checked only here.
_annotations.check()

from liger_jax.planner.compilers import (  # noqa: E402
    TPU_ENVIRONMENT,
    gpu_devices,
    lowered_for,
    tpu_devices,
)

GPUS = ("h200", "a100-80g", "b200")
TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
# One of each kind: the only GPU that all kernels are for, and the TPU with the least memory for a program's arrays. The
# others are compiled for by `make test-targets`, in twenty minutes.
DEFAULT = ("h200", "v5e")
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    **TPU_ENVIRONMENT,
}


def main(name: str, extent: str) -> None:
    from tests.aot.programs import BOTH, GPU_ONLY, HOPPER_ONLY, TPU_ONLY

    kind = "gpu" if name in GPUS else "tpu"
    device = (gpu_devices(name) if kind == "gpu" else tpu_devices(name))[0]
    cases = BOTH + (GPU_ONLY if kind == "gpu" else TPU_ONLY) + (HOPPER_ONLY if name == "h200" else [])
    found = {}  # by programs
    for case in cases:
        if case.full and extent != "full":
            continue
        extra_bytes = None
        try:
            kernel = "mosaic_tpu" if kind == "tpu" else "mosaic_gpu" if case in HOPPER_ONLY else "triton"
            function = case.function(kernel)
            lowered = lowered_for(function, case.arguments, device, kind)
            program = lowered.as_text()
            if program not in found:  # a default is often the kernel's own case
                compiled = lowered.compile()
                found[program] = compiled.as_text() or "", compiled.memory_analysis().temp_size_in_bytes
            text, extra_bytes = found[program]
            missing = [kernel for kernel in case.kernels if kernel not in text]
            error = f"the compiled program lacks {missing}" if missing else None
        except Exception as e:
            error = f"{type(e).__name__}: {e}"[:2000]
        print(json.dumps({"target": name, "case": case.name, "error": error, "extra_bytes": extra_bytes}), flush=True)


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main(*sys.argv[1:])
