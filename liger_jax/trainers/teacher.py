"""The teacher of a run: a frozen model with the vocabulary of the model that is trained."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from liger_jax.data import training_rows
from liger_jax.models import AutoModelForCausalLM, KernelOptions, Layout
from liger_jax.models.core.config_fields import short
from liger_jax.models.core.memory import values_in_forward
from liger_jax.models.hugging_face.adapted_source import is_adapted
from liger_jax.models.hugging_face.source import Source, find
from liger_jax.models.hugging_face.weights import quantized_as_in
from liger_jax.models.quantized import quantize
from liger_jax.planner.architectures import Architecture, architecture_of
from liger_jax.trainers import result, weights
from liger_jax.trainers.distill_options import DistillOptions
from liger_jax.trainers.options import Settings
from liger_jax.trainers.task import TEACHER
from liger_jax.training import identity, meshes
from liger_jax.user_errors import UserError, of_option, quantizing


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A teacher whose folder was found, and whose weights are not read yet."""

    source: Source  # its folder
    architecture: Architecture  # what it is
    quantize: str | None  # how its projections are held, "nf4" or "int8"; `None` for as they are
    vocab_size: int  # the number of tokens that student and teacher have in common; heads may have padding after them
    stays: bool  # whether it runs beside the student in each step; else only before the first step

    @property
    def config(self) -> Any:
        """Its config."""
        return self.architecture.config

    def new(self, dtype: str, layout: Layout | None) -> Any:
        """A model of its structure with random weights, of which only the shapes are used."""
        options: dict[str, Any] = self._dtypes(dtype) | dict(
            kernels=self._kernels(KernelOptions(layout=layout)), rngs=nnx.Rngs(0)
        )
        model = self.architecture.family(self.architecture.config, **options)
        if self.source.is_nf4:
            quantized_as_in(self.source.folder, model)
        elif self.quantize is not None:
            with quantizing("--teacher-quantize", self.quantize, f"--teacher={self.source.folder}"):
                quantize(model, self.quantize)
        return model

    def read(self, dtype: str, mesh: Any, kernels: KernelOptions) -> Any:
        """Reads its weights."""
        own = dict(mesh=mesh, kernels=self._kernels(kernels), quantize=self.quantize)
        options: dict[str, Any] = self._dtypes(dtype) | own
        with quantizing("--teacher-quantize", self.quantize, f"--teacher={self.source.folder}"):
            return AutoModelForCausalLM.from_pretrained(self.source, **options)

    def num_bytes(self, dtype: str, devices: meshes.Devices, tokens: int) -> int:
        """The memory that it takes on each device."""
        state = devices.typed(nnx.state(nnx.eval_shape(lambda: self.new(dtype, devices.layout))))
        held = sum(math.prod(_shape_on_a_device(x)) * x.dtype.itemsize for x in jax.tree.leaves(state))
        return held + jnp.dtype(dtype).itemsize * tokens * values_in_forward(self.config, devices.sizes["expert"])

    def made_of(self) -> dict[str, str]:
        """Texts that identify it."""
        config = {self.source.path.name: self.source.path.read_bytes()}
        digests = identity.of_files(config) | identity.of_weights(self.source.folder, self.source.weight_files)
        return {f"{TEACHER}'s {name}": digest for name, digest in digests.items()}

    def _kernels(self, kernels: KernelOptions) -> KernelOptions:
        """The student's options. The student's axis of experts splits a dense teacher's parameters, as fsdp does."""
        layout = kernels.layout
        if layout is None or layout.expert is None or self.config.experts is not None:
            return kernels
        return dataclasses.replace(kernels, layout=dataclasses.replace(layout, expert=None, fsdp=layout.fsdp_axes))

    def _dtypes(self, dtype: str) -> dict[str, Any]:
        """Its weights have the checkpoint's dtype, since they are frozen."""
        return {"dtype": jnp.dtype(dtype), "param_dtype": jnp.dtype(self.source.dtype)}


def found(settings: Settings[DistillOptions], source: Source, student: Architecture) -> Teacher:
    """Looks for a run's teacher, before anything is read."""
    options = settings.method
    name = f"--teacher={options.teacher}"
    with of_option("--teacher"):
        its = find(options.teacher)
    if is_adapted(its):
        raise UserError(f"{name} holds adapters. Pass a whole model, such as one that --merge has written.")
    weights.check("--teacher", its)
    target = result.folder(settings)
    if target.exists() and target.samefile(its.folder):
        raise UserError(f"The result would be written to {target}, which is --teacher itself. Pass another --out.")
    if its.is_nf4 and options.teacher_quantize is not None:
        raise UserError(f"--teacher-quantize={options.teacher_quantize}, but {name} is nf4 already. Leave it out.")
    is_itself = its.folder.resolve() == source.folder.resolve() and settings.adapters.adapters is None
    if is_itself and settings.placement.quantize is None and not options.hard_weight:
        print(f"{name} is --model itself: their probabilities are equal, so that there is nothing to learn")
    architecture = architecture_of(its)
    if settings.rows.length > (longest := architecture.config.longest_sequence):
        raise UserError(
            f"--length={settings.rows.length} is more than the {longest} positions of {name}. Pass --length {longest}."
        )
    vocab_size = min(student.config.vocab_size, architecture.config.vocab_size)
    _check_vocabularies(name, (source, student), (its, architecture), vocab_size)
    if options.top_k is not None and options.top_k > vocab_size:
        raise UserError(f"--top-k={options.top_k} is more than the {vocab_size} entries of the vocabulary.")
    return Teacher(its, architecture, options.teacher_quantize, vocab_size, stays=options.top_k is None)


def _check_vocabularies(
    name: str, student: tuple[Source, Architecture], teacher: tuple[Source, Architecture], size: int
) -> None:
    """Checks that each id is the same token for both; the teacher may have more tokens."""
    vocabulary = lambda source, model: training_rows.tokenizer(source, model.config.vocab_size).vocabulary
    ours, its = (vocabulary(*each) for each in (student, teacher))
    for token, number in ours.items():
        if its.get(token) != number or number >= size:
            has = "has no such token" if token not in its else f"calls it {its[token]}"
            has = has if its.get(token) != number else f"has a head of {size} entries"
            raise UserError(
                f"{name} has another vocabulary: the token {short(token)} has the id {number} in --model, and the "
                f"teacher {has}. Distributions over different tokens cannot be compared; pass a teacher of the same "
                "tokenizer."
            )


def _shape_on_a_device(x: Any) -> tuple[int, ...]:
    sharding = getattr(x, "sharding", None)
    return x.shape if sharding is None else sharding.shard_shape(x.shape)
