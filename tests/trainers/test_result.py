"""What a run of `liger-jax finetune` leaves, and what it never replaces."""

import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file

from liger_jax.models import AutoModelForCausalLM
from liger_jax.models.hugging_face.source import Source
from liger_jax.trainers import options_file, result
from liger_jax.trainers.distill_options import DistillOptions
from liger_jax.trainers.dpo_options import PairOptions
from liger_jax.trainers.errors import training_errors
from liger_jax.trainers.finetune_options import FinetuneOptions
from liger_jax.trainers.grpo_options import GrpoOptions
from liger_jax.trainers.log import TABLE, Log
from liger_jax.trainers.options import Settings
from liger_jax.trainers.result import CHECKPOINTS
from liger_jax.training import Checkpoints
from liger_jax.user_errors import UserError
from tests import _tiny

STATE = [jnp.zeros(())]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Folders of one model, by the dtype of its weights."""
    folder = tmp_path_factory.mktemp("sources")
    _tiny.checkpoint(folder / "float32")
    model = AutoModelForCausalLM.from_pretrained(folder / "float32", param_dtype=jnp.bfloat16)
    model.save_pretrained(folder / "bfloat16", tokenizer_from=folder / "float32")
    return folder


def settings(out, **options):
    return Settings.of(FinetuneOptions, model="m", data="d", out=str(out), **options)


@training_errors()
def run_in(out, *names, fresh=False, **options):
    """A run's checkpoint and what it leaves beside it; returns the checkpoints."""
    earlier = result.of_earlier_runs(out, out.parent)
    checkpoints = Checkpoints(out / CHECKPOINTS, {}, fresh=fresh, earlier=earlier)
    checkpoints.save(1, STATE, {})
    for name in names:
        (out / name).mkdir(exist_ok=True)
        (out / name / "file").write_text(name)
    return checkpoints


# --- what is there already --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, dict(lora=4, merge=True)], ids=["all weights", "merged"])
def test_a_model_is_never_replaced_by_what_is_tuned_from_it(sources, options):
    link = sources / "link"
    link.mkdir(exist_ok=True)
    if not (link / "model").exists():
        (link / "model").symlink_to(sources / "float32")
    with pytest.raises(UserError, match=r"written to .*/link/model, which is --model itself. Pass another --out\."):
        result.check(settings(link, **options), sources / "float32")
    result.check(settings(link, lora=4), sources / "float32")  # whose adapters are beside it
    with pytest.raises(UserError, match=r"--out=.*/model is the folder of --model itself. Pass another --out\."):
        result.check(settings(link / "model", **options), sources / "float32")


@pytest.mark.parametrize(["name", "options"], [("model", {}), ("adapters", dict(lora=4))])
def test_only_what_a_run_has_left_is_replaced(tmp_path, name, options):
    out = tmp_path / "out"
    (out / name).mkdir(parents=True)
    for fresh in (False, True):
        result.check(settings(out, fresh=fresh, **options), tmp_path)  # an empty folder
        (out / name / "file").write_text("thesis")
        with pytest.raises(
            UserError, match=rf"would replace .*/{name}, and .* holds no run that has written it. Move it"
        ):
            result.check(settings(out, fresh=fresh, **options), tmp_path)
        (out / name / "file").unlink()
    run_in(out, name)
    result.check(settings(out, **options), tmp_path)


def test_a_table_that_is_no_log_is_not_replaced(tmp_path):
    (tmp_path / "log.csv").write_text("date,weight\n")
    with pytest.raises(UserError, match=r"log\.csv is not the log of a run, and would be overwritten"):
        result.check(settings(tmp_path), tmp_path.parent)
    result.check(settings(tmp_path, log=("tensorboard",)), tmp_path.parent)


def test_what_is_in_the_place_of_a_run_s_files_is_refused_before_it_begins(tmp_path):
    for name, make, is_a in (
        ("model", lambda path: path.symlink_to(tmp_path / "nowhere"), "a link that leads nowhere"),
        ("checkpoints", lambda path: path.symlink_to(tmp_path / "nowhere"), "a link that leads nowhere"),
        ("tensorboard", lambda path: path.write_text(""), "a file"),
        ("log.csv", lambda path: path.mkdir(), "a folder"),
    ):
        out = tmp_path / f"out of {name}"
        out.mkdir()
        make(out / name)
        with pytest.raises(UserError, match=f"{name} is {is_a}, where the run makes a .* Move it, or pass another"):
            result.check(settings(out, log=("csv", "tensorboard")), tmp_path / "source")
    with pytest.raises(UserError, match=r"--out='.*/o\\udcff' is not valid UTF-8"):
        settings(tmp_path / "o\udcff")


