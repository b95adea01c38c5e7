"""Models on meshes: how parameters, optimizer state, batches and activations are sharded.

`Layout` names the axes. Its rules are those of fsdp and of experts (`parameter_shards`), of a tensor axis
(`tensor_shards`, `expert_shards`) and of a sequence axis (`sequence_shards`). The sharding of one op's call is in
`liger_jax.ops`.
"""
