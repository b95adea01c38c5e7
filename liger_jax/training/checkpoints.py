"""Checkpoints of a training run with orbax: the state, and the log from which a curve is drawn."""

import json
import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from liger_jax._install import install_command
from liger_jax.training.errors import CheckpointError, FolderError, ForeignStepError, TrainingError

_SETTINGS, _EARLIER = "settings.json", "earlier.json"
_IN_A_CHECKPOINT = {"state", "log", "_CHECKPOINT_METADATA"}


def holds_a_run(folder: Path) -> bool:
    """Whether a run has saved checkpoints into a folder.

    Args:
        folder: a path.

    Returns:
        `False` also if there is no such folder.

    Example:
        >>> holds_a_run(Path("nowhere"))
        False
    """
    return (folder / _SETTINGS).is_file()


class Checkpoints:
    """The newest checkpoint of one run. Nothing is written, and nothing thrown away, before the first `save`.

    Args:
        folder: where checkpoints are kept.
        settings: what the run is made of, as JSON holds it. A folder holds one run only, so that another run's
            checkpoint is refused.
        fresh: whether to start over even if there is a checkpoint.
        earlier: names of what the run that is started over has left elsewhere.

    Raises:
        FolderError: nothing can be written to the folder.
        ForeignStepError: the folder holds what looks like a step and is none.
        ImportError: orbax is not installed.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Checkpoints(Path(folder), {"rate": 0.1}).save(3, [jax.numpy.ones(2)], {"steps": []})
        ...     state, log = Checkpoints(Path(folder), {"rate": 0.1}).restore([jax.numpy.zeros(2)])
        >>> state[0].tolist(), log
        ([1.0, 1.0], {'steps': []})
    """

    def __init__(self, folder: Path, settings: dict[str, Any], *, fresh: bool = False, earlier: Sequence[str] = ()):
        check_writable(folder)
        for path in folder.iterdir():
            if path.name.isdigit() and not _is_checkpoint(path):
                raise ForeignStepError(f"{path} is no checkpoint of a run.")
        self._orbax, self._earlier = _orbax(), list(earlier)
        self._folder, self._fresh, self._opened = folder, fresh, None
        self._settings = json.loads(json.dumps(settings))

    @property
    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, or `None` where there is none of this run."""
        return None if self._fresh else self._manager.latest_step()

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """Reads the newest checkpoint, whose step is `latest_step`.

        Args:
            like: a state of the same structure, shapes, dtypes and places.

        Returns:
            State and log, or `None` where there is no checkpoint yet.

        Raises:
            CheckpointError: the folder holds a run with other settings, or a checkpoint that cannot be read.
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
            raise CheckpointError(f"The checkpoint {self._folder / str(step)} cannot be read ({reason}).") from error
        return state, log

    def save(self, step: int, state: Any, log: dict[str, Any]) -> None:
        """Writes a checkpoint, then drops the one before it; a step that is there already is left alone.

        Args:
            step: number of steps done.
            state: any pytree of arrays.
            log: anything that JSON holds.

        Raises:
            TrainingError: it cannot be written.
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
            raise TrainingError(
                f"The checkpoint of step {step} cannot be written to {self._folder}: {error}."
            ) from error

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
            raise CheckpointError(f"{path}, which tells what the run there is made of, cannot be read.") from error
        if changed:
            raise CheckpointError(f"{self._folder} holds another run: {', '.join(changed)}.")


def _is_checkpoint(path: Path) -> bool:
    """Whether orbax has made a folder for a step; what a run that was killed has left of one counts, too."""
    if not path.is_dir() or path.is_symlink():
        return False
    names = {each.name for each in path.iterdir()}
    return ".orbax-checkpoint-tmp" in path.name or path.name.isdigit() and (not names or bool(names & _IN_A_CHECKPOINT))


def check_writable(folder: Path) -> None:
    """Makes a folder, if there is none.

    Args:
        folder: a path, as it was typed.

    Raises:
        FolderError: it cannot be made, or nothing can be written there.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     check_writable(Path(folder) / "run")
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise FolderError(f"Nothing can be written to {folder}: {error.strerror}.") from error


def _orbax() -> Any:
    """The package, which takes most of a second to import, so that a run does it while programs are compiled."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # it tells of each step it takes
    try:
        import orbax.checkpoint
    except ModuleNotFoundError as error:
        raise ImportError(f"Checkpoints need orbax-checkpoint: {install_command('finetune')}.") from error
    return orbax.checkpoint
