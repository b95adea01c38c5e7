"""The training step that is planned: loss, gradients and update of a model, on one device or a mesh."""

import dataclasses
import math
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from liger_jax.models import KernelOptions, Layout
from liger_jax.models import lora as adapters
from liger_jax.models.core import remat as remats
from liger_jax.models.core.embedding import logit_options_of
from liger_jax.models.core.memory import Head, LayerMemory, loss_budget_bytes
from liger_jax.models.core.parallel.mesh_axes import put
from liger_jax.models.core.remat import Mode
from liger_jax.models.hugging_face.adapter_targets import Targets, problems, split
from liger_jax.models.lora.vocabulary import columns
from liger_jax.models.quantized import quantize
from liger_jax.ops import plan_fused_linear_cross_entropy
from liger_jax.ops.block_quantized import BLOCK_SIZE, KINDS
from liger_jax.ops.layout import devices_along
from liger_jax.planner import defaults
from liger_jax.planner.architectures import Architecture
from liger_jax.planner.devices import Target
from liger_jax.training import make_step, optimizer_named
from liger_jax.training.meshes import Devices, layout_of, shards_of_batch
from liger_jax.training.optimizer import OPTIMIZERS
from liger_jax.training.rows import ARGUMENTS

LOSSES = ("fused", "logits")
STATE_MEMORIES = ("device", "host")
AUTO = "auto"  # the value of `remat` by which the planner chooses


class _Remats(tuple[str, ...]):
    """The values of `remat`: names, and numbers of layers, for which the last entry stands in messages."""

    def __contains__(self, value: Any) -> bool:
        if isinstance(value, int):
            return not isinstance(value, bool) and value >= 0
        return value in self[:-1]


REMATS = _Remats((AUTO, *get_args(Mode), "LAYERS"))


def as_remat(text: str) -> str | int:
    """The value of `remat` that a text names."""
    return int(text) if text.isdecimal() else text


