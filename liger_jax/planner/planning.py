"""Will it fit? The plan of a training run, from formulas and, if asked, from the compiler."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from liger_jax.models.core.stretched import MOST_POSITIONS, stretched
from liger_jax.pallas_kernels.devices import GPUS, TPUS
from liger_jax.planner import defaults
from liger_jax.planner.advice import PRECISIONS, Change, adapters_that_fit, advice, changes_to_fit, largest_batch
from liger_jax.planner.architectures import Architecture, architecture
from liger_jax.planner.choosing import Choice, chosen, smallest
from liger_jax.planner.compilers import Compiled, compile_run
from liger_jax.planner.device_names import memory_in_bytes
from liger_jax.planner.devices import target
from liger_jax.planner.estimate import Estimate, estimate
from liger_jax.planner.mesh import mesh_sizes
from liger_jax.planner.speed import speed
from liger_jax.planner.step import AUTO, LOSSES, Run
from liger_jax.training.meshes import shards_of_batch

LEVELS = ("estimate", "compiled")


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The memory that a run needs on each device, with the fused loss and with a loss on logits.

    Attributes:
        run: what is trained, and on what.
        estimates: the estimate for each of "fused" and "logits".
        compiled: the compiler's figures for each of them; empty if the step was not compiled.
        choice: why the run's layers keep what they keep, where the planner chose it; `None` where it did not.
        is_open: what the planner decides, as `left_open` returns it.
    """

    run: Run
    estimates: dict[str, Estimate]
    compiled: dict[str, Compiled]
    choice: Choice | None = None
    is_open: Mapping[str, bool] = dataclasses.field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float | None:
        """The estimated speed over all devices; `None` for devices whose rates are not in the tables."""
        kind = self.run.target.name.partition(":")[0]
        return speed(self.run).tokens_per_second if kind in GPUS or kind in TPUS else None

    @property
    def totals(self) -> dict[str, int]:
        """Bytes of a step for each loss, by the compiler if the step was compiled."""
        memory: Any = self.compiled or self.estimates
        return {loss: memory[loss].total for loss in LOSSES}

    @property
    def fits(self) -> bool:
        """Whether the run fits with its loss, on its devices and on their host."""
        return self.needed <= self.run.target.capacity_bytes and has_host_memory(self.run, self.host)

    @property
    def host(self) -> int:
        """Estimated bytes of a host's memory for all of its devices."""
        return estimate(self.run).host * self.run.target.count_on_host

    @property
    def needed(self) -> int:
        """Bytes of a step with the run's loss."""
        return self.totals[self.run.loss]

    @property
    def _correction(self) -> int:
        """The compiler's figure minus the estimate; 0 where the compiler was not asked."""
        return self.needed - self.estimates[self.run.loss].total

    def estimated(self, run: Run) -> int:
        """The estimate for another run, plus the difference between this plan's compiled and estimated bytes.

        Args:
            run: a run much like this plan's.

        Returns:
            Bytes on each device.
        """
        return estimate(run).total + self._correction

    @property
    def largest_batch(self) -> int:
        """The largest batch that fits by the estimate, which is corrected if the step was compiled.

        Where the planner chose what layers keep, it is that of one micro-batch whose layers keep least, if such a batch
        holds the run's.
        """
        least = 0 if self.choice is None else largest_batch(_plain(self.run), self._correction)
        return least if least >= self.run.batch else largest_batch(self.run, self._correction)

    @property
    def advice(self) -> str:
        """What to change or expect, in a sentence or two."""
        logits_fit = self.choice is not None and chosen(dataclasses.replace(_plain(self.run), loss="logits"))
        return advice(self.run, self.totals, self.estimates, logits_fit=bool(logits_fit))

    def changes_to_fit(self, precisions: tuple[str, ...] = PRECISIONS) -> list[Change]:
        """What would make the run fit, by estimates.

        Args:
            precisions: which of the run's dtypes may become bfloat16; `()` for none.

        Returns:
            Cumulative changes, with what each saves. Empty if the run fits, or if no change helps.
        """
        return changes_to_fit(self.run, self._correction, precisions)

    def then_needed(self, change: Change) -> int:
        """Bytes on each device after a change that makes the run fit, with what the planner decides then."""
        stays = lambda name: getattr(change.run, name) == getattr(self.run, name)
        remat, cuts = (self.is_open.get(name, False) for name in ("remat_is_open", "cuts_are_open"))
        is_open = dict(remat_is_open=remat and stays("remat"), cuts_are_open=cuts and stays("micro_batches"))
        choice = chosen(change.run, **is_open)
        return self.estimated(change.run if choice is None else choice.run)

    @property
    def adapters_that_fit(self) -> Change | None:
        """Adapters that fit instead of training all weights; `None` if they are trained already, or do not fit."""
        return adapters_that_fit(self.run, self._correction)


def _plain(run: Run) -> Run:
    """The run with layers that keep their inputs alone, in one micro-batch."""
    return dataclasses.replace(run, remat="full", micro_batches=1)


def has_host_memory(run: Run, needed: int) -> bool:
    """Whether a host has so many bytes for its devices."""
    return run.host_memory is None or needed <= run.host_memory


