"""A run's options: what a folder holds of them stays what it was, so that runs of earlier versions go on."""

import dataclasses
import json
import shlex
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from liger_jax import commands
from liger_jax.commands._arguments import settings_of
from liger_jax.trainers import options_file
from liger_jax.trainers.distill_options import DistillOptions
from liger_jax.trainers.dpo_options import PairOptions
from liger_jax.trainers.finetune_options import FinetuneOptions
from liger_jax.trainers.grpo_options import GrpoOptions
from liger_jax.trainers.options import Settings
from liger_jax.training.identity import check_same

METHODS = {"finetune": FinetuneOptions, "dpo": PairOptions, "grpo": GrpoOptions, "distill": DistillOptions}
NEEDED = {"grpo": {"reward": "r:f"}, "distill": {"teacher": "t"}}
# By a command line: the lines of its settings.toml, and by what its checkpoints know the run.
BEFORE = json.loads(Path(__file__).with_name("runs_before.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("method", METHODS.values())
def test_an_option_has_one_owner_and_a_place_in_the_file(method):
    settings = Settings.of(method, model="m", data="d", **NEEDED.get(method.command, {}))
    parts = [getattr(settings, field.name) for field in dataclasses.fields(settings)]
    names = [field.name for part in parts for field in dataclasses.fields(part)]
    assert len(names) == len({*names}) and {*settings.flat()} == {*names}
    assert {*names} >= {*method.changes, *method.no_options, *method.not_written}
    with pytest.raises(TypeError, match=f"lorra is no option of liger-jax {method.command}"):
        Settings.of(method, model="m", data="d", lorra=2)


@pytest.mark.parametrize("line", BEFORE)
def test_a_run_is_known_by_what_it_was_before(line, tmp_path):
    name, *arguments = shlex.split(line)
    parser = dict(zip(commands._COMMANDS, commands._parsers()[1], strict=True))[name]
    settings = settings_of(parser.parse_args(arguments), METHODS[name])
    options_file.write(tmp_path / "settings.toml", settings.to_write(), options_file.heading(name))
    assert (tmp_path / "settings.toml").read_text().splitlines() == BEFORE[line]["file"]
    check_same(tmp_path, BEFORE[line]["run"], json.loads(json.dumps(settings.of_the_run())))


@pytest.mark.full
def test_a_folder_from_before_is_resumed_to_the_same_weights(tmp_path, monkeypatch, capsys):
    """The folder has a run that was stopped, its model and data, and the weights of the same run undisturbed."""
    with zipfile.ZipFile(Path(__file__).with_name("run_before.zip")) as folder:
        folder.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    written = Path("run/settings.toml").read_text()
    assert commands.main(shlex.split(Path("command").read_text())) == 0
    assert "resumed at step 3" in capsys.readouterr().out and Path("run/settings.toml").read_text() == written
    found, whole = map(load_file, ("run/adapters/adapter_model.safetensors", "whole.safetensors"))
    assert found.keys() == whole.keys()
    for name, weights in whole.items():
        np.testing.assert_allclose(found[name], weights, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize(("batch", "given", "number"), [(64, None, 8), (4, None, 4), (11, None, 1), (16, 2, 2)])
def test_micro_batches_of_a_rollout_divide_its_batch_where_no_number_is_given(batch, given, number):
    options = dict(model="m", data="d", reward="r:f", batch=batch, group=batch, micro_batches=given)
    assert Settings.of(GrpoOptions, **options).recipe.micro_batches == number
