"""Long rows by a command: what it decides by itself, what it says before it starts, and what it refuses."""

import dataclasses
import json

import pytest

from liger_jax.commands import main
from liger_jax.data.options import RowOptions
from liger_jax.models import AutoModelForCausalLM
from liger_jax.ops import LinearRope, Llama3Rope
from liger_jax.planner import architectures, devices
from liger_jax.planner.advice import changed, changes, cheapest
from liger_jax.planner.architectures import architecture
from liger_jax.planner.devices import GIB, PINNED_LIMIT
from liger_jax.planner.estimate import estimate
from liger_jax.planner.step import Run
from liger_jax.trainers import adapters, long_rows, memory
from liger_jax.trainers.dpo_options import PairOptions
from liger_jax.trainers.finetune_options import FinetuneOptions
from liger_jax.trainers.grpo_options import GrpoOptions
from liger_jax.trainers.options import Settings
from liger_jax.trainers.outcome import Outcome
from liger_jax.training import processes
from liger_jax.training.row_sizes import Size
from liger_jax.user_errors import UserError
from tests import _tiny

_NAMED = architecture("llama-3.1-8b")
_OWN = Llama3Rope(factor=8.0, original_max_position_embeddings=8192)
MODEL = dataclasses.replace(_NAMED, config=dataclasses.replace(_NAMED.config, rope_scaling=_OWN))
QLORA = dict(model="m", data="d", lora=32, quantize="nf4")
ONE = dict(data=1, fsdp=1, tensor=1, sequence=1)


def fitted(monkeypatch, settings, gib, host_gib=1000, model=MODEL, **options):
    size = int(gib * GIB)
    device = devices.Target("gpu", "gpu", "A card", 1, size, "", size, size)
    monkeypatch.setattr(devices, "here", lambda: device)
    monkeypatch.setattr(devices, "machine_memory", lambda: int(host_gib * GIB))
    model = dataclasses.replace(model, config=long_rows.stretched(model.config, settings.rows.length, "llama3"))
    return memory.fitted(settings, model, "bfloat16", "bfloat16", "bfloat16", ONE, **options)


def test_rows_are_counted_as_the_largest_of_a_step_where_whole_rows_do_not_fit(monkeypatch, capsys):
    settings, asked = Settings.of(FinetuneOptions, **QLORA, length=8192), []

    def largest(chosen):
        asked.append(chosen.recipe.num_micro_batches)
        return Size(1024, 1, asked[-1])

    whole = fitted(monkeypatch, settings, 16)
    assert whole.recipe.micro_batches > 1
    found = fitted(monkeypatch, settings, 16, largest=largest)
    assert (found.recipe.micro_batches, found.placement.remat, asked) == (1, "none", [1])
    assert " GiB in rows × places of 1 × 1,024 by the planner's estimate, and " in capsys.readouterr().out
    assert fitted(monkeypatch, settings, 1000, largest=largest).recipe.micro_batches == 1
    assert "memory: the run needs at most " in capsys.readouterr().out and asked == [1]  # no data was read
    with pytest.raises(UserError, match=r"The run needs \d\.\d GiB in rows × places of 8 · 1 × 1,024 by the planner's"):
        one = settings.changed(micro_batches=8, remat="full")
        fitted(monkeypatch, one, 3, largest=largest)


def test_a_long_row_takes_all_that_it_needs_without_options(monkeypatch, capsys):
    found = fitted(monkeypatch, Settings.of(FinetuneOptions, **QLORA, length=262_144, pack=True), 75, host_gib=128)
    assert (found.placement.remat, found.recipe.micro_batches) == ("offload", 4)
    said = capsys.readouterr().out
    assert "batch: 8 rows in 4 micro-batches\n" in said
    assert "wide arrays are made for 4,096 tokens at a time\n" in said
    assert "host: the inputs of 32 layers, 128.0 of 128.0 GiB\n" in said
    smaller = fitted(monkeypatch, Settings.of(FinetuneOptions, **QLORA, length=262_144, pack=True), 75, host_gib=127)
    assert smaller.recipe.micro_batches == 8


