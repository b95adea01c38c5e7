"""Checkpoints of a training run with orbax: the state, and the log from which a curve is drawn."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from liger_jax._install import install_command
from liger_jax.training import digests, disk, processes, steps
from liger_jax.training.errors import CheckpointError, DamagedError, ForeignStepError, TrainingError
from liger_jax.training.files import check_writable, read_json, write_json
from liger_jax.training.identity import check_same
from liger_jax.training.steps import ABOUT, LOG, STATE

_REPLACED, FINISHED = "earlier.json", "finished.json"  # the second one holds the results of the newest checkpoint


class Checkpoints:
    """The newest checkpoints of one run, and the best one. Nothing is written or deleted before the first `save`.

    Each checkpoint has digests of its contents, and the settings of its run. Several processes write one checkpoint
    together, into a folder that all of them can access: all call `save` and `restore`, and only the first one calls
    `finish` and `forget_earlier`.

    Args:
        folder: where checkpoints are kept.
        settings: the settings that identify the run, as JSON values. A folder holds one run, so a checkpoint with other
            settings is refused.
        fresh: whether to start over even if there is a checkpoint, which is deleted once the first new one is complete.
        earlier: names of other files that the run which is started over has left.
        keep: how many of the newest checkpoints are kept, in addition to the one with the lowest score.
        growing: names of settings that may be increased when a run resumes, such as the number of steps.

    Raises:
        FolderError: nothing can be written to the folder.
        ForeignStepError: the folder has an entry that is named like a checkpoint and is none.
        ImportError: orbax is not installed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Checkpoints(Path(folder), {"rate": 0.1}).save(3, [jax.numpy.ones(2)], {"steps": []})
        ...     state, log = Checkpoints(Path(folder), {"rate": 0.1}).restore([jax.numpy.zeros(2)])
        >>> state[0].tolist(), log
        ([1.0, 1.0], {'steps': []})
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        *,
        fresh: bool = False,
        earlier: Sequence[str] = (),
        keep: int = 1,
        growing: Sequence[str] = (),
    ):
        check_writable(folder)
        for path in folder.iterdir():
            if steps.number_of(path) is not None and not steps.is_checkpoint(path):
                raise ForeignStepError(f"{path} is not a checkpoint of a run.")
        self._orbax, self._earlier, self._keep = _orbax(), list(earlier), keep
        self._folder, self._fresh, self._growing = folder, fresh, tuple(growing)
        self._settings = json.loads(json.dumps(settings))

    @property
    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, or `None` if this run has none."""
        return max(self._steps(), default=None)

    @property
    def kept_steps(self) -> list[int]:
        """The steps whose checkpoints are kept, in ascending order."""
        return sorted(self._steps())

    @property
    def best(self) -> tuple[int, float] | None:
        """The kept step with the lowest score, and the score; `None` if none has a score."""
        scores = {step: score for step, path in self._steps().items() if (score := self._score(path)) is not None}
        if not scores:
            return None
        step = min(scores, key=lambda step: (scores[step], step))
        return step, scores[step]

    def check(self) -> None:
        """Checks that the newest checkpoint belongs to this run, without reading its state.

        Raises:
            CheckpointError: it belongs to another run; the message lists the settings that differ.
        """
        if settings := self.latest_settings:
            check_same(self._folder, settings, self._settings, self._growing)

    @property
    def latest_settings(self) -> dict[str, Any]:
        """The settings with which the newest checkpoint was saved; empty if there is no complete one."""
        saved = self._steps()
        try:
            return self._read_json(saved[max(saved)])[ABOUT]["settings"] if saved else {}
        except Exception:  # `restore` says what is damaged, and which step is intact
            return {}

    @property
    def latest_log(self) -> dict[str, Any]:
        """The log that was saved with the newest checkpoint; empty where there is none."""
        saved = self._steps()
        return self._read_json(saved[max(saved)], LOG)[LOG] if saved else {}

    def check_space(self, like: Any, beside_bytes: int) -> None:
        """Checks that the disk has room for the checkpoints of a run.

        Args:
            like: a state, or its shapes and dtypes.
            beside_bytes: the size of other files that the run will write.

        Raises:
            DiskError: there is too little room.
        """
        each, number = disk.num_bytes(like), max(1, self._keep + 2 - len(steps.all_of(self._folder)))
        what = f"{number} more checkpoint{'s' if number > 1 else ''} of {disk.size(each)} and the result"
        disk.check_space(self._folder, number * each + beside_bytes, what)

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """Reads the newest checkpoint, whose step is `latest_step`.

        Args:
            like: a state of the same structure, shapes, dtypes and shardings.

        Returns:
            State and log, or `None` if there is no checkpoint yet.

        Raises:
            CheckpointError: the folder holds a run with other settings, a state of other shapes or dtypes, or no
                complete checkpoint.
            DamagedError: the newest checkpoint is damaged. The message says how to resume from the newest intact one.
        """
        newest_first = sorted(self._steps().items(), reverse=True)
        damaged: list[tuple[Path, Exception]] = []
        for step, path in newest_first:
            try:
                read = self._read(path, like)
            except CheckpointError:
                raise
            except Exception as error:  # whatever orbax makes of a damaged file
                damaged.append((path, error))
                continue
            if not damaged:
                return read
            broken = ", ".join(str(path) for path, _ in damaged)
            raise DamagedError(
                _told(*damaged[0]),
                f"The checkpoint of step {step} is intact: move {broken} elsewhere to resume from it.",
            )
        if damaged:
            raise CheckpointError(_told(*damaged[0])) from damaged[0][1]
        return None

    def read(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Reads the kept checkpoint of a step, such as that of `best`.

        Args:
            step: the step's number.
            like: as in `restore`.

        Returns:
            State and log.

        Raises:
            CheckpointError: it belongs to another run, or is damaged.
        """
        path = self._steps()[step]
        try:
            return self._read(path, like)
        except CheckpointError:
            raise
        except Exception as error:  # whatever orbax makes of a damaged file
            raise CheckpointError(_told(path, error)) from error

    def save(self, step: int, state: Any, log: dict[str, Any], score: float | None = None) -> None:
        """Writes a checkpoint, then deletes those that are not kept; does nothing if the step is saved already.

        Args:
            step: number of steps done.
            state: any pytree of arrays.
            log: any JSON value.
            score: a number that is lower for better states, such as the loss of held-out data.

        Raises:
            DiskError: the disk is full.
            TrainingError: the checkpoint cannot be written for another reason.
        """
        if step in self._steps():
            return
        ocp = self._orbax
        about = {
            "settings": self._settings,
            "score": score,
            STATE: digests.of_leaves(state),
            LOG: digests.of_json(json.loads(json.dumps(log))),
        }
        # Leaves in order: orbax need not know the module and optimizer types.
        items = {STATE: ocp.args.StandardSave(jax.tree.leaves(state)), LOG: ocp.args.JsonSave(log)}
        items[ABOUT] = ocp.args.JsonSave(about | {"self": digests.of_json(about)})
        path = (self._folder / str(step)).absolute()
        try:
            processes.by_first(lambda: self._prepare(path))
            with disk.late_writes_untold():
                self._checkpointer.save(path, args=ocp.args.Composite(**items))
            self._fresh = False
            stay = self._kept()
            processes.by_first(lambda: self._drop(stay))
        except Exception as error:  # tensorstore's errors are not OSErrors
            if processes.is_first():
                steps.remove_unfinished(self._folder, quiet_seconds=1.0)
            if disk.is_full(error):
                raise disk.full(f"The checkpoint of step {step}", self._folder, disk.num_bytes(state)) from error
            if isinstance(error, jax.errors.JaxRuntimeError) and (why := processes.lost()):
                raise TrainingError(why) from error
            reason = _reason(error)
            raise TrainingError(
                f"The checkpoint of step {step} cannot be written to {self._folder} ({reason})."
            ) from error

    @property
    def earlier(self) -> list[str]:
        """Names of other files left by the run that this one replaces, also after this run was stopped and resumed."""
        return self._replaced().get("left", [])

    def forget_earlier(self) -> None:
        """Forgets these names; call this when nothing of the earlier run is left."""
        (self._folder / _REPLACED).unlink(missing_ok=True)

    @property
    def finished(self) -> dict[str, Any]:
        """The descriptions passed to `finish` for the newest checkpoint, by the names of the results."""
        record = read_json(self._folder / FINISHED)
        results = record.get("results") if record.get("step") == self.latest_step is not None else None
        return results if isinstance(results, dict) else {}

    def finish(self, name: str, how: Any) -> None:
        """Records that a result was made from the newest checkpoint.

        Args:
            name: the name of the result.
            how: a description that `finished` returns, a JSON value.
        """
        write_json(self._folder / FINISHED, {"step": self.latest_step, "results": self.finished | {name: how}})

    # --- steps ---

    def _steps(self) -> dict[int, Path]:
        """The folders of this run's steps; of a run that starts over, the earlier run's until it has saved a step."""
        if self._fresh:
            return {}
        replaced = set(self._replaced().get("steps", []))
        paths = steps.all_of(self._folder)
        own = [path for path in paths if path.name not in replaced]
        by_step: dict[int, Path] = {}
        for path in own or paths:  # of one number, "12" comes before "12.earlier"
            by_step.setdefault(steps.number_of(path) or 0, path)
        return by_step

    def _prepare(self, path: Path) -> None:
        steps.remove_unfinished(self._folder)
        if self._fresh:
            self._make_way(path)

    def _make_way(self, path: Path) -> None:
        """Marks all existing steps as those of the earlier run, so that a single rename puts the new one in place."""
        steps.move_aside(path)
        (self._folder / FINISHED).unlink(missing_ok=True)
        names = [each.name for each in steps.all_of(self._folder)]
        write_json(self._folder / _REPLACED, {"left": self._earlier, "steps": names})

    def _kept(self) -> set[Path]:
        saved, best = self._steps(), self.best
        kept = {*sorted(saved)[-self._keep :], *([] if best is None else best[:1])}
        return {saved[step] for step in kept}

    def _drop(self, stay: set[Path]) -> None:
        for path in steps.all_of(self._folder):
            if path not in stay:
                steps.remove(path)
        if replaced := self._replaced():
            write_json(self._folder / _REPLACED, replaced | {"steps": []})

    def _replaced(self) -> dict[str, Any]:
        return read_json(self._folder / _REPLACED)

    def _score(self, path: Path) -> float | None:
        try:
            return self._read_json(path)[ABOUT].get("score")
        except Exception:  # a damaged checkpoint is not the best
            return None

    # --- reading ---

    @property
    def _checkpointer(self) -> Any:
        return self._orbax.Checkpointer(self._orbax.CompositeCheckpointHandler())

    def _read_json(self, path: Path, *names: str) -> dict[str, Any]:
        ocp = self._orbax
        args = ocp.args.Composite(**{name: ocp.args.JsonRestore() for name in (ABOUT, *names)})
        read = self._checkpointer.restore(path.absolute(), args=args)
        items = {name: read[name] for name in (ABOUT, *names)}
        own = dict(items[ABOUT])
        if own.pop("self") != digests.of_json(own):
            raise ValueError("its digests are damaged")
        return items

    def _read(self, path: Path, like: Any) -> tuple[Any, dict[str, Any]]:
        """State and log of a step, checked to be what was saved."""
        ocp = self._orbax
        about, log = self._read_json(path, LOG).values()
        check_same(self._folder, about["settings"], self._settings, self._growing)
        if digests.of_json(log) != about[LOG]:
            raise ValueError("its log is not what was saved")
        _check_arrays(path, about[STATE], like)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in jax.tree.leaves(like)]
        args = ocp.args.Composite(**{STATE: ocp.args.StandardRestore(shapes)})
        leaves = self._checkpointer.restore(path.absolute(), args=args)[STATE]
        state = jax.tree.unflatten(jax.tree.structure(like), leaves)
        # Names come from the program that reads, and only values from the file.
        pairs = zip(digests.of_leaves(state).items(), about[STATE].values(), strict=True)
        wrong = [name for (name, restored), saved in pairs if restored != saved]
        if wrong:
            others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise ValueError(f"the array {wrong[0]}{others} is not what was saved")
        return state, log