@dataclasses.dataclass(frozen=True)
class Run:
    """The settings of a training run that determine its memory.

    Attributes:
        model: the architecture.
        batch: sequences in a step, over all devices.
        seq: tokens in a sequence.
        target: the devices.
        mesh: sizes of "data" and "fsdp", and of "expert", "sequence" and "tensor" if they have several devices.
        optimizer: "adamw", "adamw8bit", whose moments have 8 bits, or "sgd", which has none.
        state_dtype: dtype of "adamw"'s moments, "float32" or "bfloat16".
        param_dtype: dtype of parameters and gradients.
        dtype: dtype of the computation.
        remat: as in the models: a name, or the number of the last layers that keep their products.
        loss: "fused" or "logits".
        micro_batches: the number of equal micro-batches in a step's batch.
        state_memory: where the optimizer's moments are, "device" or "host".
        packed: rows hold several documents, as `liger_jax.training.pack` makes them.
        lora: the rank of adapters, which alone are trained; `None` to train all parameters.
        lora_targets: which projections have adapters, as `targets` in `add_lora`.
        lora_experts: whether the experts of a mixture have adapters, too.
        dora: whether adapters also train the norms of the weights' columns.
        quantize: how the frozen projections are quantised, "nf4" or "int8"; `None` if they are not.
        host_memory: bytes that the run may use on the devices' host; `None` if that is not known.
    """

    model: Architecture
    batch: int
    seq: int
    target: Target
    mesh: dict[str, int]
    optimizer: str = defaults.OPTIMIZER
    state_dtype: str = "float32"
    param_dtype: str = "float32"
    dtype: str = defaults.DTYPE
    remat: str | int = defaults.REMAT
    loss: str = "fused"
    micro_batches: int = defaults.MICRO_BATCHES
    state_memory: str = "device"
    packed: bool = False
    lora: int | None = None
    lora_targets: tuple[str, ...] | str | None = None
    lora_experts: bool = False
    dora: bool = False
    quantize: str | None = None
    host_memory: int | None = None

    def __post_init__(self):
        for name, size in dict(batch=self.batch, seq=self.seq, micro_batches=self.micro_batches).items():
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1.")
        remats.check(self.remat, self.model.config.num_hidden_layers)
        choices = dict(optimizer=OPTIMIZERS, loss=LOSSES, state_memory=STATE_MEMORIES)
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {allowed}.")
        for name in ("state_dtype", "param_dtype", "dtype"):
            if getattr(self, name) not in ("float32", "bfloat16", "float16"):
                raise ValueError(f"{name}={getattr(self, name)!r} must be 'float32', 'bfloat16' or 'float16'.")
        if self.state_dtype == "float16":
            raise ValueError(
                "state_dtype='float16' must be 'float32' or 'bfloat16': second moments of small gradients would be 0."
            )
        self._check_adapters()
        unit = self.batch_unit
        if self.batch % unit:
            cut, least = f"micro_batches={self.micro_batches}", max(1, self.batch // unit) * unit
            if self.batch_devices == 1:
                raise ValueError(f"batch={self.batch} is not divisible by {cut}. Pass batch={least}, or fewer of them.")
            groups = "devices" if self.batch_devices == self.target.count else "groups of devices"
            raise ValueError(
                f"batch={self.batch} is not divisible by the {self.batch_devices} {groups} of {self.target.name!r}, "
                f"which take equal numbers of sequences{f' in {cut}' if self.micro_batches > 1 else ''}. "
                f"Pass batch={least}, or fewer devices."
            )
        longest = self.model.config.longest_sequence
        if self.seq > longest:
            raise ValueError(
                f"seq={self.seq} is longer than the {longest} positions that {self.model.name} accepts. Pass a "
                "shorter length, or rope_scaling for positions beyond its training."
            )

    def _check_adapters(self) -> None:
        if self.quantize not in (None, *KINDS):
            raise ValueError(f"quantize={self.quantize!r} must be one of {KINDS}, or None.")
        if self.quantize is not None and self.lora is None:
            raise ValueError(
                f"quantize={self.quantize!r}: quantised weights cannot be trained. Train adapters: lora=16."
            )
        if self.quantize is not None and not self.divides_blocks:
            raise ValueError(
                f"quantize={self.quantize!r} divides a projection's input into blocks of {BLOCK_SIZE}, which do not "
                f"divide the widths of {self.model.name}. Leave it out."
            )
        if self.lora is not None and self.lora < 1:
            raise ValueError(f"lora={self.lora} must be a rank of at least 1, or None.")
        given = dict(dora=self.dora, lora_experts=self.lora_experts)
        given |= dict(lora_targets=self.lora_targets)
        if self.lora is None and (named := [name for name, value in given.items() if value]):
            value = given[named[0]]
            raise ValueError(f"{named[0]}={value!r} is for adapters, and none are trained. Add adapters: lora=16.")
        if wrong := problems("lora_targets", self.lora_targets):
            raise ValueError(f"{wrong[0]}. Separate names by commas, as in q_proj,v_proj.")
        if self.lora_experts and self.model.config.experts is None:
            raise ValueError(f"lora_experts=True: {self.model.name} has no experts. Leave it out.")
        self.layout.check(self.model.config, self.mesh)

    @property
    def divides_blocks(self) -> bool:
        """Whether the projections can be quantised, or are so in the checkpoint."""
        widths = (x.shape[-2] for info, x in self.model.parameters if info.kind in ("kernel", "experts"))
        return self.model.quantized is not None or all(width % BLOCK_SIZE == 0 for width in widths)

    @property
    def adapts_head(self) -> bool:
        """Whether the head has an adapter. It is then copied, and has a gradient, as in `lora.vocabulary`."""
        return self.lora is not None and Targets(split(self.lora_targets)[1]).adapts("lm_head")

    @property
    def layout(self) -> Layout:
        """How the run is sharded over its mesh."""
        return layout_of(self.mesh)

    @property
    def tensor(self) -> int:
        """The number of devices over which heads are sharded, which compute the same tokens together."""
        return self.mesh.get("tensor", 1)

    @property
    def sequence(self) -> int:
        """The number of devices over which each row is sharded."""
        return self.mesh.get("sequence", 1)

    @property
    def expert(self) -> int:
        """The number of devices over which experts, and rows, are distributed."""
        return self.mesh.get("expert", 1)

    @property
    def parameter_devices(self) -> int:
        """Over how many devices parameters are gathered: those of axes that shard parameters but not products.

        The devices of an expert axis keep their experts, and gather the other parameters.
        """
        return devices_along(self.layout.fsdp_axes, self.mesh)

    @property
    def batch_devices(self) -> int:
        """Over how many devices a micro-batch is sharded."""
        return shards_of_batch(self.mesh)

    @property
    def micro_batch_choices(self) -> list[int]:
        """The numbers of micro-batches that give each device an equal share, in ascending order."""
        rows, unshared = divmod(self.batch, self.batch_devices)
        small = [] if unshared else [n for n in range(1, math.isqrt(rows) + 1) if rows % n == 0]
        return sorted({*small, *(rows // n for n in small)})

    @property
    def positions(self) -> int:
        """The positions of a row that one device has, including padding."""
        shards = self.layout.sequence_shards(self.mesh)
        return self.seq if shards is None else math.ceil(self.seq / shards.multiple) * shards.multiple // shards.size

    @property
    def tokens(self) -> int:
        """The tokens of a micro-batch that one device has; the devices of a tensor axis share them."""
        return self.batch // self.batch_unit * self.positions

    @property
    def batch_unit(self) -> int:
        """The batch must be a multiple of this number, so that each device has rows of every micro-batch."""
        return self.batch_devices * self.micro_batches

    @property
    def head(self) -> Head:
        """The head as the loss gets it."""
        is_split, is_frozen = self.parameter_devices > 1, self.lora is not None
        return Head.of(self.model.config, self.param_dtype, self._kernels, is_frozen=is_frozen, is_split=is_split)

    @property
    def layer(self) -> LayerMemory:
        """The memory of one layer on each device."""
        remat: Any = self.remat
        return LayerMemory(
            self.model.config,
            self._kernels,
            remat,
            self.dtype,
            rows=self.batch // self.batch_unit,
            seq=self.positions,
            device=self.target.description,
            has_adapters=self.lora is not None,
            dora=self.lora is not None and self.dora,
            adapts_experts=self.lora_experts or self.quantize is not None,
            tensor=self.tensor,
            sequence=self.sequence,
            expert=self.expert,
            trains_experts=self.lora is None,
        )

    @property
    def _kernels(self) -> KernelOptions:
        """The ops of the model, but for its loss."""
        return KernelOptions(layout=self.layout if self.target.count > 1 else None)

    def loss_plan(self) -> Any:
        """How the fused loss is computed on each device.

        Returns:
            What `plan_fused_linear_cross_entropy` returns.
        """
        config, head, device = self.model.config, self.head, self.target.description
        remat: Any = self.remat
        width = config.hidden_size
        if self.lora is not None and self.adapts_head:
            width += columns(self.lora, width)
        sizes = self.tokens, width
        options = remat, self.dtype, head, sizes, device
        budget = loss_budget_bytes(config, self._kernels, *options, tensor=self.tensor)
        return plan_fused_linear_cross_entropy(
            *sizes,
            -(-config.vocab_size // self.tensor),
            dtype=self.dtype,
            weight_dtype=head.dtype_in_products(self.dtype),
            weight_is_split=head.is_split,
            reduction="sum",
            differentiated=("hidden", "weight") if self.lora is None or self.adapts_head else ("hidden",),
            memory_budget_bytes=budget,
            device_memory_bytes=self.target.memory_bytes,
            device=device,
            **logit_options_of(config),
        )

    def kernels(self) -> KernelOptions:
        """The ops of the model that runs.

        Returns:
            Options with the loss's memory budget for the device. If layers are rematerialised, the model chooses the
            budget itself, independently of the device.
        """
        if self.loss == "logits":
            return dataclasses.replace(self._kernels, fused_linear_cross_entropy=False)
        if self.remat != "none":
            return self._kernels
        return dataclasses.replace(self._kernels, memory_budget_bytes=self.loss_plan().extra_bytes)


def make_optimizer(name: str, state_dtype: str) -> optax.GradientTransformation:
    """An optimizer of `liger_jax.training`, whose gradients are not clipped."""
    own = dict(state_dtype=state_dtype) if name == "adamw" else {}
    return optimizer_named(name, 1e-4, weight_decay=1e-4, max_norm=None, **own)


def training_step(run: Run, mesh: Mesh, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    """The step and the types of its arguments.

    Returns a jitted `step(state, batch, *frozen) -> (state, loss)` with `state = (params, opt_state)`, donated, to be
    traced with the mesh in context; and its abstract arguments. Frozen are the base weights beside adapters.
    """
    graph, params, *frozen = _split(run, options)
    optimizer = make_optimizer(run.optimizer, run.state_dtype)
    state = (params, jax.eval_shape(optimizer.init, params))
    devices = Devices(mesh, run.layout)
    of_params, of_moments = devices.shardings(state, optimizer)
    if run.state_memory == "host":
        on_host = lambda x, sharding: sharding.with_memory_kind("pinned_host") if x.ndim else sharding
        of_moments = jax.tree.map(on_host, state[1], of_moments)
    of_state = (of_params, of_moments)
    step = make_step(graph, optimizer, micro_batches=run.micro_batches, state_on_host=run.state_memory == "host")
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(of_state, devices.whole))
    return jitted, (jax.tree.map(put, state, of_state), _batch(run, mesh), *map(devices.typed, frozen))


def _batch(run: Run, mesh: Mesh) -> Any:
    """The types of a step's tokens, as `Layout.place` puts them on the mesh."""
    tokens: Any = jax.ShapeDtypeStruct((run.batch, run.seq), jnp.int32)
    return run.layout.place(dict.fromkeys(ARGUMENTS, tokens) if run.packed else tokens, mesh)


def _split(run: Run, options: dict[str, Any]) -> tuple[Any, ...]:
    """The run's model as graph and parameters, or as graph, adapters and base weights, without numbers."""
    own = dict(
        kernels=run.kernels(), dtype=jnp.dtype(run.dtype), param_dtype=jnp.dtype(run.param_dtype), remat=run.remat
    )
    options = own | options
    if run.lora is None:
        return run.model.abstract(**options)

    def make():
        model = run.model.family(run.model.config, **options, rngs=nnx.Rngs(0))
        model = model if run.quantize is None else quantize(model, run.quantize)
        chosen: dict[str, Any] = dict(targets=run.lora_targets, dora=run.dora)
        chosen |= dict(parameters=adapters.EXPERT_PARAMETERS if run.lora_experts else ())
        return adapters.add_lora(model, run.lora, alpha=1, **chosen, rngs=nnx.Rngs(0))

    return adapters.trainable(nnx.eval_shape(make))