@pytest.mark.parametrize(
    "length, pack, gib, host_gib, expected",
    [
        (262_144, False, 75, 130, "offload_attention"),  # layers' inputs 64 GiB, attention's results 64, its sums 1
        (262_144, False, 75, 128, "offload"),
        (65_536, False, 130, 1000, "offload_attention"),  # faster than "full", which fits, and than what keeps products
        (262_144, True, 75, 1000, "offload"),  # documents may be short
        (32_767, False, 12, 1000, "offload"),
    ],
)
def test_attention_s_results_go_to_the_host_where_rows_are_long_and_it_has_room(
    length, pack, gib, host_gib, expected, monkeypatch
):
    found = fitted(
        monkeypatch, Settings.of(FinetuneOptions, **QLORA, length=length, pack=pack, batch=1), gib, host_gib=host_gib
    )
    assert found.placement.remat == expected


@pytest.mark.parametrize("has_windows, expected", [(True, "offload"), (False, "offload_attention")])
def test_attention_s_results_are_made_again_where_layers_have_windows(has_windows, expected, monkeypatch):
    model = architecture("qwen2-7b")
    windows = dict(
        use_sliding_window=has_windows, max_window_layers=14, layer_types=None, max_position_embeddings=262_144
    )
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, **windows))
    assert (
        fitted(
            monkeypatch, Settings.of(FinetuneOptions, **QLORA, length=262_144, batch=1), 60, model=model
        ).placement.remat
        == expected
    )


def test_layers_keep_their_products_where_they_fit_and_as_many_as_fit(monkeypatch, capsys):
    settings = Settings.of(FinetuneOptions, **QLORA, length=2048)
    found = fitted(monkeypatch, settings, 75)
    assert (found.placement.remat, found.recipe.micro_batches) == ("none", 1)
    said = capsys.readouterr().out
    assert (
        said.count("\n") == 2
        and "remat: none, layers keep all that is not made in one pass; the fastest that fits: 0." in said
    )
    one = Settings.of(FinetuneOptions, **QLORA, length=8192, batch=1)
    found = fitted(monkeypatch, one, 16)
    remat = found.placement.remat
    assert isinstance(remat, int) and 4 < remat < 28 and f"remat: {remat}, the p" in capsys.readouterr().out


def test_micro_batches_make_room_for_products_before_the_host(monkeypatch):
    found = fitted(monkeypatch, Settings.of(FinetuneOptions, **QLORA, length=8192), 16)
    assert isinstance(found.placement.remat, int) and found.recipe.micro_batches > 1


def test_a_resumed_run_keeps_its_choice_or_says_what_else_to_choose(monkeypatch, capsys):
    settings = Settings.of(FinetuneOptions, **QLORA, length=2048)
    began = dict(remat=16, micro_batches=2)
    found = fitted(monkeypatch, settings, 75, began=began)
    assert (found.placement.remat, found.recipe.micro_batches) == (16, 2)
    assert "of 32 layers are kept; as when the run began\n" in capsys.readouterr().out
    said = r"The run in runs/finetune began with --remat 16 --micro-batches 2, .* --remat auto .* another --out\."
    with pytest.raises(UserError, match=said):
        fitted(monkeypatch, settings, 12, began=began)
    for options, expected in (dict(remat="auto"), ("none", 1)), (dict(remat="full"), ("full", 2)):
        found = fitted(monkeypatch, Settings.of(FinetuneOptions, **QLORA, length=2048, **options), 75, began=began)
        assert (found.placement.remat, found.recipe.micro_batches) == expected
    assert fitted(monkeypatch, settings, 75, began={}).placement.remat == "full"  # it began before choices were stored
    others = dataclasses.replace(settings, recipe=dataclasses.replace(settings.recipe, batch=3))
    assert fitted(monkeypatch, others, 75, began=began).recipe.micro_batches == 1  # two do not share three rows


def test_choices_are_stored_as_the_run_began():
    settings = Settings.of(FinetuneOptions, **QLORA, remat=16, micro_batches=2)
    told = dict(remat=16, micro_batches=2)
    assert memory.choices_to_store(settings, {}) == told
    assert memory.choices_to_store(settings, {"remat": "dots", "micro_batches": 1}) == dict(
        remat="dots", micro_batches=1
    )
    assert memory.choices_to_store(settings, {"batch": 8}) == {}  # it began before choices were stored
    fresh = dataclasses.replace(settings, folder=dataclasses.replace(settings.folder, fresh=True))
    assert memory.choices_to_store(fresh, {"remat": "dots"}) == told


def test_a_mixture_whose_routers_have_losses_takes_one_micro_batch(monkeypatch, capsys):
    mixtral = architecture("mixtral-8x7b-v0.1")
    for coefficient, cuts in (0.0, 8), (1e-3, 1):
        config = dataclasses.replace(mixtral.config, router_z_loss_coef=coefficient)
        model = dataclasses.replace(mixtral, config=config)
        options = Settings.of(FinetuneOptions, **QLORA, length=4096)
        found = fitted(monkeypatch, options, 48, model=model)
        assert (found.recipe.micro_batches > 1) == (cuts > 1), found


