"""Programs of a Llama-3-8B step for many devices: what is sent, and that all devices together multiply as one does."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.aot.process import ROOT
from tests.planner.test_compiled import TINY, compiled

pytestmark = pytest.mark.full

SENT = """
import json, sys
from benchmarks._collectives import collectives
from liger_jax.planner import compile_run
from liger_jax.planner.planning import make_run
model, device, options = sys.argv[1:]
run = make_run(model, device=device, packed=True, **json.loads(options))
text = compile_run(run).program.as_text()
found = [[each.kind, each.devices, each.largest, each.runs, each.bytes] for each in collectives(text)]
print(json.dumps(dict(found=found, logits=run.tokens * run.model.config.vocab_size // run.tensor)))
"""

# In a process that has eight simulated CPU devices, which have no kernels: every product is in the program.
PRODUCTS = """
import dataclasses, json, sys
import jax, jax.numpy as jnp
from benchmarks._collectives import collectives, product_flops
from liger_jax.models import KernelOptions
from liger_jax.planner.mesh import make_mesh
from liger_jax.planner.planning import make_run
from liger_jax.planner.step import training_step
def flops(device, batch, mesh):
    run = make_run(sys.argv[1], device=device, batch=batch, seq=int(sys.argv[2]), mesh=mesh)
    kernels = dataclasses.replace(run.kernels(), mode="lean", memory_budget_bytes=None)
    mesh = make_mesh(jax.devices()[: run.target.count], run.mesh)
    step, arguments = training_step(run, mesh, kernels=kernels)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = step.lower(*arguments).compile().as_text()
    return product_flops(text), sorted({each.kind for each in collectives(text)})
one, _ = flops("h200", 8, None)
found = {}
meshes = dict(fsdp=8), dict(tensor=8), dict(fsdp=4, tensor=2), dict(data=2, fsdp=2, tensor=2), dict(fsdp=2, sequence=4)
for mesh in meshes:
    own, kinds = flops("h200:8", 8, mesh)
    found[str(mesh)] = [8 * own / one, kinds]
print(json.dumps(found))
"""


@pytest.mark.parametrize("model", ["tiny", "llama-3-8b"])
def test_all_devices_together_multiply_as_one_does(model, tmp_path):
    """Within 3 %; loops are multiplied out, so that all 32 layers count."""
    seq = 512
    if model == "tiny":
        wide = dict(num_attention_heads=8, num_key_value_heads=8, vocab_size=4096, intermediate_size=1024)
        model, seq = tmp_path / "config.json", 64
        model.write_text(json.dumps(TINY | wide))
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    flags += " --xla_force_host_platform_device_count=8"
    environment = os.environ | dict(XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    command = [sys.executable, "-c", PRODUCTS, str(model), str(seq)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    for mesh, (ratio, kinds) in json.loads(done.stdout.splitlines()[-1]).items():
        assert 0.97 <= ratio <= 1.03, (mesh, ratio)
        assert set(kinds) <= {"all-gather", "reduce-scatter", "all-reduce"}, (mesh, kinds)


@pytest.mark.parametrize(
    "device, platform, mesh",
    [
        ("h200:8", "gpu", dict(fsdp=4, tensor=2)),
        ("h200:8", "gpu", dict(fsdp=2, sequence=4)),
        ("h200:16", "gpu", dict(fsdp=2, tensor=8)),
        pytest.param("v5p:4x4x4", "tpu", dict(fsdp=16, tensor=4), marks=pytest.mark.targets),
    ],
)
def test_a_step_sends_parameters_and_hidden_states_and_no_logits(device, platform, mesh):
    groups = mesh["fsdp"]
    options = dict(batch=2 * groups, seq=4096, mesh=mesh)
    if "sequence" in mesh:  # so that a device's logits are more than the table, which is gathered for its rows
        options |= dict(batch=8, seq=8192)
    found = compiled(SENT, "llama-3-8b", device, json.dumps(options), platform=platform)
    assert max(largest for _, _, largest, _, _ in found["found"]) < found["logits"]
    if "sequence" in mesh:
        keys = 8 * 8192 // groups * 8 * 128  # of the rows that four devices share; keys and values may go together
        over_sequence = [each for each in found["found"] if each[1] == mesh["sequence"] and each[2] >= keys]
        assert max(largest for _, _, largest, _, _ in over_sequence) <= 2 * keys
        for kind, number in (("all-gather", 4), ("reduce-scatter", 2)):  # of keys and of values
            sent = sum(runs * size for each, *_, runs, size in over_sequence if each == kind)
            assert sent / 32 / (2 * keys) == pytest.approx(number, abs=0.1)
        return
    rows, table = 2 * 4096 * 4096, 128256 * 4096 // mesh["tensor"]
    over_tensor = [each for each in found["found"] if each[1] == mesh["tensor"] and each[2] >= rows // 2]
    assert max(largest for _, _, largest, _, _ in over_tensor) <= rows
    if platform == "tpu":  # libtpu turns scatters over fsdp into sums of the whole, and fuses gathers with products
        return
    for kind, number in (("all-gather", 6), ("reduce-scatter", 5)):
        of_layers = sum(runs for each, *_, runs, _ in over_tensor if each == kind)
        assert of_layers / 32 == pytest.approx(number, abs=0.2)
    over_fsdp = [largest for _, devices, largest, _, _ in found["found"] if devices == mesh["fsdp"]]
    assert max(over_fsdp) <= table  # nothing that tensor splits is gathered whole
