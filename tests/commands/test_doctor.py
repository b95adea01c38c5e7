"""`liger-jax doctor`: what is here, which kernels run, and what is broken with its cure."""

import dataclasses
import re

import jax
import pytest

from liger_jax import ops
from liger_jax.commands import _doctor, _machine, _ops_here, main
from liger_jax.ops._kernels import Kernels

WELL = _machine.Machine(
    versions={"jax": "0.10.2", "jaxlib": "0.10.2", "liger-jax": "0.1.0"},
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
    assert re.search(r"^compiled programs: \d+ files of [\d.]+ GiB in ", printed, re.MULTILINE)
    for op in _ops_here.CASES:
        assert re.search(rf"^  {op} +\w+(, \w+)*$", printed, re.MULTILINE), op


def test_every_op_with_kernels_is_among_them():
    found = {each.op for choices in _ops_here.chosen().values() for each in choices}
    for name in (name for name in dir(ops) if name in _ops_here.CASES):
        assert name in found or name in ("fused_linear_distillation", "moe_mlp"), name
    public = {name for name in dir(ops) if callable(getattr(ops, name)) and name.islower() and name[0] != "_"}
    plain = {"plan_fused_linear_cross_entropy", "rope_table", "block_quantized"}  # no kernels
    plain |= {"softmax_top_k", "top_k_softmax", "router_sums", "balancing_loss", "router_z_loss", "expert_load"}
    others = {"fused_linear_token_loss", "fused_linear_topk_distillation"}  # the same kernels as another one
    assert public - plain - others == {*_ops_here.CASES}


def test_reasons_are_those_of_the_op_itself():
    choices = _ops_here.chosen()["rms_norm"]
    with pytest.raises(ValueError) as refused:
        jax.eval_shape(lambda *x: ops.rms_norm(*x, implementation="mosaic_tpu"), *_ops_here.CASES["rms_norm"][1])
    why = choices[0].others["mosaic_tpu"]
    assert why is not None and why in str(refused.value)
    printed = "\n".join(_doctor._ops({"rms_norm": choices}))
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
    monkeypatch.setattr(_machine, "_requirements", lambda: {})
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
    pytest.importorskip("packaging")
    (found,) = problems(**fields)
    assert re.search(sentence, found)
    monkeypatch.setattr(_machine, "problems", lambda machine: [found])
    monkeypatch.setattr(_ops_here, "chosen", lambda: {})
    assert main(["doctor"]) == 1 and capsys.readouterr().out.endswith(f"broken: {found}\n")


def test_what_packages_need_is_read_from_them():
    needed = _machine._requirements()
    assert re.search(r"\d", needed["jaxlib"])  # JAX pins it
    assert _machine._wrong_versions(_machine.found(), needed) == []