def test_a_mixture_that_is_resumed_says_that_other_micro_batches_change_its_loss(monkeypatch, capsys):
    """Three rows cannot be cut into the two micro-batches of the run's begin, as on more devices."""
    mixtral = architecture("mixtral-8x7b-v0.1")
    balanced = dataclasses.replace(mixtral, config=dataclasses.replace(mixtral.config, output_router_logits=True))
    told = "micro-batches: 1, where the run began with 2, so that the routers' losses change; --micro-batches 2 keeps"
    for model, batch, options, is_told in (
        (balanced, 3, {}, True),
        (balanced, 8, dict(remat="auto"), True),
        (balanced, 8, {}, False),
        (balanced, 3, dict(micro_batches=1), False),
        (mixtral, 3, {}, False),
    ):
        settings = Settings.of(FinetuneOptions, **QLORA, length=512, batch=batch, **options)
        fitted(monkeypatch, settings, 75, model=model, began=dict(remat="full", micro_batches=2))
        assert (told in capsys.readouterr().out) == is_told, (batch, options)


def test_options_that_are_given_stay(monkeypatch):
    with pytest.raises(UserError, match="It fits with --remat offload --micro-batches 4"):
        fitted(monkeypatch, Settings.of(FinetuneOptions, **QLORA, length=262_144, remat="full", micro_batches=1), 75)
    found = fitted(monkeypatch, Settings.of(FinetuneOptions, **QLORA, length=262_144, remat="full", batch=1), 100)
    assert (found.placement.remat, found.recipe.micro_batches) == ("full", 1)


@pytest.mark.parametrize("loss", ["aot", "kto"])
def test_a_loss_of_whole_batches_is_never_parted(loss, monkeypatch):
    with pytest.raises(UserError, match="It fits with --remat offload: "):
        fitted(monkeypatch, Settings.of(PairOptions, **QLORA, length=8192, remat="full", loss_type=loss), 16)
    found = fitted(monkeypatch, Settings.of(PairOptions, **QLORA, length=8192, loss_type=loss), 90)
    assert isinstance(found.placement.remat, int) and found.recipe.micro_batches == 1


def test_processes_whose_devices_differ_take_the_same_choice(monkeypatch):
    """Another process has a device of 16 GiB, and decides for both."""
    settings = Settings.of(FinetuneOptions, **QLORA, length=2048)
    alone = fitted(monkeypatch, settings, 16)
    monkeypatch.setattr(memory.processes, "least", lambda size: min(size, 16 * GIB))
    assert fitted(monkeypatch, settings, 75).placement == alone.placement != fitted(monkeypatch, settings, 11).placement


def test_a_host_that_is_too_small_is_named(monkeypatch, capsys):
    with pytest.raises(UserError, match=r"inputs need 64\.0 GiB of the host's memory, which has 32\.0 GiB"):
        fitted(
            monkeypatch,
            Settings.of(FinetuneOptions, **QLORA, length=262_144, remat="offload", batch=1),
            75,
            host_gib=32,
        )
    found = Settings.of(FinetuneOptions, **QLORA, length=262_144, remat="offload_attention", batch=1)
    assert fitted(monkeypatch, found, 75, host_gib=150).placement.remat == "offload_attention"
    assert "host: the inputs and attention's results of 32 layers, 129.0 of 150.0 GiB\n" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"inputs and attention's results need 129\.0 GiB .* Pass --remat offload, a"):
        fitted(monkeypatch, found, 75, host_gib=128)


def test_longer_rows_are_refused_or_reached_by_the_option():
    told = dict(data="d", length=200_000)
    with pytest.raises(UserError, match="200000 is more than the 131072 positions of .* --rope-scaling llama3"):
        long_rows.stretched_for(RowOptions(**told), MODEL)
    with pytest.raises(UserError, match="--rope-scaling=yarn: .* does not fit the model's Llama3Rope"):
        long_rows.stretched_for(RowOptions(**told, rope_scaling="yarn"), MODEL)
    found = long_rows.stretched_for(RowOptions(**told, rope_scaling="llama3"), MODEL)
    assert found.config.longest_sequence == 262_144
    for completion, cure in (2_000, "--prompt-length 129072 without"), (140_000, "--prompt-length 65536 --completion"):
        own = GrpoOptions(reward="a:b", completion_length=completion)
        with pytest.raises(UserError, match=f"131072 positions of .* Pass {cure}"):
            long_rows.stretched_for(RowOptions(**told), MODEL, shorter=own.shorter)
    assert long_rows.stretched_for(RowOptions("d"), MODEL) is MODEL


