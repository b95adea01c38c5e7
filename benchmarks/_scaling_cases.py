"""The cases of `scaling`: what is trained, on how many GPUs, and how they share it."""

import dataclasses
import math
from typing import Any

from benchmarks._scaling_loss import LossCase
from liger_jax.planner.architectures import Architecture, architecture
from liger_jax.planner.devices import target
from liger_jax.planner.estimate import estimate
from liger_jax.planner.mesh import mesh_sizes
from liger_jax.planner.step import Run
from liger_jax.training.meshes import AXES, in_words, parse_mesh


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its batch and its mesh."""

    how: str  # "weak" or "strong"
    model: str  # as the planner takes it
    layers: int | None  # how many of its layers; `None` for all
    scan: bool  # whether layers are scanned
    remat: str  # as the models take it
    rows: int  # of one GPU alone
    seq: int  # tokens in a row
    mesh: tuple[tuple[str, int], ...]  # the sizes of its axes

    @classmethod
    def of(cls, text: str) -> "Case":
        """The case of a text."""
        try:
            how, model, sizes, mesh = text.split(":")
            model, *options = model.split("+")
            model, _, layers = model.partition("@")
            rows, seq = map(int, sizes.split("x"))
        except ValueError:
            raise ValueError(f"case={text!r} must be such as weak:llama-3.2-1b:4x2048:fsdp=2.") from None
        if how not in ("weak", "strong") or not {*options} <= {"unrolled", "full"}:
            raise ValueError(f"case={text!r}: the scaling is weak or strong, and options are +unrolled and +full.")
        remat = "full" if "full" in options else "none"
        count = int(layers) if layers else None
        axes = tuple((name, size) for name, size in parse_mesh(mesh).items() if size > 1) or (("fsdp", 1),)
        return cls(how, model, count, "unrolled" not in options, remat, rows, seq, axes)

    @property
    def count(self) -> int:
        """Its GPUs."""
        return math.prod(size for _, size in self.mesh)

    @property
    def batch(self) -> int:
        """Its rows over all GPUs."""
        return self.rows * (self.count if self.how == "weak" else 1)

    @property
    def alone(self) -> "Case":
        """The same on one GPU."""
        return dataclasses.replace(self, how="weak", mesh=(("fsdp", 1),))

    @property
    def name(self) -> str:
        """In words, for a table."""
        layers = f", {self.layers} layers" if self.layers else ""
        options = ("" if self.scan else ", unrolled") + (f", remat {self.remat}" if self.remat != "none" else "")
        where = f"{self.how}, {in_words(dict(self.mesh))}" if self.count > 1 else "one GPU"
        return f"{self.model}{layers}{options}, {self.batch} × {self.seq}, {where}"


def default_cases(count: int) -> list[str]:
    """The cases for a number of GPUs: each axis alone, and pairs where there are enough of them."""
    half = count // 2
    pairs = [f"fsdp={half},tensor=2", f"fsdp={half},sequence=2", f"tensor={half},sequence=2"] if half > 1 else []
    small, large = "llama-3.2-1b", "llama-3.1-8b@8"
    meshes = [f"fsdp={count}", f"tensor={count}", f"sequence={count}", *pairs]
    cases = [f"weak:{small}:4x2048:fsdp={count}", f"weak:{small}:1x8192:fsdp={count}"]
    cases += [f"strong:{large}+full:8x2048:{mesh}" for mesh in meshes]
    cases += [f"strong:{large}+full:1x65536:sequence={count}", f"strong:{large}+full:1x32768:tensor={count}"]
    return cases + [f"loss:8192x4096x128256:tensor={count}", f"weak:{small}+unrolled:4x2048:fsdp={count}"]


def with_layers(model: Architecture, layers: int | None) -> Architecture:
    """The architecture with its first so many layers; all of them for `None`."""
    if not layers:
        return model
    config = model.config
    fields = {field.name for field in dataclasses.fields(config)}
    types = dict(layer_types=config.layer_types[:layers]) if "layer_types" in fields else {}
    return dataclasses.replace(model, config=dataclasses.replace(config, num_hidden_layers=layers, **types))


def run_of(case: Case, device: str) -> Run:
    """The run that the planner knows."""
    model = with_layers(architecture(case.model), case.layers)
    devices = target(f"{device}:{case.count}" if case.count > 1 else device)
    options: Any = dict.fromkeys(("param_dtype", "state_dtype", "dtype"), "bfloat16")
    mesh = mesh_sizes(dict(case.mesh), case.count)
    return Run(model, case.batch, case.seq, devices, mesh, remat=case.remat, **options)


def chosen(texts: list[str], count: int, device: str) -> list[tuple[Case | LossCase, Run | None]]:
    """The cases that can run, those of one GPU before; a line for each that cannot. A loss alone is no run."""
    pairs: dict[Any, Run | None] = {}
    for text in texts:
        case = LossCase.of(text) if text.startswith("loss") else Case.of(text)
        if case.count > count:
            print(f"skipped: {case.name}: there are {count} GPUs", flush=True)
            continue
        if isinstance(case, LossCase):
            pairs |= dict.fromkeys((case.alone, case))
            continue
        if absent := [name for name, size in case.mesh if name not in AXES and size > 1]:
            print(f"skipped: {case.name}: the planner has no {absent[0]} axis yet", flush=True)
            continue
        try:
            pairs |= {each: run_of(each, device) for each in (case.alone, case)}
        except ValueError as error:
            print(f"skipped: {case.name}: {error}", flush=True)
    by_plan = lambda pair: (pair[0].count > 1, 0 if pair[1] is None else estimate(pair[1]).total)
    return sorted(pairs.items(), key=by_plan)
