"""What layers keep, and in how many micro-batches: the fastest way that fits, by estimates of memory and time."""

import dataclasses
import pathlib
import re

import pytest

from liger_jax.commands import main
from liger_jax.models.core.stretched import stretched
from liger_jax.planner import choosing
from liger_jax.planner.devices import GIB
from liger_jax.planner.estimate import estimate
from liger_jax.planner.planning import make_run, plan
from liger_jax.planner.speed import WITHIN, speed

STEPS = pathlib.Path(__file__).parents[2] / "benchmarks/results/planner.md"
ROW = r"^\| ([\w.-]+) \| (.*) \| (\d+) \| (\d+) × ([\d,]+) \| (\w+) \| (\w+) \| ([\d,]+) \| ([\d,]+) \| [\d.]+ \|$"
TRAINED = {
    "all weights, bfloat16": dict(state_dtype="bfloat16"),
    "LoRA 16": dict(lora=16),
    "LoRA 16, nf4": dict(lora=16, quantize="nf4"),
    "LoRA 32, nf4": dict(lora=32, quantize="nf4"),
}


def test_estimates_of_time_are_near_the_steps_that_were_measured():
    steps = re.findall(ROW, STEPS.read_text(encoding="utf8"), re.MULTILINE)
    assert len(steps) >= 27
    for model, trained, layers, batch, seq, remat, card, measured, told in steps:
        options = dict(param_dtype="bfloat16") | TRAINED[trained]
        run = make_run(model, batch=int(batch), seq=128, device=card.lower(), remat=remat, **options)
        length = int(seq.replace(",", ""))
        config = dataclasses.replace(run.model.config, num_hidden_layers=int(layers))
        if length > config.longest_sequence:
            config = stretched(config, length, "llama3")
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, config=config), seq=length)
        found = speed(run)
        assert 1e3 * found.seconds == pytest.approx(float(told.replace(",", "")), abs=0.6), run
        assert 1e3 * found.seconds == pytest.approx(float(measured.replace(",", "")), rel=WITHIN), run
        assert found.tokens_per_second == pytest.approx(int(batch) * length / found.seconds)


def chosen(gib, model="llama-3-8b", **options):
    """The choice for a GPU with so much memory for a process, and the fastest of the ways beside it that fit."""
    run = make_run(model, **dict(device="h200", lora=16, batch=4) | options)
    run = dataclasses.replace(run, target=dataclasses.replace(run.target, capacity_bytes=int(gib * GIB)))
    choice = choosing.chosen(run)
    others = [dataclasses.replace(run, remat=remat) for remat in ("full", "dots", "none")]
    fitting = [speed(way).seconds for way in others if estimate(way).total <= run.target.capacity_bytes]
    return choice, min(fitting, default=None)


@pytest.mark.parametrize("gib", [19, 20, 24, 32, 39, 60, 130])
def test_no_way_that_fits_is_faster_by_more_than_what_stays_free(gib):
    choice, fastest = chosen(gib)
    assert choice is not None and estimate(choice.run).total <= gib * GIB
    assert fastest is None or speed(choice.run).seconds <= 1.06 * fastest


def test_more_memory_never_makes_a_step_slower():
    times = [speed(chosen(gib)[0].run).seconds for gib in (18, 20, 24, 32, 60)]
    assert all(after <= before for before, after in zip(times, times[1:], strict=False)) and times[-1] < 0.85 * times[0]


def test_a_second_loop_is_compiled_only_for_what_it_saves():
    """All weights of 8B in 80 GB have room for the products of three layers."""
    choice, _ = chosen(75, lora=None, param_dtype="bfloat16", state_dtype="bfloat16", seq=4096)
    assert choice is not None and (choice.run.remat, choice.run.micro_batches) == ("full", 1)


def test_more_memory_changes_nothing_where_a_small_model_computes_layers_again():
    run = make_run("llama-3.2-1b", device="h200", batch=8, seq=512, param_dtype="bfloat16")
    width = dict(vocab_size=320, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    config = dataclasses.replace(run.model.config, num_attention_heads=2, num_key_value_heads=1, head_dim=8, **width)
    choice = choosing.chosen(dataclasses.replace(run, model=dataclasses.replace(run.model, config=config)))
    assert choice is not None and choice.run.remat == "full" and choice.is_first


def test_patterns_of_layers_are_kept_whole():
    choice, _ = chosen(16, model="gemma-2-2b", batch=2, seq=4096)
    assert choice is not None and isinstance(choice.run.remat, int) and choice.run.remat % 2 == 0


def test_the_cpu_and_what_is_given_have_the_first_way_that_fits():
    run = make_run("qwen2-0.5b", device="h200")
    cpu = dataclasses.replace(run, target=dataclasses.replace(run.target, platform="cpu"))
    choice = choosing.chosen(cpu)
    assert choice is not None and choice.is_first and choice.run == cpu
    given = choosing.chosen(dataclasses.replace(run, remat="dots"), remat_is_open=False)
    assert given is not None and given.run == dataclasses.replace(run, remat="dots")


def test_plan_says_what_a_run_says(capsys):
    """And takes options as a run does."""
    options = "plan --model llama-3-8b --lora 16 --batch 4 --device h200".split()
    assert main(options) == main([*options, "--remat", "auto"]) == 0
    one, two = capsys.readouterr().out.split("Fits: ")[1:]
    assert one == two
    choice, _ = chosen(plan("llama-3-8b", device="h200").run.target.capacity_bytes / GIB)
    assert choice is not None and one.splitlines()[1] == choice.line
    (rate,) = re.findall(r"^Speed: about ([\d,]+) tokens a second \(estimate, within 15%", one, re.MULTILINE)
    assert int(rate.replace(",", "")) == pytest.approx(speed(choice.run).tokens_per_second, rel=0.05)
    assert main([*options, "--remat", "full", "--micro-batches", "2"]) == 0
    printed = capsys.readouterr().out
    assert "\nremat: " not in printed and "in 2 micro-batches" in printed and "remat full.\n" in printed
