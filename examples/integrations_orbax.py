"""A model and its 8-bit optimizer state, saved with orbax on one mesh and read onto another, where training goes on.

    python -m examples.integrations_orbax

Orbax reads each array's parts onto the devices that the other mesh names. Leaves are saved in their order, so that
orbax need not know the types of modules and optimizers. With a single device both meshes are that device.
"""

import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

if not __package__:  # started by its path, from any folder: Python must find the packages of the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from liger_jax.models import KernelOptions, Layout, LlamaConfig, LlamaForCausalLM
from liger_jax.planner.mesh import make_mesh
from liger_jax.training import adamw_8bit, make_step

LAYOUT = Layout()  # the axes data and fsdp
CONFIG = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    tie_word_embeddings=True,
)  # fmt: skip


def types_on(mesh, state, optimizer):
    """The arrays that orbax is to make: shapes, dtypes, and how they are sharded over a mesh."""
    typed = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    return jax.tree.map(typed, state, LAYOUT.shardings(state, mesh, optimizer))


def main(steps=2):
    """Trains on a mesh, saves, goes on there and, from what was saved, on another mesh.

    Args:
        steps: before and after the checkpoint.

    Returns:
        The losses after the checkpoint on the first mesh and on the second, and the state on the second.
    """
    devices = jax.devices()
    halves = 2 if len(devices) % 2 == 0 else 1
    first = make_mesh(devices, {"data": 1, "fsdp": len(devices)})
    second = make_mesh(devices, {"data": len(devices) // halves, "fsdp": halves})
    tokens = (jax.random.randint(jax.random.key(0), (2 * steps, 4, 1), 0, 128) + jnp.arange(16)) % 128

    graph, params = nnx.split(LlamaForCausalLM(CONFIG, kernels=KernelOptions(layout=LAYOUT), rngs=nnx.Rngs(0)))
    optimizer = adamw_8bit(1e-2)
    step = jax.jit(make_step(graph, optimizer))

    def train(mesh, state, batches):
        losses = []
        with jax.set_mesh(mesh):
            for batch in jax.device_put(batches, NamedSharding(mesh, P(None, LAYOUT.batch))):
                state, loss = step(state, batch)
                losses.append(float(loss))
        return state, losses

    state = (params, optimizer.init(params))
    state, _ = train(first, jax.device_put(state, LAYOUT.shardings(state, first, optimizer)), tokens[:steps])
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "state", jax.tree.leaves(state))
        checkpointer.wait_until_finished()
        leaves = checkpointer.restore(Path(folder) / "state", jax.tree.leaves(types_on(second, state, optimizer)))
    moved = jax.tree.unflatten(jax.tree.structure(state), leaves)

    _, here = train(first, state, tokens[steps:])
    there_state, there = train(second, moved, tokens[steps:])
    print(f"losses on {dict(first.shape)}: {here}, on {dict(second.shape)}: {there}")
    return here, there, there_state


if __name__ == "__main__":
    main()
