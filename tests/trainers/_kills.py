"""A chain of kills: a command is started and killed again and again, and then comes to its end.

It is a separate process, which forks before JAX has devices, so that packages are imported once. Arguments: the
command's as JSON, without --out; the folder of a run that is not disturbed; the folder of the one that is; "all" for a
kill in every rename of the export, or "one"; a seed. It prints what happened, as JSON.

A moment of a kill is a pair: ("start", seconds) after the start; ("training", seconds) after the first step may begin;
("checkpoints", n), ("model", n) or ("adapters", n) before the n-th rename in that folder.
"""

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

LOG = "log.csv"  # is opened when training begins


class Watch:
    """An audit hook: it sees renames and the begin of training, and ends the process at its moment."""

    def __init__(self, out, moment):
        self.out, self.moment = out, moment
        self.renames = dict.fromkeys(("checkpoints", "model", "adapters"), 0)
        self.began = self.exported = 0.0

    def __call__(self, event, values):
        if event == "open" and not self.began and values[0] == str(self.out / LOG):
            self.began = time.monotonic()
            if self.moment[0] == "training":
                threading.Timer(self.moment[1], die).start()
        if event == "os.rename":  # of os.replace, too
            target = Path(os.fsdecode(values[1])).absolute()
            for name in self.renames:
                if target.is_relative_to(self.out / name):
                    self.renamed(name)

    def renamed(self, name):
        self.renames[name] += 1
        if name != "checkpoints":
            self.exported = self.exported or time.monotonic()
        if self.moment == (name, self.renames[name]):
            die()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def started(arguments, out, moment=("never", 0)):
    """The process that runs the command."""
    if pid := os.fork():
        return pid
    watch = Watch(out, moment)
    sys.addaudithook(watch)
    code = main([*arguments, f"--out={out}"])
    if moment[0] == "never":
        seen = watch.renames | {"seconds": watch.exported - watch.began}
        (out.parent / "seen.json").write_text(json.dumps(seen))
    sys.stdout.flush()
    os._exit(code)


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed(arguments, out, moment):
    pid = started(arguments, out, moment)
    if moment[0] == "start":
        time.sleep(moment[1])
        os.kill(pid, signal.SIGKILL)
    return ended(pid)


def moments(seen, steps, result, is_whole, rng):
    """The moments of the kills. Each leaves enough steps for the kills that follow it."""
    a_step, a_save = seen["seconds"] / steps, seen["checkpoints"] // steps
    in_training = lambda: ("training", rng.uniform(0, a_step))
    in_a_save = lambda: ("checkpoints", rng.randint(1, a_save + 1))
    export = [(result, n) for n in range(1, seen[result] + 1)]
    if not is_whole:
        return [in_training(), in_a_save(), rng.choice(export)]
    before = [("start", rng.uniform(0.1, 1)), in_training(), in_training(), in_a_save(), in_a_save()]
    return before + export + [("checkpoints", 1)]  # the last one is when the run notes that it has ended


def run(arguments, undisturbed, out, is_whole, seed):
    assert ended(started(arguments, undisturbed)) == 0
    seen = json.loads((undisturbed.parent / "seen.json").read_text())
    steps = len((undisturbed / LOG).read_text().splitlines()) - 1
    result = "model" if (undisturbed / "model").exists() else "adapters"
    chosen = moments(seen, steps, result, is_whole, random.Random(seed))
    codes = []
    for moment in chosen:
        code = killed(arguments, out, moment)
        if code == 0 and moment[0] == result:  # what the last kill had left took fewer renames to complete
            shutil.rmtree(out / result)
            code = killed(arguments, out, moment)
        codes.append(code)
    last = ended(started(arguments, out))
    print(json.dumps({"moments": chosen, "codes": codes, "last": last, "result": result}))


if __name__ == "__main__":
    import orbax.checkpoint  # noqa: F401  imported before the forks

    import liger_jax.trainers.run  # noqa: F401
    from liger_jax.commands import main

    run(json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == "all", int(sys.argv[5]))
