"""Devices that are not there, as compilation targets.

    python -m tests.aot.targets gpu|tpu default|full

compiles all cases for all targets of a kind and prints one line of JSON for each. It runs in its own process:
the compilers are loaded as plugins, and libtpu takes its settings from the environment.
"""

import json
import os
import sys

from tests import _annotations

# Before JAX 0.12 Hopper's kernels cannot be interpreted: on a CPU, their annotations are then checked only here.
_annotations.check()

from liger_jax.planner.compilers import TPU_ENVIRONMENT, gpu_devices, lowered_for, tpu_devices  # noqa: E402

GPUS = ("h200", "a100-80g", "b200")
TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
DEFAULT = ("h200", "v5e")  # the others are compiled for in the full suite: two minutes more
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    **TPU_ENVIRONMENT,
}


def main(kind: str, extent: str) -> None:
    from tests.aot.programs import BOTH, GPU_ONLY, HOPPER_ONLY, TPU_ONLY

    names = [name for name in (GPUS if kind == "gpu" else TPUS) if extent == "full" or name in DEFAULT]
    cases = [case for case in BOTH + (GPU_ONLY if kind == "gpu" else TPU_ONLY) if extent == "full" or not case.full]
    for name in names:
        device = (gpu_devices(name) if kind == "gpu" else tpu_devices(name))[0]
        found = {}  # by programs
        hopper = [case for case in HOPPER_ONLY if name == "h200" and (extent == "full" or not case.full)]
        for case in cases + hopper:
            extra_bytes = None
            try:
                kernel = "mosaic_gpu" if case in hopper else "triton" if kind == "gpu" else "mosaic_tpu"
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
            row = {"target": name, "case": case.name, "error": error, "extra_bytes": extra_bytes}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main(*sys.argv[1:])
