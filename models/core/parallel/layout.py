"""The axes of a mesh over which parameters, optimizer state, activations and a kernel's inputs are sharded."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax.models.core.parallel.mesh_axes import open_axes, placed, sizes_of
from liger_jax.models.core.parallel.parameter_shards import ParameterShards, on_shards, state_shardings
from liger_jax.models.core.parallel.sequence_shards import SequenceShards
from liger_jax.models.core.parallel.tensor_shards import TensorShards
from liger_jax.models.core.parallel.vocabulary_shards import loss_on_shards
from liger_jax.models.core.parameters import ParameterInfo, parameter, path_of
from liger_jax.ops.layout import Names, along, devices_along, names, partition


@dataclasses.dataclass(frozen=True)
class Layout:
    """How batch and parameters are sharded over the axes of a mesh: FSDP, tensor, sequence and expert parallelism.

    Each device computes its sequences, or shares the work on them with the other devices of a tensor or sequence axis.
    A layer's parameters are gathered over fsdp where they are used, and their gradients are reduce-scattered. The
    mesh's axes may be Auto or Explicit. Axes that are already Manual, inside a `jax.shard_map`, are not used.

    Args:
        batch: the axes over which the batch is sharded.
        fsdp: the axis over which parameters and optimizer state are sharded, to which the sequence axis is added; or a
            tuple of all such axes. They must be axes of the batch or of sequences. `()` replicates all parameters.
        tensor: the axis over which heads, feed-forwards (also those of experts) and the vocabulary are sharded. Its
            devices compute the same sequences together; between sublayers, each has a shard of the positions. Its size
            must divide the number of query heads and the width of the feed-forward, but not the number of key heads,
            the vocabulary or the length.
        sequence: the axis over which rows are sharded, so that they may be longer than fits on one device. Its devices
            compute the same sequences together: each computes some chunks of them, which attend to the keys and values
            of all. Use `place` to make batches for it, which shifts labels, pads rows and puts chunks in order. Rows
            may have any length.
        expert: the axis over which the experts of a mixture, and the batch, are sharded: it is added to `batch` if it
            is not there. Each device has some of every layer's experts, and computes them for all devices' tokens.
            Other parameters are sharded over it as over fsdp, if `fsdp` is a single name. Its size must divide the
            number of experts.

    Raises:
        TypeError: an argument is not a name or a tuple of names.
        ValueError: an axis is named twice, or `fsdp` names one along which all devices would compute the same.

    Example:
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> model = nnx.eval_shape(lambda: LlamaForCausalLM(config, rngs=nnx.Rngs(0)))
        >>> mesh = AbstractMesh((2, 4), ("data", "fsdp"))
        >>> of_head = jax.tree.leaves(Layout().shardings(model, mesh))[0]
        >>> of_head.spec == P("fsdp")
        True
    """

    batch: Names = ("data", "fsdp")
    fsdp: str | Names = "fsdp"
    tensor: str | None = None
    sequence: str | None = None
    expert: str | None = None

    def __post_init__(self):
        is_names = lambda x: isinstance(x, tuple) and all(isinstance(name, str) for name in x)
        if not is_names(self.batch):
            raise TypeError(f"Layout: batch={self.batch!r} must be a tuple of mesh axis names.")
        if not isinstance(self.fsdp, str) and not is_names(self.fsdp):
            raise TypeError(f"Layout: fsdp={self.fsdp!r} must be a mesh axis name, or a tuple of them.")
        for role in ("tensor", "sequence", "expert"):
            if not isinstance(getattr(self, role), str | None):
                raise TypeError(f"Layout: {role}={getattr(self, role)!r} must be a mesh axis name, or None.")
        if self.expert is not None and self.expert not in self.batch:
            object.__setattr__(self, "batch", (*self.batch, self.expert))
        for axes in (self.axes, self.fsdp_axes):
            if twice := sorted({name for name in axes if axes.count(name) > 1}):
                raise ValueError(f"{self}: {twice} is named twice. An axis can have only one role.")
        if idle := [name for name in self.fsdp_axes if name not in (*self.batch, self.sequence)]:
            raise ValueError(
                f"{self}: fsdp names {idle}, which split neither the batch nor its sequences, so that all devices "
                f"along them would compute the same. Add them to batch: Layout(batch={(*self.batch, *idle)}, …)."
            )

    @property
    def fsdp_axes(self) -> Names:
        """The axes over which parameters are sharded, including the sequence axis."""
        if isinstance(self.fsdp, tuple):
            return self.fsdp
        others = (axis for axis in (self.sequence, self.expert) if axis not in (None, self.fsdp))
        return (self.fsdp, *others)

    @property
    def axes(self) -> Names:
        """All axes that the layout names, each once."""
        others = (self.tensor, self.sequence)
        return (*self.batch, *(axis for axis in others if axis is not None))

    @property
    def between_blocks(self) -> P:
        """How activations (B, T, …) are sharded between blocks, where a tensor axis shards positions."""
        return partition(self.batch, tuple(axis for axis in (self.sequence, self.tensor) if axis is not None))

    @property
    def in_attention(self) -> P:
        """How queries, keys, values and results (B, T, heads, H) are sharded around attention."""
        return partition(self.batch, self.sequence, self.tensor)

    @property
    def of_rows(self) -> P:
        """How arrays (B, …) are sharded if every device that computes a shard of a row has the whole row."""
        return partition(self.batch)

    @property
    def of_cache(self) -> P:
        """How a cache's keys and values (layers, B, …) are sharded; their rows are whole, too."""
        return partition(None, self.batch)

    @property
    def of_all_rows(self) -> P:
        """How arrays (1, T, …), which are the same for all rows, are sharded."""
        return partition(None, self.sequence)

    @property
    def in_loss(self) -> P:
        """How hidden states, labels and results (B, T, …) are sharded in the loss."""
        return partition(self.batch, self.sequence)

    @property
    def of_logits(self) -> P:
        """How logits (B, T, V) are sharded."""
        return partition(self.batch, self.sequence, self.tensor)

    def spec(self, info: ParameterInfo, shape: tuple[int, ...], sizes: Mapping[str, int]) -> P:
        """How a parameter, and optimizer state of its shape, is sharded over a mesh.

        A matrix is sharded along its input, a head along the vocabulary, and experts along their number if the mesh
        divides it. Codes and scales of quantised kernels are sharded along the output, so that blocks stay whole.
        Vectors are small, and replicated if the mesh does not divide them. With several devices along `tensor`, heads,
        the feed-forward's width or the vocabulary are sharded over it, and a matrix's first axis over fsdp, or its
        second if the first cannot be sharded over both.

        Args:
            info: a description of the parameter.
            shape: its shape.
            sizes: the number of devices along each axis of the mesh.

        Returns:
            The partition spec.

        Raises:
            ValueError: the mesh does not divide a matrix.
        """
        if (tensor := self.tensor_shards(sizes)) is not None:
            return tensor.spec(info, shape)
        return self._parameter_shards(sizes).spec(info, shape)

    def check(self, config: Any, sizes: Mapping[str, int]) -> None:
        """Checks that an architecture can be sharded over the axes.

        Args:
            config: a model's config.
            sizes: the number of devices along each axis of the mesh.

        Raises:
            ValueError: it cannot.
        """
        if config.experts is None and devices_along(self.expert, sizes) > 1:
            raise ValueError(
                f"expert={self.expert!r} has {sizes[self.expert]} devices, and {type(config).__name__} has no experts. "
                "Give the devices to fsdp."
            )
        for shards in (self.tensor_shards(sizes), self.sequence_shards(sizes)):
            if shards is not None:
                shards.check(config)

    def shardings(
        self, tree: Any, mesh: Mesh | AbstractMesh, optimizer: optax.GradientTransformation | None = None
    ) -> Any:
        """The shardings of a model's parameters, or of parameters and optimizer state.

        Args:
            tree: a model or its state; with an optimizer, `(params, optimizer.init(params))`. Leaves may be types.
            mesh: a mesh with the axes that the layout names, and no others with several devices.
            optimizer: the optimizer whose state is in `tree`. State of a parameter is sharded like the parameter:
                arrays of its shape, and in other arrays those axes that are axes of the parameter or number equal
                blocks of one, as in factored moments and scales. All other arrays are replicated, with a warning if
                they have 65,536 numbers or more.

        Returns:
            A tree of `NamedSharding` with the structure of the state, for `jax.device_put` or `out_shardings`.

        Raises:
            ValueError: mesh and layout do not fit, a matrix cannot be sharded evenly, or a leaf is not a parameter.

        Example:
            >>> import jax.numpy as jnp
            >>> params = dict(kernel=jnp.ones((8, 4)))
            >>> mesh, optimizer = AbstractMesh((1, 4), ("data", "fsdp")), optax.sgd(0.1, momentum=0.9)
            >>> of_params, of_state = Layout().shardings((params, optimizer.init(params)), mesh, optimizer)
            >>> of_params["kernel"].spec == of_state[0].trace["kernel"].spec == P("fsdp")
            True
        """
        sizes = sizes_of(mesh, self)

        def of_leaf(keys, x):
            return NamedSharding(mesh, self.spec(parameter(path_of(keys), x.shape), x.shape, sizes))

        params, state = tree if optimizer is not None else (tree, None)
        if (config := getattr(params, "config", None)) is not None:
            self.check(config, sizes)
        params = nnx.state(params) if isinstance(params, nnx.Module) else params
        of_params = jax.tree_util.tree_map_with_path(of_leaf, params)
        if optimizer is None:
            return of_params
        return of_params, state_shardings(optimizer, state, params, of_params, NamedSharding(mesh, P()))

    def place(self, batch: Any, mesh: Mesh | None = None) -> Any:
        """Puts a batch on the mesh: each device gets the rows that it computes, or its shard of them.

        If several devices share rows, the batch is prepared for it: labels are shifted, positions are added, and rows
        are padded and put in the order of the devices' chunks. A batch that has been placed is not changed.
        `ops.layout.from_chunks(x, 1, devices)` restores the order of arrays that a model returns by position.

        Args:
            batch: a tree of arrays, or of their types, with a leading batch axis, such as `dict(input_ids=…,
                labels=…)`. Scalars, and arrays of fewer rows such as positions (1, T), are replicated. With several
                processes, each reads the rows of its devices from its arrays, whose other rows may hold anything. With
                several devices along `sequence`, the batch must be a model's arguments by name, or token ids.
            mesh: a mesh with the axes that the layout names; `None` for the mesh in context, of `jax.set_mesh`.

        Returns:
            The tree of arrays on the mesh.

        Raises:
            ValueError: there is no mesh in context, it does not fit the layout or does not divide the rows; or rows are
                to be sharded, and the batch has no `input_ids`.

        Example:
            >>> import jax.numpy as jnp
            >>> mesh = jax.make_mesh((1,), ("fsdp",))
            >>> placed = Layout(batch=("fsdp",)).place(dict(input_ids=jnp.ones((2, 5))), mesh)
            >>> placed["input_ids"].sharding.spec == P("fsdp")
            True
        """
        mesh = jax.sharding.get_mesh() if mesh is None else mesh
        if mesh.empty:
            raise ValueError("place: no mesh is in context. Call it under jax.set_mesh(mesh), or pass mesh=….")
        sequence, length = self.sequence_shards(sizes_of(mesh, self)), None
        if sequence is not None:
            batch = sequence.prepared(batch)
            length = batch["input_ids"].shape[1]
        return placed(batch, mesh, self.batch, self.sequence, length)

    def run(
        self,
        function: Callable[..., Any],
        split: tuple[Any, ...],
        whole: tuple[Any, ...] = (),
        head: Any = None,
        *,
        spec: P | tuple[P, ...] | None = None,
        out: Any = None,
    ) -> Any:
        """Runs `function(*split, *whole)` on every device's shard; on one device, a plain call.

        It uses a shard_map in which all axes of the mesh are Manual, since the compiler's partitioner would gather the
        inputs of kernels.

        Args:
            function: returns arrays that are sharded like the first operands.
            split: trees of arrays that are sharded as `spec` says; entries may be `None`.
            whole: arrays that are whole inside the function; entries may be `None`. If `fsdp` divides a matrix's first
                axis, the matrix is passed sharded along it and gathered, and its gradient is reduce-scattered.
            head: the function's last argument, if there is one, an array or quantised. An array is sharded, and linear
                losses gather it in slices; a quantised head is whole.
            spec: how `split` is sharded, or each of it: `between_blocks`, which is the default, `in_attention` or
            `in_loss`. out: how the results are sharded; `None` for as `split` is.

        Returns:
            The function's results.

        Raises:
            ValueError: the mesh in context and the layout do not fit.
        """
        spec = self.between_blocks if spec is None else spec
        return self._on_shards(function, split, whole, head, spec, spec if out is None else out)

    def run_sum(
        self,
        function: Callable[..., tuple[jax.Array, Any]],
        split: tuple[Any, ...],
        whole: tuple[Any, ...] = (),
        head: Any = None,
        *,
        spec: P | tuple[P, ...] | None = None,
    ) -> tuple[jax.Array, Any]:
        """Like `run` with `in_loss`, for a function that returns a sum over its tokens and arrays per token.

        Args:
            function: returns (sum, arrays that are sharded like `split`).
            split: as in `run`.
            whole: as in `run`.
            head: as in `run`.
            spec: how `split` is sharded, if not `in_loss`.

        Returns:
            (the sum over all tokens, the arrays).
        """
        axes = names(along(self.in_loss, open_axes(self)))

        def local(*arrays):
            total, others = function(*arrays)
            return jax.lax.psum(total, axes) if axes else total, others

        spec = self.in_loss if spec is None else spec
        return self._on_shards(local, split, whole, head, spec, (P(), self.in_loss))

    def gathered(self, parameters: Any, dtype: Any) -> Any:
        """Gathers a layer's parameters on every device just before their use (FSDP).

        Matrices are first converted to the computation's dtype, so that in bfloat16 half as many bytes are sent.
        Gradients are constrained to the sharding of their parameters: otherwise the compiler would all-reduce the
        joined gradient of several projections on every device, and then slice it.

        Args:
            parameters: one layer's, a tree of arrays by their names.
            dtype: dtype of the computation.

        Returns:
            The tree of whole arrays; on one device, the tree as it is.
        """
        sizes = open_axes(self)
        return self._parameter_shards(sizes).gathered(parameters, dtype) if sizes else parameters

    def expert_axis(self) -> str | None:
        """The axis that splits experts, if the mesh in context has several devices along it."""
        return self.expert if devices_along(self.expert, open_axes(self)) > 1 else None

    def tokens_of_device(self, rows: int, length: int) -> int:
        """The number of tokens that each device has between blocks.

        Args:
            rows: rows of an array between blocks, on the mesh in context.
            length: its positions.

        Returns:
            The array's tokens divided by the number of devices over which they are sharded. Inside a `jax.shard_map`,
            the array is already one device's shard.
        """
        return rows * length // devices_along(self.between_blocks, open_axes(self))

    def tensor_shards(self, sizes: Mapping[str, int] | None = None) -> TensorShards | None:
        """How a model is sharded over the tensor axis.

        Args:
            sizes: the number of devices along each axis; `None` for the axes of the mesh in context that are not
                Manual.

        Returns:
            The shards; `None` if the axis does not have several devices.

        Raises:
            ValueError: the mesh in context and the layout do not fit.
        """
        if self.tensor is None:
            return None
        sizes = open_axes(self) if sizes is None else sizes
        return TensorShards.of(self, sizes) if devices_along(self.tensor, sizes) > 1 else None

    def sequence_shards(self, sizes: Mapping[str, int] | None = None) -> SequenceShards | None:
        """How rows are sharded over the sequence axis.

        Args:
            sizes: the number of devices along each axis; `None` for those of the mesh in context, including Manual
                axes, since attention calls this inside of a `jax.shard_map`.

        Returns:
            The shards; `None` if the axis does not have several devices.
        """
        sizes = jax.sharding.get_abstract_mesh().shape if sizes is None else sizes
        return SequenceShards.of(self, sizes) if devices_along(self.sequence, sizes) > 1 else None

    def _parameter_shards(self, sizes: Mapping[str, int]) -> ParameterShards:
        return ParameterShards(self.fsdp_axes, self.expert, self.batch, sizes)

    def _on_shards(self, function, split, whole, head, spec, out):
        """`run`, with results that are sharded as `out` says."""
        sizes = open_axes(self)
        if not sizes:
            return function(*split, *whole, *(() if head is None else (head,)))
        here = lambda spec: along(spec, sizes)
        out = jax.tree.map(here, out, is_leaf=lambda x: isinstance(x, P))
        spec = tuple(map(here, spec)) if isinstance(spec, tuple) else here(spec)
        if head is not None and (tensor := self.tensor_shards(sizes)) is not None:
            return loss_on_shards(tensor, function, split, whole, head, spec, out)
        fsdp = {name: sizes[name] for name in self.fsdp_axes if name in sizes}
        return on_shards(function, split, whole, head, spec, out, fsdp)


ONE_DEVICE = Layout(batch=(), fsdp=())
