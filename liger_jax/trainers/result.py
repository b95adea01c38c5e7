"""The result of a run: a folder that transformers loads as it is."""

import collections
import dataclasses
import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from safetensors import SafetensorError

from liger_jax.models.hugging_face.checkpoint import Kept
from liger_jax.models.hugging_face.source import Source
from liger_jax.models.hugging_face.weights import open_weights
from liger_jax.models.lora import merge_lora, save_adapters
from liger_jax.trainers import log, options_file
from liger_jax.trainers.options import Settings
from liger_jax.training import disk
from liger_jax.training.checkpoints import FINISHED
from liger_jax.training.files import read_json
from liger_jax.training.steps import holds_a_run
from liger_jax.user_errors import UserError

CHECKPOINTS = "checkpoints"
MODEL, ADAPTERS = "model", "adapters"
SETTINGS = "settings.toml"
BESIDE = {  # files that some commands store beside their checkpoints, by what they hold
    "tokens": ("tokens",),
    "completions": ("completions.jsonl",),
    "references": ("references.f32", "references.json", "references.new"),
    "teacher": ("teacher.bin", "teacher.json", "teacher.new"),
}
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # in safetensors' names


def check(settings: Settings, source: Path) -> None:
    """Checks before the run what its result would replace: only files that a run has left may be lost."""
    out, target = Path(settings.folder.out), folder(settings)
    if "csv" in settings.folder.log:
        log.check_table(out / log.TABLE)
    written = out / SETTINGS
    if written.exists() and not _is_of_a_run(written):
        raise UserError(
            f"{written} was not written by a run, and would be overwritten. Move it, or pass another --out."
        )
    _check_method(settings, written)
    if out.resolve() == source.resolve():  # the folder's name would mean both models
        raise UserError(f"--out={out} is the folder of --model itself. Pass another --out.")
    _check_kinds(settings, out, target)
    if not target.exists():
        return
    if target.samefile(source) or _share_weights(target, source):
        raise UserError(f"The result would be written to {target}, which is --model itself. Pass another --out.")
    if not target.is_dir() or any(target.iterdir()) and not holds_a_run(out / CHECKPOINTS):
        raise UserError(
            f"The result would replace {target}, and {out / CHECKPOINTS} holds no run that has written it. Move it, or "
            "pass another --out."
        )


def _check_kinds(settings: Settings, out: Path, target: Path) -> None:
    """Refuses files where the run makes folders, and folders where it makes files."""
    folders = {CHECKPOINTS, *BESIDE["tokens"], *(log.PLACES[kind] for kind in settings.folder.log if kind != "csv")}
    files = {log.TABLE} if "csv" in settings.folder.log else set()
    files |= {name for kind in settings.keeps for name in BESIDE[kind]} - folders
    if target.is_symlink() and not target.exists():
        folders.add(target.name)
    for name in sorted(folders | files):
        path, is_folder = out / name, name in folders
        if path.is_dir() != is_folder and (path.exists() or path.is_symlink() and is_folder):
            kind = "folder" if path.is_dir() else "file" if path.exists() else "link that leads nowhere"
            needed = "folder" if is_folder else "file"
            raise UserError(f"{path} is a {kind}, where the run makes a {needed}. Move it, or pass another --out.")


def write_settings(settings: Settings) -> None:
    """Writes the file of options in OUT by which the run can be repeated."""
    heading = options_file.heading(settings.method.command)
    options_file.write(Path(settings.folder.out) / SETTINGS, settings.to_write(), heading)


def _check_method(settings: Settings, written: Path) -> None:
    """Refuses a folder with a run of another command, which this one would not resume."""
    if settings.folder.fresh or not written.is_file() or not holds_a_run(written.parent / CHECKPOINTS):
        return
    match = re.match(rf"{re.escape(options_file.OF_A_RUN)} of liger-jax (\w+)\.", written.read_text(errors="replace"))
    if match and match[1] != (own := settings.method.command):
        raise UserError(
            f"{written.parent} holds a run of liger-jax {match[1]}, and this one is of liger-jax {own}. Pass "
            "--fresh to start over, or another --out."
        )