def test_the_pool_may_hold_the_layers_inputs(monkeypatch, tmp_path):
    sizes = dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, vocab_size=256)
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="llama", intermediate_size=64) | sizes))
    monkeypatch.setattr(devices, "machine_memory", lambda: 2000 * GIB)
    told = dict(model=str(tmp_path), data="d", batch=1, pack=True)

    def limit(**options):
        monkeypatch.setenv(PINNED_LIMIT, "")  # so that it is gone after the test
        monkeypatch.delenv(PINNED_LIMIT)
        line, limit = (
            long_rows.let_pool_grow(Settings.of(FinetuneOptions, **told | options)),
            long_rows.os.environ.get(PINNED_LIMIT),
        )
        assert f"may pin {limit} GiB" in line if limit else line == ""
        return limit

    assert limit(length=131_072) is None  # 32 GiB
    assert limit(length=524_288) == "141"
    assert limit(length=524_288, remat="offload_attention") == "284"  # twice as much, and attention's sums
    assert limit(length=524_288, pack=False) == "284"  # which may be chosen
    assert limit(length=524_288, remat="full") is None
    assert limit(length=524_288, batch=4, micro_batches=4) == "141"
    monkeypatch.setattr(devices, "machine_memory", lambda: 100 * GIB)
    assert limit(length=524_288) == "100"
    monkeypatch.setenv(PINNED_LIMIT, "7")
    long_rows.let_pool_grow(Settings.of(FinetuneOptions, **told, length=524_288))
    assert long_rows.os.environ[PINNED_LIMIT] == "7"


@pytest.mark.parametrize("is_first", [True, False])
def test_the_first_process_alone_says_what_the_pool_may_hold(is_first, monkeypatch, capsys):
    monkeypatch.setattr(
        "liger_jax.trainers.run.train", lambda settings, task, after: Outcome(0)
    )  # first, with its own imports
    monkeypatch.setattr(long_rows, "let_pool_grow", lambda settings: "a line")
    monkeypatch.setattr(long_rows, "within", lambda settings, model: (settings, ""))
    monkeypatch.setattr(adapters, "found", lambda model, options: (model, options, None))
    monkeypatch.setattr(architectures, "architecture_of", lambda source: None)
    monkeypatch.setattr(processes, "is_first", lambda: is_first)
    assert main(["finetune", "--model=m", "--data=d", "--out=o"]) == 0
    assert capsys.readouterr().out == ("a line\n" if is_first else "")


@pytest.mark.full
def test_a_model_is_trained_on_longer_rows_and_saved_with_its_positions(tmp_path, capsys):
    source = _tiny.checkpoint(tmp_path / "source")
    longest = json.loads((source / "config.json").read_text())["max_position_embeddings"]
    (tmp_path / "a.txt").write_text("one two three four " * longest)
    command = ["finetune", f"--model={source}", f"--data={tmp_path / 'a.txt'}", "--pack", f"--length={2 * longest}"]
    command += [f"--out={tmp_path / 'out'}", "--steps=1", "--batch=1", "--eval-share=0"]
    assert main(command) == 2
    assert "--rope-scaling linear|dynamic|yarn|llama3" in capsys.readouterr().err
    assert main([*command, "--rope-scaling=linear"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert model.config.rope_scaling == LinearRope(factor=2.0)


@pytest.mark.parametrize("micro_batches", [1, 8])
def test_all_weights_in_16_and_8_bits_are_offered_before_adapters(micro_batches):
    """Parts have a sum of their own gradients, with which they do not fit."""
    h100 = dataclasses.replace(devices.target("h100"), capacity_bytes=int(58.2 * GIB))
    mesh = dict(data=1, fsdp=1, tensor=1, sequence=1, expert=1)
    run = Run(architecture("llama-3-8b"), 8, 2048, h100, mesh, micro_batches=micro_batches)
    chosen = cheapest(run, changes(run, frozen="bfloat16"))
    assert chosen is not None
    found = changed(run, chosen)
    assert estimate(found).total <= h100.capacity_bytes < estimate(run).total
    named = dict(param_dtype="bfloat16", optimizer="adamw8bit", micro_batches=1)
    assert found == dataclasses.replace(run, **named)
