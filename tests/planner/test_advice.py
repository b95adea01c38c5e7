"""What a plan says: whether it fits into what a process gets, and what makes it fit."""

import dataclasses
import re

import pytest

from liger_jax.commands import finetune, main
from liger_jax.commands._parser import Parser
from liger_jax.pallas_kernels.devices import GIB, GPUS
from liger_jax.planner import plan, report, target
from liger_jax.planner.advice import changes_to_fit, options
from liger_jax.planner.compilers import Compiled
from liger_jax.planner.devices import CONTEXT_BYTES, NCCL_BYTES
from liger_jax.planner.planning import make_run
from liger_jax.planner.report import bars


@pytest.mark.parametrize("count", [1, 8])
def test_the_fraction_leaves_the_rest_of_the_process_its_memory(count):
    for name in GPUS:
        gpu = target(f"{name}:{count}")
        assert gpu.visible_bytes <= gpu.memory_bytes and gpu.fraction is not None
        outside = gpu.visible_bytes * (1 - gpu.fraction)
        least = CONTEXT_BYTES + (NCCL_BYTES if count > 1 else 0)
        assert least < outside < least + 0.02 * gpu.visible_bytes
        assert gpu.capacity_bytes == pytest.approx(0.98 * gpu.fraction * gpu.visible_bytes, rel=2e-3)
    assert target("v5e").fraction is None


@pytest.mark.parametrize("fraction, mib", [(0.75, 60_810), (0.90, 72_972), (0.95, 77_026), (0.97, 78_648)])
def test_the_allocator_of_an_h100_gets_what_is_counted_on(fraction, mib):
    """`memory_stats()["bytes_limit"]` on an H100 80GB HBM3, JAX 0.11.2, driver 580.159.04, 2026-11-24."""
    assert 0.998 * mib < fraction * target("h100").visible_bytes / 2**20 <= mib


def test_14_gib_do_not_fit_a_t4_of_which_jax_gets_less():
    found = target("t4")
    assert 13 * GIB < found.capacity_bytes < 0.95 * 14.6 * GIB


def test_the_verdict_comes_first_then_the_largest_batch_then_advice_and_the_table_if_it_is_asked_for():
    found = plan("llama-3-8b", batch=16, seq=4096, device="h100:8", remat="full")
    lines = report.text(found).splitlines()
    assert re.fullmatch(r"Fits: 20\.1 of 75\.1 GiB on each of 8\.", lines[0])
    assert re.fullmatch(r"Speed: about \d\d,000 tokens a second \(estimate, within 15% of .*\)\.", lines[1])
    assert re.fullmatch(r"Largest batch: \d+ \(estimate\)\.", lines[2])
    assert lines[3].startswith("Static memory") and lines[5].startswith("Planned: llama-3-8b, 16 × 4096 tokens")
    detailed = report.text(found, details=True).splitlines()
    assert detailed[: len(lines)] == lines and detailed[len(lines) + 1].startswith("GiB on each device")
    other = report.text(plan("llama-3-8b", batch=1, seq=512, device="rtx4090", lora=16, remat="full"))
    assert re.search(r"\(estimate, which was compared with measurements on Hopper GPUs alone\)\.$", other, re.MULTILINE)
    lines = report.text(plan("llama-3-8b", batch=1, seq=4096, device="t4")).splitlines()
    assert re.fullmatch(r"Does not fit: 121\.9 GiB needed, and a process can have 13\.\d\.", lines[0])
    assert lines[1] == "No batch of 4096 tokens fits (estimate)."


def test_a_run_that_does_not_fit_says_in_its_first_line_what_makes_it_fit_here():
    found = plan("qwen2.5-7b", device="l4", lora=16, remat="full", micro_batches=1)
    lines = report.text(found).splitlines()
    assert lines[0].endswith(" and a process can have 20.6. It fits with --micro-batches 2.")
    assert lines[1].startswith("Largest batch: 6 ")
    assert plan("qwen2.5-7b", device="l4", lora=16, remat="full").run.micro_batches == 2


def test_that_more_devices_alone_help_is_said_in_a_sentence(capsys):
    command = "plan --model llama-3.1-8b --memory 24GiB --lora 32 --quantize nf4 --batch 1 --remat offload --seq 131072"
    assert main(command.split()) == 0
    assert "No option" not in capsys.readouterr().out
    command = command.replace("24GiB", "19GiB")
    assert main(command.split()) == 1
    printed = capsys.readouterr().out
    told = "No option makes it fit one GPU of 19.0 GiB; shorter rows would: --search seq finds the longest."
    assert told in printed.splitlines()
    advised = re.search("^  (--device gpu:.*?)  saves", printed, re.MULTILINE)[1]
    assert "--memory 19GiB" in advised and main([*command.split(), *advised.split()]) == 0
    whole = report.text(plan("llama-3-70b", batch=1, device="h200"))
    assert "No option makes it fit one NVIDIA H200 while all weights are trained.\n" in whole