def _is_of_a_run(written: Path) -> bool:
    """Whether a file of options is a run's own."""
    return written.is_file() and written.read_text(errors="replace").startswith(options_file.OF_A_RUN)


def _share_weights(target: Path, source: Path) -> bool:
    """Whether two folders share a file with weights, such as by a link."""
    whole = target.resolve()
    own = {_identity(path) for path in whole.glob("*.safetensors") if path.exists()}
    files = [path for path in source.glob("*.safetensors") if path.exists()]
    return any(path.resolve().is_relative_to(whole) or _identity(path) in own for path in files)


def _identity(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino


def is_there(settings: Settings, finished: dict[str, Any]) -> bool:
    """Whether a run has already left the result that it is asked for.

    Returns whether that result still has all its files. Their contents are not checked, since the user may change them.
    """
    entry = finished.get(folder(settings).name)
    if entry is None or entry["save_dtype"] != settings.folder.save_dtype:
        return False
    return all((folder(settings) / name).is_file() for name in entry["files"])


def ended_early(settings: Settings, finished: dict[str, Any]) -> bool:
    """Whether the run has ended before its last step by `--patience`, with the value that it has now."""
    entry = finished.get(folder(settings).name, {})
    return settings.recipe.patience is not None and entry.get("patience") == settings.recipe.patience


def record(settings: Settings, target: Path, early: bool) -> dict[str, Any]:
    """Records what `is_there` and `ended_early` read of a result."""
    files = sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())
    files = [name for name in files if name != "README.md"]  # the card, of which a user may do without
    patience = settings.recipe.patience if early else None
    return {"save_dtype": settings.folder.save_dtype, "files": files, "patience": patience}


def most_bytes(settings: Settings, source: Source, trained: Any) -> int:
    """The most bytes on disk that the result takes while it is written."""
    own = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trained))
    if settings.adapters.lora is None or not settings.folder.merge:
        return own
    dense = source.weight_bytes * (4 if source.is_nf4 else 1)
    return dense * (2 if settings.folder.save_dtype == "float32" else 1)


def of_earlier_runs(out: Path, source: Path) -> list[str]:
    """The files that runs have left in OUT beside their checkpoints, apart from the model that is tuned now."""
    beside = [name for names in BESIDE.values() for name in names if (out / name).exists()]
    if not holds_a_run(out / CHECKPOINTS):  # it may have been killed before its first checkpoint
        return beside if _is_of_a_run(out / SETTINGS) else []
    names = [name for name in (MODEL, ADAPTERS, log.TABLE, log.EVENTS, log.WANDB) if (out / name).exists()]
    names += sorted(path.name for path in out.iterdir() if re.fullmatch(rf"({MODEL}|{ADAPTERS})-\d+", path.name))
    tuned = source.resolve()
    return beside + [name for name in names if not any((out / name).samefile(path) for path in (tuned, *tuned.parents))]


def clear(settings: Settings, earlier: Sequence[str]) -> None:
    """Removes the files of an earlier run that this one, which started over, has not replaced, and says so."""
    own = {folder(settings).name} | {log.PLACES[kind] for kind in settings.folder.log}
    own |= {name for kind in settings.keeps for name in BESIDE[kind]}
    for name in earlier:
        path = Path(settings.folder.out) / name
        if name in own or not path.exists():
            continue
        try:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        except OSError as error:
            raise UserError(f"{path}, which an earlier run has left, cannot be removed: {error}.") from error
        print(f"removed {path}: an earlier run had left it")


def folder(settings: Settings) -> Path:
    """The folder of the result.

    Returns OUT/model or OUT/adapters; with the step after it for `--result-of`, which replaces no run's result.
    """
    name, step = ADAPTERS if only_adapters(settings) else MODEL, settings.folder.result_of
    return Path(settings.folder.out) / (name if step is None else f"{name}-{step}")