def _check_arrays(path: Path, saved: Mapping[str, str], like: Any) -> None:
    """Checks that a checkpoint holds arrays of the shapes and dtypes that are asked for, by its digests."""
    wanted = {jax.tree_util.keystr(at): f"{x.dtype}{x.shape}" for at, x in jax.tree_util.tree_leaves_with_path(like)}
    held = [digest.rsplit(" ", 1)[0] for digest in saved.values()]
    if len(held) != len(wanted):
        raise CheckpointError(f"{path} holds a state of {len(held)} arrays, and the run has one of {len(wanted)}.")
    differ = [(name, there, here) for (name, here), there in zip(wanted.items(), held, strict=True) if there != here]
    if differ:
        name, there, here = differ[0]
        more = f"; {len(differ) - 1} more arrays differ" if len(differ) > 1 else ""
        raise CheckpointError(f"{path} holds another state: {name} is {there}, and {here} in the run{more}.")


def _told(path: Path, error: Exception) -> str:
    return f"The checkpoint {path} cannot be read ({_reason(error)})."


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _orbax() -> Any:
    """The package orbax. Importing it takes most of a second, which a run does while programs are compiled."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # it logs each step, and errors that it raises
    try:
        import orbax.checkpoint
    except ModuleNotFoundError as error:
        raise ImportError(f"Checkpoints need orbax-checkpoint: {install_command('finetune')}.") from error
    return orbax.checkpoint