@pytest.mark.parametrize("share, told", [(1.01, True), (1.09, True), (1.3, False)])
def test_a_refusal_by_a_little_names_the_compiler(share, told):
    whole = plan("qwen2-0.5b", device="l4")
    needed = share * whole.run.target.capacity_bytes
    found = dataclasses.replace(whole, estimates={k: _scaled(e, needed) for k, e in whole.estimates.items()})
    assert any("what is missing: ask the compiler, --level compiled" in note for note in report.notes(found)) == told


def test_a_run_that_fits_by_a_hair_says_so():
    whole = plan("qwen2-0.5b", device="l4")
    capacity = whole.run.target.capacity_bytes
    for share, told in ((0.96, ""), (0.98, ", with 2.0% to spare"), (1.0, ", with 0.0% to spare")):  # of the most
        needed = {loss: Compiled(int(share * capacity), 0, 0) for loss in whole.estimates}
        found = dataclasses.replace(whole, compiled=needed)
        verdict = report.verdict(found)
        assert verdict.startswith("Fits: ") and verdict.endswith(f"{told}.") and ("spare" in verdict) == bool(told)
    tight = dataclasses.replace(whole, estimates={k: _scaled(e, 0.98 * capacity) for k, e in whole.estimates.items()})
    assert any("--level compiled" in note for note in report.notes(tight)) and not report.notes(found)


def _scaled(estimate, total):
    """An estimate with this total."""
    return dataclasses.replace(estimate, bytes_of={"parameters": int(total)})


def test_the_largest_batch_is_the_largest_that_fits():
    found = plan("qwen2-0.5b", batch=8, seq=512, device="t4")
    at = lambda batch: plan("qwen2-0.5b", batch=batch, seq=512, device="t4", remat="full", micro_batches=1).fits
    assert at(found.largest_batch) and not at(found.largest_batch + 1)


MODELS, DEVICES = ("llama-3-8b", "gemma-2-9b", "llama-3-70b"), ("t4", "l4", "a100-40g", "h200", "v5e")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", [MODELS[0], *(pytest.param(name, marks=pytest.mark.full) for name in MODELS[1:])])
def test_advice_that_is_followed_fits(model, device, capsys):
    """One sequence: no batch is smaller. The options are read from what the command prints, and given to it."""
    arguments = f"plan --model {model} --batch 1 --seq 2048 --device {device}".split()
    fits = main(arguments) == 0
    printed = capsys.readouterr().out
    assert fits == ("To make it fit" not in printed) == printed.startswith("Fits:")
    if fits:
        return
    assert "smaller" not in printed
    steps = [line.split("  ")[1] for line in printed.splitlines() if line.startswith("  --")]
    advised = [(" ".join(steps), re.search("Then it fits: (.*)", printed)[1])]
    if adapters := re.search("Or train adapters: (.*?), (.*)", printed):
        advised.append(adapters.groups())
    if "--param-dtype" in advised[0][0]:
        advised.append(re.search("Or in float32: (.*?), (.*)", printed).groups())
    for changes, promised in advised:
        assert main([*arguments, *changes.split()]) == 0
        assert capsys.readouterr().out.startswith(f"Fits: {promised}\n")
    taken = set(re.findall("--[a-z-]+", " ".join(changes for changes, _ in advised)))
    parser = Parser()
    finetune.add_arguments(parser)
    assert taken <= {*parser._option_string_actions, "--device"}  # which is the card that is there


@pytest.mark.parametrize(
    "run, names",
    [
        # What costs nothing comes first, then what costs time.
        (dict(model="qwen2-0.5b", batch=8, seq=4096, device="l4", loss="logits"), ["--loss fused"]),
        (dict(model="qwen2-1.5b", batch=16, seq=4096, device="h100", remat="none"), ["--remat full"]),
        (dict(model="qwen2-0.5b", batch=9 * 27, seq=4096, device="l4"), ["--micro-batches 9"]),
        (dict(model="llama-3-8b", batch=8, seq=2048, device="h100:8", mesh=dict(data=8)), ["--mesh data=1,fsdp=8"]),
        (dict(model="llama-3.2-1b", batch=1, seq=2048, device="t4"), ["--optimizer adamw8bit"]),
        # Parts of a batch add their gradients up in float32, which may be more than they save.
        (dict(model="llama-3.2-1b", batch=4, device="rtx4090", micro_batches=4), ["--micro-batches 1"]),
        # Quality goes before devices.
        (
            dict(model="qwen2.5-3b", batch=1, seq=512, device="l4"),
            ["--optimizer adamw8bit", "--param-dtype bfloat16"],
        ),
        (dict(model="llama-3-8b", batch=1, seq=4096, device="l4"), ["--device l4:8 --batch 8"]),
        # The vocabulary of 151,936 has no more than 128 equal parts.
        (
            dict(model="qwen2.5-3b", batch=256, seq=2048, device="l4:256", mesh={"data": 256}),
            ["--mesh data=2,fsdp=128"],
        ),
    ],
)
def test_the_cheapest_changes_that_are_enough_are_advised(run, names):
    run = make_run(**run)
    changes = changes_to_fit(run)
    assert [change.name for change in changes] == names