def test_weights_in_the_place_of_the_result_are_not_replaced(sources, tmp_path):
    run_in(tmp_path / "out", "model")
    weights = tmp_path / "out" / "model" / "other.safetensors"
    weights.write_bytes(b"")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "model.safetensors").symlink_to(weights)
    with pytest.raises(UserError, match="which is --model itself"):
        result.check(settings(tmp_path / "out"), tmp_path / "source")


def test_fresh_removes_checkpoints_and_nothing_else(tmp_path):
    out = tmp_path / "out"
    run_in(out)
    (out / CHECKPOINTS / "other").mkdir()
    (out / CHECKPOINTS / "other" / "weights.bin").write_text("thesis")
    (out / CHECKPOINTS / "7.orbax-checkpoint-tmp").mkdir()  # of a run that was killed
    run_in(out, fresh=True)
    names = {path.name for path in (out / CHECKPOINTS).iterdir()}
    assert {"other", "1"} <= names and "7.orbax-checkpoint-tmp" not in names
    (out / CHECKPOINTS / "2024").mkdir()
    (out / CHECKPOINTS / "2024" / "photo").write_text("")
    with pytest.raises(UserError, match=r"2024 is not a checkpoint of a run. Move it, or pass another --out\."):
        run_in(out, fresh=True)


# --- one run, one result ----------------------------------------------------------------------------------------------


def test_a_run_that_starts_over_takes_the_place_of_all_that_the_other_left(tmp_path, capsys):
    out = tmp_path / "out"
    run_in(out, "model", "tensorboard")
    for name in (name for names in result.BESIDE.values() for name in names):
        (out / name).write_text("")
    (out / "model-7").mkdir()  # by --result-of
    options = dict(lora=4, log=())
    run_in(out, fresh=True, **options)  # it is stopped, and goes on
    assert (out / "model").exists()
    checkpoints = run_in(out, "adapters", **options)
    result.clear(settings(out, **options), checkpoints.earlier)
    assert [path.name for path in out.iterdir() if "model" in path.name or path.name == "tensorboard"] == []
    assert (out / "adapters").exists() and (out / "tokens").exists()
    assert not any((out / name).exists() for name in ("completions.jsonl", "references.f32", "teacher.bin"))
    assert f"removed {out / 'model'}: an earlier run had left it\n" in capsys.readouterr().out
    checkpoints.forget_earlier()
    assert run_in(out, "model", lora=4, merge=True).earlier == []  # merged by the same command: its own


def test_each_command_keeps_its_own_files_when_it_starts_over(tmp_path):
    (tmp_path / "settings.toml").write_text(
        options_file.heading("grpo")
    )  # of a run that was killed before a checkpoint
    names = [name for names in result.BESIDE.values() for name in names]
    common = dict(model="m", data="d", out=str(tmp_path))
    runs = {
        ("tokens",): Settings.of(FinetuneOptions, **common),
        ("tokens", "teacher"): Settings.of(DistillOptions, **common, teacher="t", top_k=4),
        ("tokens", "references"): Settings.of(PairOptions, **common),
        ("completions",): Settings.of(GrpoOptions, **common, reward="r:f", samples=2),
        (): Settings.of(GrpoOptions, **common, reward="r:f"),
    }
    for own, run in runs.items():
        for name in names:
            (tmp_path / name).write_text("")
        earlier = result.of_earlier_runs(Path(run.folder.out), tmp_path)
        result.clear(run, earlier)
        kept = {name for name in names if (tmp_path / name).exists()}
        assert kept == {name for kind in own for name in result.BESIDE[kind]}


def test_what_is_tuned_stays_beside_its_adapters(tmp_path):
    out = tmp_path / "out"
    run_in(out, "model")
    for source in (out / "model", out / "model" / "part"):
        source.mkdir(exist_ok=True)
        assert result.of_earlier_runs(out, source) == []


