"""dpo, distill and grpo on several devices train what they train on one, and half of the devices go on from them.

Their other axes are in the tests of each command.
"""

import json
import shutil
import signal
import time

import jax
import numpy as np
import pytest
from flax import nnx

from liger_jax.commands import main
from liger_jax.models import OlmoeConfig, OlmoeForCausalLM
from tests import _tiny
from tests.trainers._runs import figures_of
from tests.trainers.test_finetune_processes import ended, started

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="its processes simulate devices of a CPU"),
    pytest.mark.usefixtures("each_program_is_compiled_once"),
]
COMMON = "--steps 6 --every 1 --keep 2 --learning-rate 0.02".split()
ROWS = "--pack --length 128 --batch 4 --eval-share 0.2".split()
SAMPLED = "--group 4 --batch 16 --micro-batches 4 --prompt-length 16 --completion-length 8 --samples 3".split()
REWARD = """
import os
import jax.numpy as jnp

def letters(completions, log_metric):
    with open("calls.txt", "a") as file:
        file.write(f"{os.getpid()}\\n")
    values = jnp.array([text.count("e") / max(1, len(text)) for text in completions])
    log_metric("share", float(values.mean()))
    return values.tolist()
"""
METHODS = {
    "dpo": ["dpo"],
    "kto": ["dpo", "--loss=kto"],
    "dpo_of_adapters": ["dpo", "--lora=4"],
    "distill": ["distill"],
    "distill_stored": ["distill", "--top-k=9"],
    "grpo": ["grpo", "--updates=2", "--importance-sampling=token_truncate", "--learning-rate=1e-5"],
}
STORED = {"dpo": "references.f32", "kto": "references.f32", "distill_stored": "teacher.bin"}  # what is computed once


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint's folder, with a teacher, and rows for each method beside it."""
    folder = _tiny.checkpoint(tmp_path_factory.mktemp("source") / "model")
    _tiny.checkpoint(folder.parent / "teacher", width=32)
    (folder.parent / "dpo.jsonl").write_text(_tiny.pairs(24))
    (folder.parent / "kto.jsonl").write_text(_tiny.answers(24))
    (folder.parent / "distill.jsonl").write_text(_tiny.chats(24))
    lines = [json.dumps({"prompt": _tiny.text(2 + i % 3, i)}) for i in range(10)]
    (folder.parent / "grpo.jsonl").write_text("\n".join(lines))
    (folder.parent / "two_rewards.py").write_text(REWARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder.parent)
        yield folder


@pytest.fixture(scope="module")
def experts(source, tmp_path_factory):
    """A checkpoint of a mixture of experts with the other's tokenizer."""
    folder = tmp_path_factory.mktemp("experts") / "model"
    shutil.copytree(source, folder)
    routing = dict(num_experts=4, num_experts_per_tok=2, output_router_logits=True, max_position_embeddings=256)
    sizes = dict(vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    OlmoeForCausalLM(OlmoeConfig(**sizes, **routing), rngs=nnx.Rngs(0)).save_pretrained(folder)
    return folder


def command_of(source, method, out):
    """The arguments of a run."""
    name, *options = METHODS[method]
    own = {
        "distill": [*ROWS, f"--teacher={source.parent / 'teacher'}"],
        "grpo": [*SAMPLED, "--reward=two_rewards:letters"],
    }
    data = f"--data={source.parent / ('kto' if method == 'kto' else name)}.jsonl"
    return [name, f"--model={source}", data, f"--out={out}", *COMMON, *own.get(name, ROWS), *options]


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices, which a CPU simulates")
@pytest.mark.parametrize("mesh", ["expert=2", "data=2,expert=2"])
@pytest.mark.parametrize("method", ["dpo", "distill", "grpo"])
def test_devices_that_share_experts_train_as_one_does(method, mesh, source, experts, tmp_path):
    for name, devices in (("one", "fsdp=1"), ("several", mesh)):
        command = command_of(source, method, tmp_path / name)
        assert main([*command, f"--model={experts}", "--steps=3", f"--mesh={devices}"]) == 0
    assert_alike(tmp_path / "several", tmp_path / "one")


def assert_alike(ours, others):
    """Figures of two runs; seconds and memory are their own."""
    for one, other in zip(figures_of(ours), figures_of(others), strict=True):
        names = [name for name in other if any(word in name for word in ("loss", "margins", "divergence", "reward"))]
        numbers = [[row[name] for name in names] for row in (one, other)]
        np.testing.assert_allclose(*numbers, rtol=5e-3, atol=2e-4, err_msg=f"{names}")


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_train_what_one_trains_and_half_of_their_devices_go_on(method, source, tmp_path, capsys):
    command = command_of(source, method, tmp_path / "two")
    (source.parent / "calls.txt").unlink(missing_ok=True)  # of other runs
    processes = started(source, tmp_path / "two", command=command, folders=[source.parent] * 2)
    begun = time.monotonic()
    saved = tmp_path / "two" / "checkpoints" / "2"
    while not saved.exists() and processes[1].poll() is None and time.monotonic() - begun < 300:
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGKILL)
    (code, printed, error), _ = ended(processes)
    mesh = "data=4" if method in ("dpo_of_adapters", "grpo") else "fsdp=4"
    assert f"devices: {mesh} of 4 × cpu" in printed and code in (0, 2), printed + error[-3000:]
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "two").glob("*.[fb]*")}
    assert [*times] == [name for of, name in STORED.items() if of == method]
    if method == "grpo":  # the first process alone calls the rewards
        assert {*map(int, (source.parent / "calls.txt").read_text().split())} == {processes[0].pid}
    assert main([*command, "--mesh=fsdp=2"]) == 0
    assert "devices: fsdp=2 of 4 × cpu" in capsys.readouterr().out
    assert all((tmp_path / "two" / name).stat().st_mtime_ns == written for name, written in times.items())
    assert main([*command_of(source, method, tmp_path / "one"), "--mesh=fsdp=1"]) == 0
    assert_alike(tmp_path / "two", tmp_path / "one")
