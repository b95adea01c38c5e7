"""A user's own model on several devices: each computes its own rows, and parameters are sharded over fsdp by a rule."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax.models import Layout
from liger_jax.models.core.parallel.parameter_shards import state_shardings
from liger_jax.ops.layout import gathered, partition
from liger_jax.ops.meshes import on_devices
from liger_jax.training import meshes
from liger_jax.user_errors import UserError, user_errors

_WHOLE = "a parameter of all devices"


@dataclasses.dataclass(frozen=True)
class OwnDevices(meshes.Devices):
    """The devices of a run, whose parameters have any names and shapes."""

    def placed(self, tree: Any, optimizer: Any = None) -> Any:
        """Copies parameters to their devices; without a mesh, where they are."""
        if self.mesh is None:
            return jax.tree.map(jnp.copy, tree)
        # A whole array on a mesh may share the memory of the one that it was put there from.
        copied = lambda x, sharding: jnp.copy(jax.device_put(x, sharding))
        return jax.tree.map(copied, tree, self.shardings(tree, optimizer))

    def started(self, params: Any, optimizer: Any) -> tuple[Any, Any]:
        """The first state of a run, of copies."""
        if self.mesh is not None:
            return super().started(params, optimizer)
        return (params := self.placed(params)), optimizer.init(params)

    def shardings(self, tree: Any, optimizer: Any = None) -> Any:
        """The shardings of parameters, or of parameters and an optimizer's state."""
        if self.mesh is None:
            return None
        params, state = tree if optimizer is not None else (tree, None)
        found, structure = specs(params, self.mesh.shape), jax.tree.structure(params)
        of_params = jax.tree.unflatten(structure, [NamedSharding(self.mesh, spec) for spec in found])
        if optimizer is None:
            return of_params
        return of_params, state_shardings(optimizer, state, params, of_params, NamedSharding(self.mesh, P()))


def chosen(text: str | None, rows: int) -> OwnDevices:
    """The devices that `--mesh` asks for; without it, a run is where the model's arrays are."""
    if text is None:
        return OwnDevices()
    with user_errors():
        sizes = {} if text == meshes.AUTO else meshes.parse_mesh(text)
        if others := [name for name, size in sizes.items() if size > 1 and name not in Layout.batch]:
            raise UserError(
                f"--mesh={text}: a model of your own is split over data and fsdp alone, since how {others[0]} would "
                "split it is not known. Give the devices to fsdp."
            )
        devices = meshes.chosen(text, jax.devices(), rows, lambda layout: {})
    return OwnDevices(devices.mesh, devices.layout, devices.line)


def specs(state: Any, sizes: Mapping[str, int]) -> list[P]:
    """How each array of a state is sharded: as Flax's annotation says, or along the largest axis that fsdp divides."""
    found = []
    for path, variable in jax.tree.leaves_with_path(state, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        metadata = variable.get_metadata() if isinstance(variable, nnx.Variable) else {}
        annotated = metadata.get("out_sharding") or metadata.get("sharding_names") or ()
        named = {name for entry in annotated if entry for name in ((entry,) if isinstance(entry, str) else entry)}
        if unknown := sorted(named.difference(Layout.batch)):
            where = jax.tree_util.keystr(path, simple=True, separator=".").removeprefix("own.")
            raise UserError(
                f"--mesh: the model's {where} is annotated with the axis {unknown[0]!r}, and a run's axes are data and "
                "fsdp. Name these, or leave the annotation out."
            )
        arrays = jax.tree.leaves(variable)
        found += [P(*annotated)] * len(arrays) if named else [_by_rule(x, sizes["fsdp"]) for x in arrays]
    return found


def _by_rule(x: Any, shards: int) -> P:
    axes = [i for i, size in enumerate(x.shape) if size and size % shards == 0]
    if shards == 1 or not axes or not jnp.issubdtype(x.dtype, jnp.floating):
        return P()
    return P(*[None] * max(axes, key=lambda i: x.shape[i]), "fsdp")


def hidden_states(own: Any, input_ids: jax.Array, given: Mapping[str, jax.Array], layout: Layout) -> jax.Array:
    """The hidden states on the mesh in context: each device calls the model with its own rows and whole parameters.

    These are gathered for the forward and once more for the backward, and their gradients are reduce-scattered.
    """
    graph, state = nnx.split(own)
    arrays, structure = jax.tree.flatten(state)
    found = specs(state, jax.sharding.get_abstract_mesh().shape)
    whole = lambda x, spec: checkpoint_name(gathered(x, spec), _WHOLE) if any(spec) else x

    def local(arrays, input_ids, given):
        arrays = [whole(x, spec) for x, spec in zip(arrays, found, strict=True)]
        return nnx.merge(graph, jax.tree.unflatten(structure, arrays)).hidden_states(input_ids, **given)

    policy, rows = jax.checkpoint_policies.save_anything_except_these_names(_WHOLE), partition(layout.batch)
    of_devices = on_devices(jax.checkpoint(local, policy=policy), in_specs=(found, rows, rows), out_specs=rows)
    return of_devices(arrays, input_ids, dict(given))