def test_nothing_of_an_earlier_result_is_left_in_the_adapters(sources, tmp_path):
    from flax import nnx

    from liger_jax.models.lora import add_lora

    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "chat_template.jinja").write_text("of another model")
    model = add_lora(AutoModelForCausalLM.from_pretrained(sources / "float32"), 2, alpha=2, rngs=nnx.Rngs(0))
    result.write(model, settings(tmp_path, lora=2), Source(sources / "float32"), [])
    assert not (tmp_path / "adapters" / "chat_template.jinja").exists()


# --- the dtype of the weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ["stored", "trained", "asked", "saved", "told"],
    [
        ("bfloat16", "float32", None, "bfloat16", "as the model came; --save-dtype float32 saves it as it was trained"),
        ("bfloat16", "float32", "float32", "float32", ""),
        ("float32", "bfloat16", None, "bfloat16", "as it was trained; the model came in float32"),
        ("float32", "float32", None, "float32", ""),
    ],
)
def test_weights_are_saved_as_they_came_or_it_is_told(sources, tmp_path, capsys, stored, trained, asked, saved, told):
    model = AutoModelForCausalLM.from_pretrained(sources / stored, param_dtype=jnp.dtype(trained))
    folder = result.write(model, settings(tmp_path, save_dtype=asked), Source(sources / stored), [])
    assert {str(x.dtype) for x in load_file(folder / "model.safetensors").values()} == {saved}
    assert str(AutoModelForCausalLM.from_pretrained(folder).head.dtype) == saved  # by its config.json
    printed = capsys.readouterr().out
    assert told in printed and bool(told) == bool(printed)


def test_a_weight_that_float16_does_not_hold_is_told(sources, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(sources / "float32")
    scale = getattr(model.model, model.config.last_norm_name).scale
    scale.set_value(scale.get_value().at[0].set(1e5))
    with pytest.raises(UserError, match="too large for float16. Pass --save-dtype float32"):
        result.write(model, settings(tmp_path, save_dtype="float16"), Source(sources / "float32"), [])


def test_a_dtype_of_weights_is_refused_for_adapters(tmp_path):
    with pytest.raises(UserError, match="--save-dtype=float32 is for weights, not adapters: pass --merge as well"):
        settings(tmp_path, lora=4, save_dtype="float32")


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("a small disk needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="tmpfs is Linux's")
def test_a_result_for_which_there_is_no_room_is_a_sentence(sources, small_disk):
    model = AutoModelForCausalLM.from_pretrained(sources / "float32")
    (small_disk / "filler").write_bytes(b"0" * 60_000)
    with (
        pytest.raises(UserError, match=r"The result cannot be written to .*/small/model: the disk is full\. It needs "),
        training_errors(),
    ):
        result.write(model, settings(small_disk), Source(sources / "float32"), [])
    assert (small_disk / "filler").stat().st_size == 60_000
    assert not list((small_disk / "model").rglob("*.safetensors"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_a_log_that_cannot_be_written_ends_no_run(tmp_path, capsys):
    (tmp_path / TABLE).symlink_to("/dev/full")
    with Log(["csv"], tmp_path, ["step", "loss"], []) as log:
        for step in (1, 2):
            log.write({"step": step, "loss": 1.0})
    told = f"{tmp_path / TABLE} cannot be written: No space left on device. It will be whole when the run goes on."
    assert capsys.readouterr().out == told + "\n"


def test_a_run_of_another_command_in_the_folder_is_named(tmp_path):
    out = tmp_path / "out"
    run_in(out, "model")
    (out / "settings.toml").write_text(options_file.heading("grpo"))
    settings = Settings.of(FinetuneOptions, model="m", data="d", out=str(out))
    told = f"{out} holds a run of liger-jax grpo, and this one is of liger-jax finetune. Pass --fresh to start over, or"
    with pytest.raises(ValueError, match=re.escape(told)):
        result.check(settings, tmp_path)
    result.check(settings.changed(fresh=True), tmp_path)
    (out / "settings.toml").write_text(options_file.heading("finetune"))
    result.check(settings, tmp_path)
