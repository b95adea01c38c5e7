"""Processes with the compilers for devices that are not there: plugins, which read the environment when they start.

A start takes seconds, so that each worker of the suite keeps one process for a kind of device and runs scripts in it.
"""

import atexit
import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import traceback

import pytest

from tests.aot.targets import ENVIRONMENT  # which has annotations checked, before liger_jax is imported

ROOT = pathlib.Path(__file__).parents[2]
_processes: dict[str, subprocess.Popen[str]] = {}


def need_compiler(kind: str) -> None:
    """Without the compiler: a visible skip, and a failure where continuous integration runs."""
    from liger_jax.planner.compilers import missing_compiler

    if (message := missing_compiler(kind)) is not None:
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)


def run(kind: str, script: str, *arguments: object) -> str:
    """What a script prints that compiles for GPUs or TPUs; its `sys.argv` has the arguments from 1 on."""
    need_compiler(kind)
    if kind not in _processes or _processes[kind].poll() is not None:
        _processes[kind] = _started()
    process = _processes[kind]
    assert process.stdin is not None and process.stdout is not None
    print(json.dumps([script, *map(str, arguments)]), file=process.stdin, flush=True)
    line = process.stdout.readline()
    assert line, f"the process that compiles ended with exit code {process.wait()}"
    is_done, printed = json.loads(line)
    assert is_done, printed[-6000:]
    return printed


def _started() -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | ENVIRONMENT
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.aot.process"],
        cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    atexit.register(process.kill)
    return process


def _serve() -> None:
    """Runs the scripts that come line by line. Whatever else prints goes to stderr."""
    import jax

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        script, *arguments = json.loads(line)
        sys.argv, printed = ["-c", *arguments], io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(script, {"__name__": "__main__"})
            is_done = True
        except BaseException:
            is_done = False
            traceback.print_exc(file=printed)
        jax.clear_caches()
        print(json.dumps([is_done, printed.getvalue()]), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
