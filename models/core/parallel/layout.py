"""Which axis of a mesh splits what: parameters, optimizer state, activations, and what a kernel gets of them."""

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
    """Which axes of a mesh split a model's batch and its parameters: FSDP, tensor and sequence parallelism.

    Each device computes its own sequences, or with the other devices of a tensor or sequence axis its share of them. A
    layer's parameters are gathered over fsdp where they are used, and their gradients are scattered. The mesh's axes
    may be Auto or Explicit. Axes that are Manual already, inside a `jax.shard_map`, are left alone.

    Args:
        batch: the axes that split the batch.
        fsdp: the axis that splits parameters and optimizer state, which the sequence axis then splits, too; or the
            axes that split them, as a tuple. They are among those of the batch and of sequences. `()` leaves every
            parameter whole.
        tensor: the axis that splits heads, feed-forwards, experts' among them, and the vocabulary. Its devices compute
            the same sequences together; between sublayers each has its shard of the positions. It must divide query
            heads and the feed-forward's width. Key heads, the vocabulary and the length may be anything.
        sequence: the axis that splits rows, so that they may be longer than one device holds. Its devices compute the
            same sequences together, each chunks of them, and attend to the keys and values of all. Batches for it
            come from `place`, which shifts labels, pads rows and puts chunks in order. Any length will do.
        expert: the axis that splits the experts of a mixture, and the batch: it is one of `batch`, and is added there
            if it is not named. Each device has its share of every layer's experts, to which the other devices send
            their tokens. Other parameters it splits as fsdp does, if `fsdp` is a single name. It must divide the number
            of experts.

    Raises:
        TypeError: an argument is no name, or no tuple of names.
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
                raise ValueError(f"{self}: {twice} is named twice. An axis splits one thing.")
        if idle := [name for name in self.fsdp_axes if name not in (*self.batch, self.sequence)]:
            raise ValueError(
                f"{self}: fsdp names {idle}, which split neither the batch nor its sequences, so that all devices "
                f"along them would compute the same. Add them to batch: Layout(batch={(*self.batch, *idle)}, …)."
            )

    @property
    def fsdp_axes(self) -> Names:
        """The axes that split parameters. Without the sequence axis, a row's devices would each hold all of them."""
        if isinstance(self.fsdp, tuple):
            return self.fsdp
        others = (axis for axis in (self.sequence, self.expert) if axis not in (None, self.fsdp))
        return (self.fsdp, *others)

    @property
    def axes(self) -> Names:
        """All axes that the layout names, except that `fsdp` names some of them again."""
        others = (self.tensor, self.sequence)
        return (*self.batch, *(axis for axis in others if axis is not None))

    @property
    def between_blocks(self) -> P:
        """How activations (B, T, …) are sharded between blocks: of a tensor axis, one device has a token's norm."""
        return partition(self.batch, tuple(axis for axis in (self.sequence, self.tensor) if axis is not None))

    @property
    def in_attention(self) -> P:
        """How queries, keys, values and results (B, T, heads, H) are sharded around attention."""
        return partition(self.batch, self.sequence, self.tensor)

    @property
    def of_rows(self) -> P:
        """How arrays (B, …) are sharded whose rows are whole on every device that computes a shard of them."""
        return partition(self.batch)

    @property
    def of_cache(self) -> P:
        """How a cache's keys and values (layers, B, …) are sharded, whose rows are whole, too."""
        return partition(None, self.batch)

    @property
    def of_all_rows(self) -> P:
        """How arrays (1, T, …) are sharded that are the same for all rows."""
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
        """How a parameter is sharded over a mesh, and what an optimizer holds of its shape.

        A matrix is split along its input, or along a head's vocabulary, and experts one by one where the mesh divides
        them. Codes and scales of quantised kernels are split
        along the output, so that blocks stay whole. Vectors are small: where the mesh does not divide them, every
        device has them whole. With several devices along `tensor`, it splits heads, the feed-forward's width or the
        vocabulary, and fsdp splits a matrix's first axis, or the second where the first has no room for both.

        Args:
            info: what the parameter is.
            shape: its shape.
            sizes: the devices along each axis of the mesh.

        Returns:
            The partition.

        Raises:
            ValueError: the mesh does not divide a matrix.
        """
        if (tensor := self.tensor_shards(sizes)) is not None:
            return tensor.spec(info, shape)
        return self._parameter_shards(sizes).spec(info, shape)

    def check(self, config: Any, sizes: Mapping[str, int]) -> None:
        """Checks that the axes can split an architecture.

        Args:
            config: of a model.
            sizes: the devices along each axis of the mesh.

        Raises:
            ValueError: they cannot.
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
            mesh: has the axes that the layout names, and no others with several devices.
            optimizer: the one whose state is in `tree`. What it holds for a parameter is sharded like the parameter:
                an array of its shape, and each axis of another array that is one of the parameter's or counts equal
                blocks of it, such as a factored moment's or a scale's. All else is whole on every device, with a
                warning from 65,536 numbers on.

        Returns:
            A tree of `NamedSharding` with the structure of the state, for `jax.device_put` or `out_shardings`.

        Raises:
            ValueError: the mesh and the layout do not fit, or do not divide a matrix; or a leaf is no parameter.

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
        """Puts a batch on the mesh, each device's rows where the device computes them, or its shard of them.

        Where several devices share rows, the batch becomes what `SequenceShards.prepared` says: labels are shifted,
        positions attached, rows padded and put in the order of the devices' chunks. A batch that has been placed stays
        as it is. `ops.layout.from_chunks(x, 1, devices)` gives what a model returns for each position its own order.

        Args:
            batch: a tree of arrays, or of their types, with a leading batch axis, such as `dict(input_ids=…,
                labels=…)`. Numbers, and arrays of fewer rows such as positions (1, T), go to every device. With several
                processes, each reads the rows of its own devices from its arrays, whose other rows may hold anything.
                With several devices along `sequence`, a model's arguments by name, or token ids alone.
            mesh: has the axes that the layout names; `None` for the mesh in context, of `jax.set_mesh`.

        Returns:
            The tree of arrays on the mesh.

        Raises:
            ValueError: no mesh is in context, it does not fit the layout, or it does not divide the rows; or rows are
                to be split, and the batch has no `input_ids`.

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

        The shard_map keeps kernels from the compiler's partitioner, which would gather their inputs. In it all axes of
        the mesh are Manual.

        Args:
            function: returns arrays that are sharded like the first operands.
            split: trees of arrays that are split as `spec` says; `None` entries pass.
            whole: arrays that are whole inside the function; `None` entries pass. A matrix enters split along its first
                axis over `fsdp`, if that divides it, and its gradient leaves the same way.
            head: the function's last argument, if there is one, an array or quantised. A linear loss gathers an array
                as it needs it; a quantised head is whole.
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
        """Does what `run` does, `in_loss`, for a function that returns a sum over its tokens and arrays per token.

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
        """Gathers a layer's parameters on every device just before their use, as FSDP does.

        Matrices are converted to the computation's dtype first: in bfloat16 half as many bytes are sent. Gradients are
        constrained to be sharded as their parameters are. Else the compiler sums the joined gradient of several
        projections whole on every device, and then drops what belongs to the others.

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
        """How many tokens between blocks each device has.

        Args:
            rows: rows of an array between blocks, on the mesh in context.
            length: its positions.

        Returns:
            Its tokens over the devices that split them. Inside a `jax.shard_map` the array is one device's already.
        """
        return rows * length // devices_along(self.between_blocks, open_axes(self))

    def tensor_shards(self, sizes: Mapping[str, int] | None = None) -> TensorShards | None:
        """How the tensor axis splits a model.

        Args:
            sizes: the devices along each axis; `None` for the axes of the mesh in context that are not Manual.

        Returns:
            The shards; `None` where no axis of several devices does.

        Raises:
            ValueError: the mesh in context and the layout do not fit.
        """
        if self.tensor is None:
            return None
        sizes = open_axes(self) if sizes is None else sizes
        return TensorShards.of(self, sizes) if devices_along(self.tensor, sizes) > 1 else None

    def sequence_shards(self, sizes: Mapping[str, int] | None = None) -> SequenceShards | None:
        """How the sequence axis splits rows.

        Args:
            sizes: the devices along each axis; `None` for those of the mesh in context, Manual axes included, since
                attention asks inside of a `jax.shard_map`.

        Returns:
            The shards; `None` where no axis of several devices does.
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
