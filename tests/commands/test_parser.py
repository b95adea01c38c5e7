"""The command line itself: its version, names that are not known, and files of options."""

import argparse
import contextlib
import re
import sys
import tomllib
import types
from pathlib import Path

import pytest

from liger_jax import _options
from liger_jax.commands import _COMMANDS, _config, _parser, _parsers, main, option_names
from liger_jax.commands._arguments import ALTERNATIVES
from liger_jax.commands._arguments import settings_of as parsed_settings
from liger_jax.commands.finetune import add_arguments
from liger_jax.trainers import options_file, other_words
from liger_jax.trainers.finetune_options import FinetuneOptions
from liger_jax.trainers.grpo_options import GrpoOptions
from liger_jax.trainers.options import Settings, options_of
from tests import _tiny

ROOT = Path(__file__).parents[2]
PLAN = "--batch 8 --seq 512 --device h200".split()


def said(capsys, *arguments):
    """What a call prints that argparse ends, and its exit code."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return printed.out + printed.err, stopped.value.code


def test_version_is_the_project_s(capsys):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert said(capsys, "--version") == (f"liger-jax {project['version']}\n", 0)


@pytest.mark.parametrize(
    ["arguments", "meant"],
    [
        ("finetune --lr 1e-4", "--learning-rate"),
        ("finetune --max-steps=3", "--steps"),
        ("finetune --model x --modle y", "--model"),
        ("finetune --learning_rate 1", "--learning-rate"),
        ("finetune --learning 1", "--learning-rate"),  # no option has a short form
        ("plan --max-length 3", "--length or --seq"),
        ("data --max-length 3", "--length"),
        ("finetune --early_stopping_patience 3", "--patience"),
        ("finetune --target_modules q_proj", "--lora-targets"),
        ("finetune --r 16", "--lora"),
        ("fintune --model x", "finetune"),
        ("sft --model x", "liger-jax finetune"),
        ("kto", "liger-jax dpo --loss kto"),
    ],
)
def test_what_is_mistyped_is_told_in_one_sentence(arguments, meant, capsys):
    printed, code = said(capsys, *arguments.split())
    assert code == 2 and printed.endswith(f" Did you mean {meant}?\n"), printed
    assert printed.startswith("liger-jax") and printed.count("\n") == 1


@pytest.mark.parametrize(
    ["arguments", "sentence"],
    [
        ("--bf16", "bfloat16 is the default of --dtype"),
        ("--per_device_train_batch_size 2", "It is --batch, the whole step's rows over all devices"),
        ("--resume_from_checkpoint x", "Repeat the same command"),
        ("--torch_dtype bfloat16", "--torch_dtype. Weights have --param-dtype, and the computation has --dtype."),
        ("--deepspeed x.json", "--deepspeed. There is no DeepSpeed here. Devices are given by --mesh, such as"),
        ("--modules_to_save lm_head", "No command has it: in Python add_lora takes patterns"),
        ("--adam_beta2 0.95", "No command changes it: beta1 is 0.9, beta2 0.999 and epsilon 1e-8."),
        ("--loss_type dft", "Did you mean --loss-type?"),
        ("--optimizer sgd", "No command has it: in Python make_step takes any optimizer of optax's"),
        ("--loss-type chunked_nll", "It is nll, which holds no logits."),
        ("--schedule constant_with_warmup", "It is constant with --warmup."),
        ("--lora r16", "argument --lora: 'r16' must be a whole number."),
        ("--learning-rate much", "argument --learning-rate: 'much' must be a number."),
        ("--model x", "arguments are required: --data. What there is: liger-jax finetune --help"),
        (
            "--bf17 1 --num_train_epochs 1 --lr 1",
            "--bf17. Nor is there --num_train_epochs. Did you mean --epochs? Nor",
        ),
    ],
)
def test_what_other_trainers_call_it_leads_to_what_is_to_be_done(arguments, sentence, capsys):
    printed, code = said(capsys, "finetune", *arguments.split())
    assert code == 2 and sentence in printed and printed.count("\n") == 1, printed


@pytest.mark.parametrize(
    ["option", "told"],
    [
        ("--max_length=512", "unrecognized option: --max_length. --length counts both answers of a pair, "),
        ("--ref-model", " The reference is the model as the run finds it, and needs no option"),
        ("--rpo-alpha", "unrecognized option: --rpo-alpha. It is --loss sigmoid,sft --loss-weights 1,ALPHA"),
    ],
)
def test_what_is_another_thing_here_is_told_in_words(option, told, capsys):
    printed, code = said(capsys, "dpo", option, "x")
    assert "leave them out" in said(capsys, "plan", "--beta", "0.1")[0]
    assert code == 2 and told in printed and "Did you mean" not in printed
    assert "Did you mean" in said(capsys, "finetune", "--max-length", "1")[0]  # there it is --length, and no more


@pytest.mark.parametrize("loss", ["sigmoid", "kto", "sigmoid,sft"])
def test_plan_says_that_it_needs_no_loss_of_dpo_s(loss, capsys):
    printed, code = said(capsys, "plan", "--model", "x", "--loss", loss)
    assert code == 2 and f"invalid choice: '{loss}' (choose from" in printed and printed.count("\n") == 1
    assert "). plan's --loss says whether a step's logits are held, and none of dpo's losses" in printed
    assert printed.endswith("count both answers of a pair in --length. What there is: liger-jax plan --help\n")
    assert "Did you mean logits?" in said(capsys, "plan", "--model", "x", "--loss", "logit")[0]


@pytest.mark.parametrize(
    "command, own", [("finetune", ""), ("dpo", "--loss"), ("grpo", "--reward"), ("distill", "--teacher")]
)
def test_help_shows_the_ten_options_that_people_need_first_in_groups_that_name_their_pages(command, own, capsys):
    (short, code), (whole, _) = said(capsys, command, "--help"), said(capsys, command, "--help-all")
    options_in = lambda text: re.findall(r"^  (?:-h, )?(--[a-z-]+)", text, re.MULTILINE)
    *ten, help_option, help_all, config, cache = options_in(short)
    assert code == 0 and len(ten) == 10 and (help_option, help_all, config, cache)[:2] == ("--help", "--help-all")
    assert ten[0] == (own or "--model") and ten.index("--model") < ten.index("--data")
    ours = {each.dest: each for each in dict(zip(_COMMANDS, _parsers()[1], strict=True))[command]._actions}
    visible = {
        each.option_strings[-1 if name == "help" else 0]
        for name, each in ours.items()
        if each.help != argparse.SUPPRESS
    }
    assert set(options_in(whole)) == visible and len(options_in(whole)) == len(visible) > 40
    for page, _, heading in re.findall(r"^[a-z ]+ \((docs/[a-z-]+\.md)(#([a-z-]+))?\):$", whole, re.MULTILINE):
        headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
        assert not heading or heading in {each.lower().replace(" ", "-") for each in headings}
    assert whole.count("docs/") >= 7


def test_names_of_other_trainers_lead_to_options_that_there_are():
    parser = _parser.Parser()
    add_arguments(parser)
    ours = {*parser._option_string_actions}
    elsewhere = {"--seq", "--device", "--max-new-tokens", "--search", "--cpo-alpha", "--divergence"}
    elsewhere |= {_options.flag(field) for field in options_of(GrpoOptions).values()}
    told = {name: (option,) for name, (option, _) in other_words._HINTS.items()}
    told |= {name: (other_words._TRAINS,) for name in other_words._HINTS_OF_TRAINERS}
    for name, meant in (other_words.ELSEWHERE | told).items():
        assert (ours | elsewhere).issuperset(meant)
        assert name not in ours | elsewhere or not ours.issuperset(meant)


def test_the_program_alone_shows_its_commands(capsys):
    printed, code = said(capsys)
    assert code == 2 and "    finetune  train a model on your text" in printed


def test_what_is_nothing_like_an_option_is_only_refused(capsys):
    assert (
        "unrecognized option: --zzz. What there is: liger-jax finetune --help\n" in said(capsys, "finetune", "--zzz")[0]
    )
    assert "Options follow the command" in said(capsys, "--model", "x", "finetune")[0]
    assert (
        "unrecognized arguments: chats.jsonl. What there is" in said(capsys, *"plan --model x chats.jsonl".split())[0]
    )


# --- files of options -------------------------------------------------------------------------------------------------


def settings_of(capsys, *arguments):
    """What a training command would run with."""
    parser = _parser.Parser(prog="liger-jax finetune", alternatives=ALTERNATIVES, known=option_names)
    add_arguments(parser)
    parser.add_argument("--config")
    settings = parsed_settings(parser.parse_args([str(argument) for argument in arguments]), FinetuneOptions)
    return types.SimpleNamespace(**settings.flat())


@pytest.fixture
def options(tmp_path):
    """Writes a file of options and returns `--config` with it."""

    def write(text):
        (tmp_path / "options.toml").write_text(text, encoding="utf-8")
        return "--config", str(tmp_path / "options.toml")

    return write


def test_options_of_the_command_line_overrule_those_of_the_file(capsys, options):
    file = options('model = "x"\ndata = "y"\nlearning-rate = 1e-3\npack = true\nepochs = 2\nlora = true\nlog = ["csv"]')
    found = settings_of(capsys, *file)
    assert (found.model, found.learning_rate, found.pack, found.epochs, found.lora) == ("x", 1e-3, True, 2.0, 16)
    found = settings_of(capsys, *file, "--no-pack", "--steps=3", "--learning-rate=0.1", "--log=tensorboard")
    assert (found.learning_rate, found.pack, found.steps, found.epochs, found.log) == (
        0.1, False, 3, None, ("tensorboard",),
    )  # fmt: skip


def test_settings_come_back_from_the_file_that_a_run_writes(capsys, tmp_path):
    path = tmp_path / "settings.toml"
    told = Settings.of(FinetuneOptions,
        model='a "quoted"\\ name\x7f\t☃', data="y", pack=True, lora=4, learning_rate=1e-5, log=("csv", "wandb"), seed=7,
        schedule="linear", warmup=20.0, clip=0.0, weight_decay=0.0, samples=2, patience=3, out=str(tmp_path),
    )  # fmt: skip
    options_file.write(path, told.to_write(), options_file.heading("finetune"))
    assert vars(settings_of(capsys, "--config", path)) == told.flat()
    of_the_run = Settings.of(FinetuneOptions, model="x", data="y", lora=4).of_the_run()
    assert of_the_run["learning_rate"] == 2e-4  # another rate is told beside the default's value, and not beside None


@pytest.mark.parametrize(
    ["text", "sentence"],
    [
        ("learning_rat = 1", "learning_rat is not an option of liger-jax finetune. Did you mean --learning-rate?"),
        ("lr = 1", "lr is not an option of liger-jax finetune. Did you mean --learning-rate?"),
        ("adam_beta2 = 0.9", "adam_beta2 is not an option of liger-jax finetune. No command changes it: beta1 is 0.9,"),
        ("steps = 1.5", "steps = 1.5 must be a whole number."),
        ('learning_rate = "much"', 'learning_rate = "much" must be a number.'),
        ('pack = "yes"', 'pack = "yes" must be true or false.'),
        ("steps = true", "steps = true must be a whole number."),
        ("column = 3", "column = 3 must be a text, in quotes."),
        ('remat = "ful"', 'remat = "ful" must be one of auto, none, full'),
        (
            "learning_rate = 1\nlearning-rate = 2",
            "learning_rate and learning-rate are the same option. Keep one of them.",
        ),
        (
            "learning-rate = 1\nlearning_rate = 2",
            "learning-rate and learning_rate are the same option. Keep one of them.",
        ),
        ("steps: 1", "is no TOML: "),
        ("[finetune]\nsteps = 1", "finetune is not an option of liger-jax finetune."),
    ],
)
def test_a_file_that_is_wrong_is_one_sentence(capsys, options, text, sentence):
    printed, code = said(capsys, "finetune", *options(text))
    assert code == 2 and printed.startswith("liger-jax finetune: --config ") and printed.count("\n") == 1
    assert sentence in printed


def test_paths_of_all_commands_are_those_of_the_shell(capsys, options, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    found = settings_of(capsys, "--model=~/m", "--data", "~/a.jsonl=2", "b~", "--out=~/o", "--eval-data", "~/e.jsonl")
    assert (found.model, found.out) == (f"{tmp_path}/m", f"{tmp_path}/o")
    assert (found.data, found.eval_data) == ((f"{tmp_path}/a.jsonl=2", "b~"), (f"{tmp_path}/e.jsonl",))
    assert settings_of(capsys, *options('model = "~/m"\ndata = ["d"]')).model == f"{tmp_path}/m"
    (tmp_path / "c.toml").write_text('model = "x"\ndata = "y"')
    assert settings_of(capsys, "--config=~/c.toml").model == "x"
    args = _parsers()[0].parse_args(["plan", "--model=~/m", "--picture=~/p.png"])
    assert (args.model, args.picture) == (f"{tmp_path}/m", f"{tmp_path}/p.png")
    for call in ("finetune --model x --data y --out=", "generate --model= --prompt x", "data --model x --data="):
        printed, code = said(capsys, *call.split())
        assert code == 2 and printed.endswith("= is empty, and must name a file or a folder.\n"), printed
    texts = {"prompt", "system", "column", "subset", "mesh", "distributed", "lora_targets", "reward", "memory"}
    texts |= {"host_memory", "device", "push", "loss_type", "f_divergence", "log", "loss_weights"}
    is_text = lambda action: action.type in (None, str) and not action.choices and action.nargs != 0
    free = {action.dest for parser in _parsers()[1] for action in parser._actions if is_text(action)}
    assert free - texts == {*_parser.PATHS}, "an option whose value is a text names a path or not"


def test_an_option_that_means_something_else_in_the_run_that_wrote_the_file_is_not_read(capsys, options):
    text = "seed = 3\ntemperature = 2.0\nsamples = 4\n"
    for writer, samples in (("distill", 4), ("grpo", 0)):
        file = options(f"{options_file.heading(writer)}\n{text}")
        found = settings_of(capsys, *file, "--model=x", "--data=y")
        assert (found.seed, found.samples) == (3, samples)
    assert _parsers()[0].parse_args(["finetune", *file, "--model=x", "--data=y"]).of_file[1:] == [
        f"{file[1]}: not read, as they mean something else in liger-jax grpo, which has written the file: samples"
    ]
    args = _parsers()[0].parse_args(["generate", *options(f"{options_file.heading('distill')}\n{text}"), "--model=x"])
    assert (args.seed, args.temperature) == (3, None)
    args = _parsers()[0].parse_args(["generate", *options(text), "--model=x"])
    assert args.temperature == 2.0  # a file of one's own


def test_a_plan_of_a_run_s_file_is_told_before_what_it_does_not_read(capfd, options):
    text = "model = 'qwen2-0.5b'\nbatch = 8\nsteps = 3\nwarmup = 0.1\nclip = 2.0\nsamples = 1\nkeep = 3\n"
    file = options(text)
    with contextlib.redirect_stderr(sys.stdout):
        assert main(["plan", *file, "--device=h200"]) == 0
    first, *_, last = capfd.readouterr().out.splitlines()
    assert first.startswith("Fits: ")
    assert last == f"{file[1]}: options of other commands are not read: steps, warmup, clip and 2 others"


def test_options_of_one_name_and_different_meanings_are_known():
    """A name whose help differs between commands that train or generate means the same, or stands in the table."""
    same = "data dtype learning_rate length batch micro_batches log mesh model out quantize seed stream".split()
    same.append("distributed")
    helps = {}
    for parser in _parsers()[1]:
        if (name := parser.prog.split()[-1]) not in ("plan", "data", "doctor"):
            for action in parser._actions:
                helps.setdefault(action.dest, {}).setdefault(action.help, set()).add(name)
    differ = {name for name, texts in helps.items() if len(texts) > 1} - {*same}
    assert differ == set(_config.MEANINGS)


def test_a_length_that_a_run_has_added_up_goes_with_its_terms(options):
    text = f"{options_file.heading('grpo')}\nprompt_length = 64\ncompletion_length = 8\nlength = "
    parsed = lambda length, *given: _parsers()[0].parse_args(["grpo", *options(f"{text}{length}"), *given])
    common = "--model=x", "--data=y", "--reward=r:f"
    assert parsed(72, *common).length == 72
    assert parsed(72, *common, "--completion-length=16").length is None  # else 80 would have to be passed, too
    assert parsed(512, *common, "--completion-length=16").length == 512


@pytest.mark.parametrize(
    ["command", "sentence"],
    [
        ("grpo --model x --data y --reward r:f --epsilon-low -1", "--epsilon-low=-1.0 must be in [0, 1)"),
        ("grpo --model x --data y --reward r:f --delta 0.1", "--delta=0.1 must be > 1"),
        (
            "dpo --model x --data y --loss sigmoid,sft --loss-weights nan,1",
            "--loss-weights=nan must be a finite number",
        ),
        ("dpo --model x --data y --loss sigmoid,sft --loss-weights a", "'a' must be numbers separated by commas"),
        (
            "dpo --model x --data y --f-divergence alpha_divergence --f-alpha nan",
            "--f-alpha=nan must be a finite number",
        ),
        ("finetune --model x --data y --mesh fsdp", "--mesh='fsdp': fsdp needs a number of devices"),
        ("plan --model qwen2-0.5b --device h200:8 --mesh=", "--mesh='': '' is not an axis"),
        (
            "plan --model qwen2-0.5b --device h200:4 --mesh tensor=4",
            "--mesh: tensor has 4 devices, which do not divide",
        ),
        ("finetune --model /nope/x --data y", "--model: no such folder: '/nope/x'"),
        ("data --model /nope/x y", "--model: no such folder: '/nope/x'"),
        ("generate --model /nope/x --prompt y", "--model: no such folder: '/nope/x'"),
    ],
)
def test_refusals_name_the_command_s_own_options(capsys, monkeypatch, tmp_path, command, sentence):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(command.split())
    except SystemExit as stopped:  # argparse's
        code = stopped.code
    printed = capsys.readouterr().err
    assert code == 2 and printed.startswith(f"liger-jax {command.split()[0]}: ") and sentence in printed


def test_a_file_must_be_there_and_be_one(capsys, options):
    assert "--config none.toml cannot be read: No such file" in said(capsys, "plan", "--config=none.toml")[0]
    assert "--config is given more than once" in said(capsys, "plan", *options(""), *options(""))[0]
    assert "argument --config: expected one argument" in said(capsys, "plan", "--config")[0]


def test_every_command_takes_a_file(capsys, options, tmp_path):
    folder = _tiny.checkpoint(tmp_path / "model")
    (tmp_path / "chats.jsonl").write_text(_tiny.chats(4))
    file = options(f'model = "{folder}"\ndata = "{tmp_path / "chats.jsonl"}"\nlength = 64\nbatch = 4\nrows = 1\n')
    assert main(["data", *file]) == 0
    printed = capsys.readouterr()
    assert len(re.findall(r"^row \d", printed.out, re.MULTILINE)) == 1
    assert printed.err == f"{file[1]}: options of other commands are not read: batch\n"
    assert main(f"data --model {folder} --data {tmp_path / 'chats.jsonl'} --length 64 --rows 1".split()) == 0
    assert main(["data", f"--model={folder}"]) == 2 and "such as --data chats.jsonl" in capsys.readouterr().err
    assert main(["plan", *options('model = "qwen2-0.5b"\nlength = 77\npack = true'), "--device=h200"]) == 0
    assert "8 × 77 tokens packed" in capsys.readouterr().out  # plan's own names are --seq and --packed


def test_the_help_of_a_command_says_what_it_needs_and_does(capsys):
    said_by = {name: " ".join(said(capsys, name, "--help-all")[0].split()) for name in ("finetune", "dpo", "grpo")}
    assert "usage: liger-jax grpo --model MODEL --data DATA --reward MODULE:FUNCTION [options]" in said_by["grpo"]
    assert said(capsys, *"grpo --model x --data y".split())[0].startswith(
        "liger-jax grpo: the following arguments are required: --reward."
    )
    fastest = "auto, the fastest of data, fsdp and expert"
    whole = "auto, data where whole weights fit on a device, else fsdp"
    for name, text in said_by.items():
        assert f"fsdp=2,tensor=2 (default: {whole if name == 'grpo' else fastest})" in text
        assert "train adapters of this rank, or 16, instead of all weights" in text
    assert "pairs or single answers in a step" in said_by["dpo"]