def make_run(
    model: str | os.PathLike[str],
    *,
    batch: int | None = None,
    seq: int | None = None,
    device: str | None = None,
    memory: str | None = None,
    mesh: Mapping[str, int] | None = None,
    host_memory: str | None = None,
    rope_scaling: str | None = None,
    **options: Any,
) -> Run:
    """Makes a run from names and sizes."""
    devices, model_architecture = target(device, memory), architecture(model)
    options = {name: value for name, value in options.items() if value not in (None, AUTO)}
    sizes = mesh_sizes(mesh, devices.count)
    if batch is None:
        batch = defaults.batch(shards_of_batch(sizes) * max(1, options.get("micro_batches", defaults.MICRO_BATCHES)))
    if rope_scaling is not None:
        config = stretched(model_architecture.config, MOST_POSITIONS if seq is None else seq, rope_scaling)
        model_architecture = dataclasses.replace(model_architecture, config=config)
    if seq is None:
        seq = min(defaults.LENGTH, model_architecture.config.longest_sequence)
    if isinstance(options.get("lora_targets"), list):
        options["lora_targets"] = tuple(options["lora_targets"])
    options.setdefault("param_dtype", defaults.param_dtype(options.get("lora"), model_architecture.dtype))
    if model_architecture.quantized is not None:
        options = _beside_quantized(model_architecture, options)
    for name, size in dict(batch=batch, seq=seq).items():
        if size >= 2**31:
            raise ValueError(f"{name}={size} must be below 2**31: JAX counts in int32.")
    if host_memory is not None:
        options["host_memory"] = memory_in_bytes(host_memory)
    return Run(model_architecture, batch, seq, devices, sizes, **options)


def left_open(options: Mapping[str, Any]) -> dict[str, bool]:
    """What the options leave to the planner, as arguments of `choosing.chosen`."""
    return dict(remat_is_open=options.get("remat") in (None, AUTO), cuts_are_open=options.get("micro_batches") is None)


def _beside_quantized(model: Architecture, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a run whose checkpoint has quantised weights, which stay as they are."""
    if "lora" not in options:
        raise ValueError(
            f"{model.name} has weights in {model.quantized}, and quantised weights cannot be trained. Train "
            f"adapters: lora={defaults.RANK}."
        )
    if options.get("quantize", model.quantized) != model.quantized:
        raise ValueError(f"quantize={options['quantize']!r}: {model.name} has weights in {model.quantized}.")
    return options | {"quantize": model.quantized}


def plan(
    model: str | os.PathLike[str],
    *,
    batch: int | None = None,
    seq: int | None = None,
    device: str | None = None,
    memory: str | None = None,
    mesh: Mapping[str, int] | None = None,
    host_memory: str | None = None,
    rope_scaling: str | None = None,
    level: str = "estimate",
    **options: Any,
) -> MemoryPlan:
    """The memory of a training step on devices that need not be present.

    "estimate" uses formulas, and takes milliseconds. "compiled" compiles the step for the devices and returns exactly
    what the compiler allocates, which takes seconds to minutes.

    Args:
        model: a name such as "llama-3-8b" or "Qwen/Qwen2-0.5B" (`architectures.MODELS`), or a config.json or its
            folder.
        batch: sequences in a step, over all devices; `None` for 8, or the next number that is divisible by devices and
            micro-batches.
        seq: tokens in a sequence; `None` for 2,048, or the model's longest sequence if that is less.
        device: such as "h200", "rtx4090", "h200:8", "v5e:8x8" (`devices.target`); `None` for a GPU of which only its
            memory is known.
        memory: a GPU's memory, such as "24GiB"; `None` for that of the table.
        mesh: the number of devices along each axis, such as {"fsdp": 4, "tensor": 2}; `None` for all along "fsdp".
            Parameters, gradients and optimizer state are sharded over "fsdp", the batch over "data", "fsdp" and
            "expert", a mixture's experts over "expert", rows over "sequence", and heads, feed-forwards and the
            vocabulary over "tensor".
        host_memory: memory of the devices' host, such as "128GiB", which `remat="offload"` and `state_memory="host"`
            use; `None` if it is not known and assumed to be enough.
        rope_scaling: how the rotary embedding is scaled for rows longer than the model's positions, as in
            `models.stretched`; `None` to refuse such rows.
        level: "estimate" or "compiled".
        **options: `optimizer` ("adamw", "adamw8bit", "sgd"), `state_dtype`, `param_dtype`, `dtype` (names), `remat`
            ("auto", "none", "full", "dots", "offload", "offload_attention", or a number of layers), `loss` ("fused",
            "logits"), `micro_batches` (a number), `state_memory` ("device", "host"), `packed` (True or False), `lora`
            (a rank), `lora_targets` (names or a regular expression), `lora_experts` and `dora` (True or False) and
            `quantize` ("nf4", "int8"), as `Run` explains them. `param_dtype` defaults to the checkpoint's dtype with
            adapters, and otherwise to float32, as in `finetune`.

    Returns:
        The plan.

    Raises:
        ValueError: a model, device, mesh or option does not exist or does not fit the others; the message says what to
            change.
        ImportError: the compiler for these devices is not installed.

    Example:
        >>> t4 = plan("qwen2-0.5b", batch=8, seq=512, device="t4")
        >>> t4.fits, t4.run.remat, round(t4.totals["fused"] / 2**30, 1)
        (True, 'dots', 10.0)
    """
    if level not in LEVELS:
        raise ValueError(f"level={level!r} must be one of {LEVELS}.")
    sizes: dict[str, Any] = dict(batch=batch, seq=seq, device=device, memory=memory, mesh=mesh)
    run = make_run(model, **sizes, host_memory=host_memory, rope_scaling=rope_scaling, **options)
    is_open = left_open(options)
    choice = chosen(run, **is_open)
    if choice is not None:
        run = choice.run
    elif level == "compiled":  # which may find less than the estimate
        run = smallest(run, **is_open)
    both = {loss: dataclasses.replace(run, loss=loss) for loss in LOSSES}
    compiled = {loss: compile_run(each) for loss, each in both.items()} if level == "compiled" else {}
    estimates = {loss: estimate(each) for loss, each in both.items()}
    return MemoryPlan(run, estimates, compiled, choice if is_open["remat_is_open"] else None, is_open)