def places(out: Path) -> list[Path]:
    """Where a run's results may be, those of its last step before those of an earlier one."""
    newest = read_json(out / CHECKPOINTS / FINISHED).get("results") or {}
    return [out / name for name in sorted((MODEL, ADAPTERS), key=lambda name: name not in newest)]


def only_adapters(settings: Settings) -> bool:
    """Whether the result is adapters alone."""
    return settings.adapters.lora is not None and not settings.folder.merge


def write(model: Any, settings: Settings, source: Source, stops: Sequence[int]) -> Path:
    """Writes weights or adapters, the tokenizer's files with the chat template, and the generation config."""
    target = folder(settings)
    generation = _generation(model.kept, stops)
    try:
        if only_adapters(settings):
            base = str(source.folder.resolve()) if Path(settings.placement.model).is_dir() else settings.placement.model
            model.kept = dataclasses.replace(model.kept, generation=generation)
            save_adapters(model, target, base_model=base, tokenizer_from=source)
            return target
        if settings.adapters.lora is not None:
            merge_lora(model)
        _cast(model, settings.folder.save_dtype, _dtype_of(source))
        model.kept = dataclasses.replace(model.kept, generation=generation)
        has_eos = json.loads(model.kept.config).get("eos_token_id") is not None
        fields = None if has_eos or not stops else {"eos_token_id": stops[0]}
        model.save_pretrained(target, tokenizer_from=source, config_fields=fields)
    except (OSError, SafetensorError) as error:
        if disk.is_full(error):
            needed = most_bytes(
                settings, source, nnx.state(model, nnx.Param if settings.adapters.lora is None else nnx.LoRAParam)
            )
            raise disk.full("The result", target, needed) from error
        raise UserError(f"The result cannot be written to {target}: {error}. The checkpoint stays.") from error
    return target


def _dtype_of(source: Source) -> str | None:
    """The dtype of most of a checkpoint's bytes, whatever its config.json says; `None` if a model cannot have it."""
    sizes = collections.Counter()
    for name in source.weight_files:
        with open_weights(source.folder / name) as file:
            for tensor in map(file.get_slice, file.keys()):
                sizes[tensor.get_dtype()] += math.prod(tensor.get_shape())
    return _DTYPES.get(max(sizes, key=lambda name: sizes[name], default=""))


def _cast(model: Any, asked: str | None, stored: str | None) -> None:
    """Casts the weights to the dtype that was asked for, or to the checkpoint's if it is smaller, and says so."""
    held = str(model.head.dtype)
    wanted = asked or (stored if stored and jnp.dtype(stored).itemsize < jnp.dtype(held).itemsize else held)
    if wanted != held:
        for _, parameter in nnx.iter_graph(model):  # one after another, since memory may be full
            if not isinstance(parameter, nnx.Param):
                continue
            cast = parameter.get_value().astype(wanted)
            if wanted == "float16" and not jnp.isfinite(cast).all():
                raise UserError(
                    "A weight is too large for float16. Pass --save-dtype float32: the same command resumes from the "
                    "checkpoint."
                )
            parameter.set_value(cast)
    if asked is None and wanted != held:
        print(f"saved in {wanted}, as the model came; --save-dtype {held} saves it as it was trained")
    elif asked is None and stored not in (None, wanted):
        print(f"saved in {wanted}, as it was trained; the model came in {stored}")


def _generation(kept: Kept, stops: Sequence[int]) -> str | None:
    """The text of generation_config.json, whose `eos_token_id` lists all tokens that end a text."""
    if not stops or kept.generation is not None and set(stops) <= set(kept.stops):
        return kept.generation
    config = json.loads(kept.config)
    starts = {name: config[name] for name in ("bos_token_id", "pad_token_id") if config.get(name) is not None}
    values = json.loads(kept.generation) if kept.generation is not None else starts
    values["eos_token_id"] = list(stops) if len(stops) > 1 else stops[0]
    return json.dumps(values, indent=2) + "\n"
