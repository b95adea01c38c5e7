"""The options of a training run: five groups, each defined beside the code that reads it, and those of the method."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from liger_jax import _options
from liger_jax._options import MOST
from liger_jax.data.options import RowOptions
from liger_jax.models.hugging_face.checkpoint import ADAPTERS
from liger_jax.trainers.adapters import AdapterOptions
from liger_jax.trainers.method import Method
from liger_jax.trainers.placement import Placement
from liger_jax.trainers.recipe import Recipe
from liger_jax.trainers.run_folder import RunFolder
from liger_jax.user_errors import UserError

M = TypeVar("M", bound=Method)
_OWNERS: Mapping[str, Any] = dict(
    rows=RowOptions, adapters=AdapterOptions, recipe=Recipe, placement=Placement, folder=RunFolder
)
GROUPS = {  # of the options in a help text, by their titles: the page of each. A method's own are on its command's
    "model": "docs/models.md",
    "data": "docs/finetune.md#data",
    "adapters": "docs/lora.md",
    "speed and memory": "docs/memory.md",
    "schedule": "docs/finetune.md#options",
    "what is kept": "docs/finetune.md#output-files",
    "several devices": "docs/finetune.md#several-devices",
}
_ORDER = (  # of a file of options; what is not here comes after it
    "model data eval_data subset column format stream lora lora_alpha lora_targets lora_experts lora_dropout rslora "
    "dora adapters quantize pack length rope_scaling batch micro_batches epochs steps learning_rate optimizer schedule "
    "warmup weight_decay clip remat dtype param_dtype eval_share every samples patience keep seed log out merge "
    "save_dtype result_of push fresh mesh distributed verify risk_memory"
).split()


def options_of(method: type[Method]) -> dict[str, dataclasses.Field[Any]]:
    """The options of a command that trains, by name, with its defaults and words."""
    owners = (*_OWNERS.values(), method)
    grouped = lambda field, owner: _options.changed(field, {"group": field.metadata["group"] or owner.group_of_options})
    fields = [grouped(field, owner) for owner in owners for field in _options.options_of(owner)]
    changed = (_options.changed(field, method.changes.get(field.name, {})) for field in _in_order(fields))
    return {field.name: field for field in changed if field.name not in method.no_options}


def _in_order(fields: Any) -> list[dataclasses.Field[Any]]:
    return sorted(fields, key=lambda field: _ORDER.index(field.name) if field.name in _ORDER else len(_ORDER))


@dataclasses.dataclass(frozen=True)
class Settings(Generic[M]):
    """A run's options, grouped by the code that reads them."""

    rows: RowOptions
    adapters: AdapterOptions
    recipe: Recipe
    placement: Placement
    folder: RunFolder
    method: M

    @classmethod
    def of(cls, method: type[M], **values: Any) -> "Settings[M]":
        """The options of a run by their names; those that are not given have the method's defaults."""
        if unknown := values.keys() - options_of(method).keys():
            raise TypeError(f"{min(unknown)} is no option of liger-jax {method.command}.")
        defaults = {name: change["default"] for name, change in method.changes.items() if "default" in change}
        return cls._made(method, defaults | values)

    def changed(self, **values: Any) -> "Settings[M]":
        """The same run with other values of some options."""
        return self._made(type(self.method), self.flat() | values)

    @classmethod
    def _made(cls, method: type[M], values: Mapping[str, Any]) -> "Settings[M]":
        own = method(**_taken(method, values))
        values = {**values, **own.decided(values)}
        owners: dict[str, Any] = {name: owner(**_taken(owner, values)) for name, owner in _OWNERS.items()}
        return cls(**owners, method=own)

    def __post_init__(self):
        method, rows, recipe, folder = self.method, self.rows, self.recipe, self.folder
        if recipe.batch * rows.length > MOST:
            raise UserError(
                f"--batch={recipe.batch} rows of --length={rows.length} are more than the {MOST:,} tokens that a step "
                "can have. Pass a smaller --batch."
            )
        of_adapters = ("lora_alpha", "lora_targets", "lora_experts", "lora_dropout", "rslora", "dora")
        values = self.flat()
        for name in (*of_adapters, "quantize", "merge"):
            if values[name] and not self.has_adapters:
                raise UserError(f"--{name.replace('_', '-')} is for adapters: pass --lora, such as --lora 16, as well.")
        if rows.stream and (recipe.steps is None or not rows.eval_data):
            raise UserError(
                "--stream reads data of unknown length, so no share can be held out: pass --steps and --eval-data."
            )
        if folder.save_dtype is not None and self.has_adapters and not folder.merge:
            raise UserError(f"--save-dtype={folder.save_dtype} is for weights, not adapters: pass --merge as well.")
        method.check(self)

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained: new ones, or those of a folder."""
        return self.adapters.lora is not None or (Path(self.placement.model) / ADAPTERS.config).is_file()

    @property
    def keeps(self) -> tuple[str, ...]:
        """What the run keeps in OUT beside checkpoints, logs and the result, by the names of `result.BESIDE`."""
        return self.method.keeps(self)

    @property
    def peak_rate(self) -> float:
        """The peak of the learning rate."""
        return self.recipe.learning_rate or self.method.peak_rates[self.adapters.lora is not None]

    def flat(self, kind: str | None = None) -> dict[str, Any]:
        """The options by name, in the order of their file: all, or those whose fields are of a kind."""
        parts = self.rows, self.adapters, self.recipe, self.placement, self.folder, self.method
        values = {field: getattr(part, field.name) for part in parts for field in dataclasses.fields(part)}
        fields = [field for field in _in_order(values) if kind is None or field.metadata.get(kind, True)]
        return {field.name: values[field] for field in fields}

    def to_write(self) -> dict[str, Any]:
        """The options as a file of options has them.

        Returns values by name; `None` where the default depends on others. A file neither starts a run over nor has all
        weights read, and is the same for all processes.
        """
        values = self.flat("in_file")
        return {name: value for name, value in values.items() if name not in self.method.not_written}

    def of_all_processes(self) -> dict[str, Any]:
        """The options that are the same in all processes of a run, by the names of the command line."""
        return {f"--{name.replace('_', '-')}": value for name, value in self.flat("of_all").items()}

    def of_the_run(self) -> dict[str, Any]:
        """What must stay the same when a run is continued, by name."""
        return self.flat("of_run") | {
            "epochs": self.recipe.epochs_to_train,
            "learning_rate": self.peak_rate,
            "data": " ".join(self.rows.data),
            "eval_data": " ".join(self.rows.eval_data),
            "eval_share": self.rows.share_held_out,
            "column": self.rows.column or "text",
            **self.method.of_the_run(),
        }


def _taken(owner: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of one group's options."""
    return {field.name: values[field.name] for field in dataclasses.fields(owner) if field.name in values}
