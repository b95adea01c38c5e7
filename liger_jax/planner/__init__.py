"""What fits where: the memory of a training step, before it is run and without its devices.

On meshes the planner computes bytes and time: what each device holds, and which meshes are worth a try (`mesh`). The
sharding of a run is that of its `Layout`.
"""

from liger_jax.planner.architectures import architecture as architecture
from liger_jax.planner.compilers import compile_run as compile_run
from liger_jax.planner.devices import target as target
from liger_jax.planner.estimate import Estimate as Estimate
from liger_jax.planner.planning import MemoryPlan as MemoryPlan
from liger_jax.planner.planning import plan as plan
from liger_jax.planner.searching import search as search
from liger_jax.planner.step import Run as Run
