"""Checkpoints of a training run with orbax: the state, and the log from which a curve is drawn."""

import importlib.util
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from liger_jax.commands._errors import UserError, needed_packages, writable_folder

CHECKPOINTS = "checkpoints"
_SETTINGS, _EARLIER = "settings.json", "earlier.json"
_IN_A_CHECKPOINT = {"state", "log", "_CHECKPOINT_METADATA"}
_CURE = "Pass --fresh to start over, or another --out."


def holds_a_run(folder: Path) -> bool:
    """Whether a run has saved checkpoints into a folder."""
    return (folder / _SETTINGS).is_file()


class Checkpoints:
    """The newest checkpoint of one run. Nothing is written, and nothing thrown away, before the first `save`.

    Args:
        folder: where checkpoints are kept.
        settings: the run's settings; a folder holds one run only.
        fresh: whether to start over even if there is a checkpoint.
        earlier: names of what the run that is started over has left elsewhere.

    Raises:
        UserError: nothing can be written to the folder, it holds what looks like a step and is none, or orbax is not
            installed.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], *, fresh: bool, earlier: Sequence[str] = ()):
        writable_folder(folder)
        for path in folder.iterdir():
            if path.name.isdigit() and not _is_checkpoint(path):
                raise UserError(f"{path} is no checkpoint of a run. Move it, or pass another --out.")
        self._orbax, self._earlier = _orbax(), list(earlier)
        self._folder, self._fresh, self._opened = folder, fresh, None
        self._settings = json.loads(json.dumps(settings))

    @property
    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, or `None` where there is none of this run."""
        return None if self._fresh else self._manager.latest_step()

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """Reads the newest checkpoint, and prints which step it is of.

        Args:
            like: a state of the same structure, shapes, dtypes and places.

        Returns:
            State and log, or `None` where there is no checkpoint yet.

        Raises:
            UserError: the folder holds a run with other settings, or a checkpoint that cannot be read.
        """
        step = self.latest_step
        if step is None:
            return None
        self._check_settings()
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in jax.tree.leaves(like)]
        ocp = self._orbax
        args = ocp.args.Composite(state=ocp.args.StandardRestore(shapes), log=ocp.args.JsonRestore())
        try:
            read = self._manager.restore(step, args=args)
            state, log = jax.tree.unflatten(jax.tree.structure(like), read["state"]), read["log"]
        except Exception as error:  # whatever orbax makes of a damaged file
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise UserError(f"The checkpoint {self._folder / str(step)} cannot be read ({reason}). {_CURE}") from error
        print(f"resumed at step {step}")
        return state, log

    def save(self, step: int, state: Any, log: dict[str, Any]) -> None:
        """Writes a checkpoint, then drops the one before it; a step that is there already is left alone.

        Args:
            step: number of steps done.
            state: any pytree of arrays.
            log: anything that JSON holds.

        Raises:
            UserError: it cannot be written.
        """
        if step == self.latest_step:
            return
        ocp = self._orbax
        # Leaves in order: orbax need not know the module and optimizer types.
        args = ocp.args.Composite(state=ocp.args.StandardSave(jax.tree.leaves(state)), log=ocp.args.JsonSave(log))
        try:
            if self._fresh:
                for path in filter(_is_checkpoint, list(self._folder.iterdir())):  # and nothing that no run has written
                    shutil.rmtree(path)
                (self._folder / _EARLIER).write_text(json.dumps(self._earlier))
                self._fresh = False
            if self.latest_step is None:
                (self._folder / _SETTINGS).write_text(json.dumps(self._settings))
            self._manager.save(step, args=args)
        except OSError as error:
            raise UserError(f"The checkpoint of step {step} cannot be written to {self._folder}: {error}.") from error

    @property
    def earlier(self) -> list[str]:
        """What the run that this one has taken the place of has left elsewhere, also if this one was stopped since."""
        try:
            return json.loads((self._folder / _EARLIER).read_text())
        except (OSError, ValueError):
            return []

    def forget_earlier(self) -> None:
        """To be called when nothing of the earlier run is left."""
        (self._folder / _EARLIER).unlink(missing_ok=True)

    @property
    def _manager(self) -> Any:
        if self._opened is None:
            ocp = self._orbax
            options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
            self._opened = ocp.CheckpointManager(self._folder.resolve(), options=options)
        return self._opened

    def _check_settings(self) -> None:
        path, new = self._folder / _SETTINGS, self._settings
        try:
            old = json.loads(path.read_text())
            names = dict.fromkeys([*new, *old])
            changed = [f"{n}={old.get(n)!r} became {new.get(n)!r}" for n in names if old.get(n) != new.get(n)]
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path}, which tells what the run there is made of, cannot be read. {_CURE}") from error
        if changed:
            raise UserError(f"{self._folder} holds another run: {', '.join(changed)}. {_CURE}")


def _is_checkpoint(path: Path) -> bool:
    """Whether orbax has made a folder for a step; what a run that was killed has left of one counts, too."""
    if not path.is_dir() or path.is_symlink():
        return False
    names = {each.name for each in path.iterdir()}
    return ".orbax-checkpoint-tmp" in path.name or path.name.isdigit() and (not names or bool(names & _IN_A_CHECKPOINT))


def need_orbax() -> None:
    """Looks for orbax at the start of a run, since it is imported late.

    Raises:
        UserError: it is not installed.
    """
    with needed_packages():
        if importlib.util.find_spec("orbax.checkpoint") is None:
            raise ModuleNotFoundError(name="orbax.checkpoint")


def _orbax() -> Any:
    """The package, which takes most of a second to import, so that a run does it while programs are compiled."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # it tells of each step it takes
    with needed_packages():
        import orbax.checkpoint
    return orbax.checkpoint
