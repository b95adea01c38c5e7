"""`liger-jax doctor`: what is here, which kernels run, and what is broken with its cure."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from liger_jax import _packages, ops
from liger_jax.commands import _machine, _ops_here, doctor, main
from liger_jax.ops.kernels import Kernels

WELL = _machine.Machine(
    versions={"jax": "0.10.2", "jaxlib": "0.10.2", "liger-jax": "0.2.0"},
    has_driver=False, platforms="", devices=("cpu 0: cpu",), platform="cpu",
)  # fmt: skip
PLUGIN = {"jax-cuda13-plugin": "0.10.2", "nvidia-cublas": "13.0"}


def problems(requirements=None, **fields):
    machine = dataclasses.replace(WELL, **fields | {"versions": WELL.versions | fields.get("versions", {})})
    return _machine.problems(machine, requirements or {})


def test_it_tells_of_versions_devices_cache_and_every_op(capsys):
    main(["doctor"])  # what is broken depends on who installed it
    printed = capsys.readouterr().out
    assert f"jax {jax.__version__}, jaxlib " in printed and re.search(r"^devices.*: \w+ 0: ", printed, re.MULTILINE)
    links = re.search(r"^links: each of \d+ devices sends: gather [\d.e+]+, scatter ", printed, re.MULTILINE)
    assert (links is not None) == (jax.device_count() > 1)
    assert re.search(r"^compiled programs: [\d,]+ files of [\d.]+ GiB in ", printed, re.MULTILINE)
    for op in _ops_here.CASES:
        assert re.search(rf"^  {op} +\w+(, \w+)*$", printed, re.MULTILINE), op


def test_every_op_with_kernels_is_among_them():
    found = {each.op for choices in _ops_here.chosen().values() for each in choices}
    for name in (name for name in dir(ops) if name in _ops_here.CASES):
        assert name in found or name in ("fused_linear_distillation", "moe_mlp"), name
    public = {name for name in dir(ops) if callable(getattr(ops, name)) and name.islower() and name[0] != "_"}
    plain = {"plan_fused_linear_cross_entropy", "rope_table", "block_quantized"}  # no kernels
    plain |= {"softmax_top_k", "top_k_softmax", "router_sums", "balancing_loss", "router_z_loss", "expert_load"}
    plain |= {"causal_conv1d"}
    others = {"fused_linear_token_loss", "fused_linear_topk_distillation"}  # the same kernels as another one
    assert public - plain - others == {*_ops_here.CASES}


def test_reasons_are_those_of_the_op_itself():
    choices = _ops_here.chosen()["rms_norm"]
    with pytest.raises(ValueError) as refused:
        jax.eval_shape(lambda *x: ops.rms_norm(*x, implementation="mosaic_tpu"), *_ops_here.CASES["rms_norm"][1])
    why = choices[0].others["mosaic_tpu"]
    assert why is not None and why in str(refused.value)
    printed = "\n".join(doctor._ops({"rms_norm": choices}))
    assert f"mosaic_tpu, of rms_norm: {why}" in printed


def test_nothing_is_noted_outside():
    kernels = Kernels("op", {"xla": type("Module", (), {"unsupported": staticmethod(lambda *x, **case: None)})})
    assert kernels.choose(None).name == "xla"


def test_a_machine_that_is_well_has_no_problems(capsys, monkeypatch):
    assert problems() == problems(versions=PLUGIN, platforms="cpu") == []
    compilers = {"jax-cuda13-plugin": "0.10.2"}  # without CUDA's libraries, as `planner` installs it
    assert problems(versions=compilers) == []
    assert problems(versions=PLUGIN, has_driver=True, platform="gpu", devices=("gpu 0: H100",)) == []
    monkeypatch.setattr(_machine, "found", lambda: WELL)
    monkeypatch.setattr(_packages, "requirements", dict)
    assert main(["doctor"]) == 0 and capsys.readouterr().out.endswith("\nnothing is broken\n")


@pytest.mark.parametrize(
    ["fields", "sentence"],
    [
        (dict(versions=PLUGIN), "jax-cuda13-plugin is installed, and NVIDIA's driver is not: .* Install the driver"),
        (dict(has_driver=True), "NVIDIA's driver is here, and JAX has no plugin for it: pip install .*cuda"),
        (dict(has_driver=True, versions=PLUGIN), "JAX finds no GPU. JAX_PLATFORMS=cuda says why"),
        (
            dict(has_driver=True, platform="gpu", versions=PLUGIN | {"jax-cuda13-plugin": "0.10.1"}),
            r"jax-cuda13-plugin is 0.10.1, and jaxlib is 0.10.2: .* 'jax\[cuda13\]==0.10.2'",
        ),
        (dict(error="no such backend"), "JAX finds no device: no such backend"),
        (dict(requirements={"jax": ">=0.11"}), "jax is 0.10.2, and >=0.11 is needed: pip install 'jax>=0.11'"),
        (dict(requirements={"flax": ">=0.12"}), "flax is not installed: pip install 'flax>=0.12'"),
    ],
)
def test_what_is_broken_is_told_with_its_cure(fields, sentence, monkeypatch, capsys):
    (found,) = problems(**fields)
    assert re.search(sentence, found)
    monkeypatch.setattr(_machine, "problems", lambda machine: [found])
    monkeypatch.setattr(_ops_here, "chosen", lambda: {})
    assert main(["doctor"]) == 1 and capsys.readouterr().out.endswith(f"broken: {found}\n")


def test_what_packages_need_is_read_from_them():
    needed = _packages.requirements()
    assert re.search(r"\d", needed["jaxlib"]) and re.search(r"\d", needed["flax"])  # of JAX, and of this Python
    assert _packages.wrong_versions(_packages.versions(), needed) == []


def test_versions_are_compared_by_their_numbers():
    has = dict(a="0.12.10", b="0.12.9", c="1.0rc1", d="0.12")
    wrong = _packages.wrong_versions(has, dict(a=">=0.12.9,<0.13", b=">=0.12.10", c="==1.0.0", d="<0.12.0", e=""))
    assert [sentence.split()[0] for sentence in wrong] == ["b", "d", "e"]
    assert wrong[0] == "b is 0.12.9, and >=0.12.10 is needed: pip install 'b>=0.12.10'."


FLAX = "class nnx: pass\nraise AttributeError('module jax has no attribute HiPrimitive')"


@pytest.mark.parametrize(
    ["command", "code", "out", "err"],
    [
        ("doctor", 1, r"packages: jax [\d.]+, .*\nbroken: jax [\d.]+ and flax [\d.]+ .* HiPrimitive\nbroken: ", "^$"),
        ("plan", 2, "^$", r"^liger-jax: jax .* cannot be imported together\. .*pip install .*\n$"),
    ],
)
def test_versions_that_do_not_import_are_told_by_the_command(command, code, out, err, tmp_path):
    ended = started(
        f"sys.argv = ['liger-jax', '{command}']; from liger_jax.commands import main; sys.exit(main())", tmp_path
    )
    assert ended.returncode == code and re.search(out, ended.stdout) and re.search(err, ended.stderr)


def test_versions_that_do_not_import_are_an_import_error_of_a_program(tmp_path):
    ended = started("import liger_jax", tmp_path)
    assert re.search(r"\nImportError: liger_jax: jax .* cannot be imported together .*pip install", ended.stderr)


def started(program, folder):
    """A program with a Flax that JAX does not know."""
    (folder / "flax").mkdir()
    (folder / "flax" / "__init__.py").write_text(FLAX)
    paths = os.pathsep.join([str(folder), str(pathlib.Path(__file__).parents[2])])
    code = f"import sys; {program}"
    environment = os.environ | {"PYTHONPATH": paths}
    return subprocess.run([sys.executable, "-c", code], env=environment, cwd=folder, text=True, capture_output=True)
