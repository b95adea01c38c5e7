"""What models know of meshes: how parameters, optimizer state, batches and activations are sharded.

`Layout` says by which axes. It is made of shards by fsdp and by experts (`parameter_shards`), by a tensor axis
(`tensor_shards`, `expert_shards`) and by a sequence axis (`sequence_shards`). How one call is split is known to
`liger_jax.ops`.
"""
