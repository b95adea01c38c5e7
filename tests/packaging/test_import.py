"""What importing the package imports, and what `liger-jax plan` does, which must answer at once."""

import os
import subprocess
import sys

import pytest

KERNELS = {f"jax.experimental.{name}" for name in ("mosaic.gpu", "pallas.mosaic_gpu", "pallas.tpu", "pallas.triton")}
PLAN = "import liger_jax.commands as c; c.main('plan --model qwen2-0.5b --batch 8 --seq 512 --device h200'.split())"


@pytest.mark.parametrize("program", ["import liger_jax.commands", PLAN], ids=["commands", "plan"])
def test_what_only_some_programs_need_is_imported_there_alone(program):
    """The commands import the models, and the package alone has neither these nor the planner."""
    lines = ["import sys, liger_jax", "print(*sys.modules)", program, "print(*sys.modules)"]
    output = subprocess.check_output([sys.executable, "-c", "\n".join(lines)], text=True).splitlines()
    of_package, imported = ({*line.split()} for line in (output[0], output[-1]))
    assert not {"liger_jax.commands", "liger_jax.planner"} & of_package and "liger_jax.commands" in imported
    assert not KERNELS & imported
    assert not {"tokenizers", "jinja2", "tqdm", "orbax", "tensorboardX", "datasets"} & imported
    assert not [name for name in imported if name.startswith("jax_plugins.")]  # those of platforms, which take longest


def seconds_of_cpu(modules):
    """The CPU's time to import modules that are compiled, the least of four: other programs do not count."""
    command = [sys.executable, "-c", f"import {modules}, time; print(time.process_time())"]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    return min(float(subprocess.check_output(command, text=True, env=environment)) for _ in range(4))


@pytest.mark.full
def test_the_import_takes_little_more_than_what_it_stands_on():
    assert seconds_of_cpu("liger_jax") <= seconds_of_cpu("jax, flax.nnx, optax") + 0.3


CTRL_C_AT = """
import os, signal, sys

class Finder:
    def find_spec(name, *others):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a process in the background has not
sys.argv[0] = {name!r}
sys.meta_path.insert(0, Finder)
from liger_jax.commands import main
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a process sends no Ctrl-C to itself there")
@pytest.mark.parametrize("module", ["jax", "optax", "liger_jax.commands.grpo"])
def test_ctrl_c_during_the_imports_of_the_command_is_one_sentence(module):
    run = lambda name: subprocess.run(
        [sys.executable, "-c", CTRL_C_AT.format(module=module, name=name)], capture_output=True, text=True
    )
    stopped = run("/usr/bin/liger-jax")
    assert (stopped.returncode, stopped.stderr) == (130, "liger-jax: stopped before it began.\n")
    if module == "jax":  # a program's own Ctrl-C is Python's
        program = run("train.py")
        assert program.returncode != 130 and "KeyboardInterrupt" in program.stderr
