"""The model of a run, its dtypes, and how a step uses memory and devices."""

import dataclasses
from typing import ClassVar

from liger_jax import _options
from liger_jax._options import option
from liger_jax.ops.block_quantized import KINDS
from liger_jax.planner import defaults
from liger_jax.planner.step import REMATS, as_remat
from liger_jax.training.meshes import AUTO, parse_mesh
from liger_jax.user_errors import user_errors

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which model is trained, in which dtypes, and how a step uses memory and devices."""

    group_of_options: ClassVar = "speed and memory"

    model: str = option(
        help="a checkpoint's folder or id, such as Qwen/Qwen2.5-0.5B; or adapters", group="model", first=True
    )
    quantize: str | None = option(
        None, "quantize the frozen weights of the layers to 4 or 8 bits", choices=KINDS, group="adapters", first=True
    )
    mesh: str | None = option(
        None, "devices along each mesh axis: fsdp=2,tensor=2 (default: auto, the fastest of data, fsdp and expert)",
        of_run=False, group="several devices"
    )  # fmt: skip
    distributed: str | None = option(
        None,
        "join the run's other processes: HOST:PORT,INDEX/NUMBER, or no value under SLURM, Open MPI and on cloud TPUs",
        of_run=False, in_file=False, of_all=False, nargs="?", const="", metavar="PLACE", group="several devices"
    )  # fmt: skip
    # `None` for the planner's choice, which a run keeps when it resumes; `"auto"` chooses anew then.
    remat: str | int | None = option(
        None,
        "what layers keep for the backward, or how many of the last ones keep their products (default: auto, the "
        "fastest that fits)",
        choices=REMATS, type=as_remat, of_run=False,
    )  # fmt: skip
    dtype: str | None = option(None, "dtype of the computation (default: bfloat16, on a CPU float32)", choices=DTYPES)
    param_dtype: str | None = option(
        None, "dtype of the weights (default: float32, with --lora the checkpoint's)", choices=DTYPES
    )
    verify: bool = option(
        False, "read all weights of the model to check that they have not changed since the run began", of_run=False,
        in_file=False, group="what is kept"
    )  # fmt: skip
    risk_memory: bool = option(False, "start even if the planner estimates that the run does not fit", of_run=False)

    def __post_init__(self):
        _options.check(self)
        if self.mesh not in (None, AUTO):
            with user_errors():
                parse_mesh(self.mesh)

    def precision(self, lora: int | None, stored: str) -> dict[str, str]:
        """The dtypes of a run's computation and weights."""
        return dict(
            dtype=self.dtype or defaults.dtype(),
            param_dtype=self.param_dtype or defaults.param_dtype(lora, stored),
        )