def test_each_change_says_what_it_saves_and_nothing_is_advised_without_need():
    run = make_run("llama-3-8b", batch=64, seq=4096, device="a100-40g:8", remat="none", loss="logits")
    changes = changes_to_fit(run)
    assert [change.name for change in changes][0] == "--loss fused"
    before = plan_of(run)
    for change in changes:
        assert before - change.saved_bytes == change.total_bytes < before
        before = change.total_bytes
    assert changes[-1].total_bytes <= run.target.capacity_bytes
    assert options(run, changes[-1].run) == " ".join(change.name for change in changes)


@pytest.mark.full
def test_what_nothing_makes_fit_is_said_to_be_so(capsys):
    assert main("plan --model qwen2-72b --batch 1 --seq 131072 --device t4".split()) == 1
    assert "Nothing here makes it fit, and no number of Tesla T4s does" in capsys.readouterr().out


def test_advice_counts_what_the_compiler_found_beyond_the_estimate():
    """A step that fits by the formulas and not by the compiler gets changes, too."""
    found = plan("qwen2-0.5b", batch=8, seq=512, device="t4", remat="none")
    assert found.fits and found.changes_to_fit() == []
    more = {loss: Compiled(e.total + 4 * GIB, 0, 0) for loss, e in found.estimates.items()}
    found = dataclasses.replace(found, compiled=more)
    assert not found.fits and found.largest_batch < 8
    change = found.changes_to_fit()[-1]
    assert change.total_bytes == plan_of(change.run) + 4 * GIB <= found.run.target.capacity_bytes


def plan_of(run):
    fields = {
        f.name: getattr(run, f.name) for f in dataclasses.fields(run) if f.name not in ("model", "target", "mesh")
    }
    return plan(run.model.name, device=run.target.name, **fields).needed


def test_advice_follows_from_the_numbers():
    small = plan("qwen2-0.5b", batch=1, seq=128, device="h200", remat="full")
    large = plan("qwen2-0.5b", batch=64, seq=2048, device="h200", remat="full")
    saves = lambda p: 1 - p.totals["fused"] / p.totals["logits"]
    assert saves(small) < 0.1 < 0.5 < saves(large)
    assert "at batch" in small.advice and "at batch" not in large.advice
    assert f"saves {saves(large):.0%}" in large.advice and "That is what makes it fit" in large.advice
    alone = plan("llama-3-70b", batch=1, seq=128, device="h200")
    assert "Static memory alone is 1051.3 GiB: shard it over more devices" in alone.advice  # 16 bytes a parameter


@pytest.mark.parametrize("fused, said", [(0.8, "saves 20%"), (1.0, "saves nothing here"), (1.012, "takes 1% more")])
def test_a_loss_that_takes_more_does_not_save_less_than_nothing(fused, said):
    found = plan("llama-3-8b", batch=64, seq=512, device="v5e:8x8")
    logits = found.totals["logits"]
    found = dataclasses.replace(
        found, compiled={"logits": Compiled(logits, 0, 0), "fused": Compiled(int(fused * logits), 0, 0)}
    )
    assert f"the fused loss {said}" in found.advice


@pytest.mark.parametrize(
    "device, options, warned", [("t4", {}, True), ("t4", {"dtype": "float32"}, False), ("l4", {}, False)]
)
def test_bfloat16_on_a_card_without_it_is_warned_of(device, options, warned):
    notes = report.notes(plan("qwen2-0.5b", batch=1, seq=128, device=device, **options))
    assert any("Tesla T4 has no bfloat16 arithmetic" in note for note in notes) == warned


def test_bars_are_as_long_as_the_parts():
    found = plan("llama-3.2-1b", batch=8, seq=2048, device="a100-40g", remat="full")
    fused, logits = bars(found).splitlines()
    for line, loss in ((fused, "fused"), (logits, "logits")):
        estimate = found.estimates[loss]
        assert estimate.total == sum(estimate.bytes_of.values())
        marks = sum(c.isalpha() for c in line.split("|")[1])
        assert marks == pytest.approx(60 * estimate.total / found.run.target.capacity_bytes, abs=1)
