"""Checkpoints of a training run with orbax: the state, and beside it the log that a curve is drawn from."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import jax

logging.getLogger("absl").setLevel(logging.ERROR)  # orbax tells of each step it takes

import orbax.checkpoint as ocp  # noqa: E402  (after its logger is quiet)


class Checkpoints:
    """The newest checkpoint of one run.

    Args:
        folder: where checkpoints are kept.
        settings: what the run is made of; a folder holds runs of one setting only.
        fresh: throw away what is there.

    Raises:
        ValueError: the folder holds a run with other settings.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], *, fresh: bool):
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        written, settings = folder / "settings.json", json.loads(json.dumps(settings))
        if written.exists() and (old := json.loads(written.read_text())) != settings:
            changed = ", ".join(f"{k}={old.get(k)!r} became {v!r}" for k, v in settings.items() if old.get(k) != v)
            raise ValueError(f"{folder} holds another run: {changed}. Pass --fresh to start over, or another --out.")
        written.write_text(json.dumps(settings))
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """Reads the newest checkpoint.

        Args:
            like: a state of the same structure, shapes, dtypes and places.

        Returns:
            State and log, or `None` where there is no checkpoint yet.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in jax.tree.leaves(like)]
        read = self._manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes), log=ocp.args.JsonRestore())
        )
        return jax.tree.unflatten(jax.tree.structure(like), read["state"]), read["log"]

    def save(self, step: int, state: Any, log: dict[str, Any]) -> None:
        """Writes a checkpoint, then drops the one before it; a step that is there already is left alone.

        Args:
            step: number of steps done.
            state: any pytree of arrays.
            log: anything that JSON holds.
        """
        if step == self._manager.latest_step():
            return
        # Leaves in order: orbax need not know the module and optimizer types.
        args = ocp.args.Composite(state=ocp.args.StandardSave(jax.tree.leaves(state)), log=ocp.args.JsonSave(log))
        self._manager.save(step, args=args)
