"""A run's options: what a folder holds of them stays what it was, so that runs of earlier versions go on."""

import json
import shlex
from pathlib import Path

import pytest

from liger_jax import commands
from liger_jax.commands._arguments import settings_of
from liger_jax.trainers import options_file
from liger_jax.trainers.distill_options import DistillSettings
from liger_jax.trainers.dpo_options import PairSettings
from liger_jax.trainers.finetune_options import FinetuneSettings
from liger_jax.trainers.grpo_options import GrpoSettings

SETTINGS = {"finetune": FinetuneSettings, "dpo": PairSettings, "grpo": GrpoSettings, "distill": DistillSettings}
# By a command line: the lines of its settings.toml, and by what its checkpoints know the run.
BEFORE = json.loads(Path(__file__).with_name("runs_before.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("line", BEFORE)
def test_a_run_is_known_by_what_it_was_before(line, tmp_path):
    name, *arguments = shlex.split(line)
    parser = dict(zip(commands._COMMANDS, commands._parsers()[1], strict=True))[name]
    settings = settings_of(parser.parse_args(arguments), SETTINGS[name])
    options_file.write(tmp_path / "settings.toml", settings.to_write(), options_file.heading(name))
    assert (tmp_path / "settings.toml").read_text().splitlines() == BEFORE[line]["file"]
    assert json.loads(json.dumps(settings.of_the_run())) == BEFORE[line]["run"]
