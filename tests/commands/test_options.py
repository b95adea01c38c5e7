"""Every option of every command in few runs, so that each pair of options that go together is in one of them.

A level is what stands on the command line; what comes after a # only names it. By default a few are tried, and by
`make test-full` all.
"""

import contextlib
import functools
import io
import json
import math
import shlex
import shutil
import sys
import traceback
import types
from pathlib import Path

import jax
import pytest
from flax import nnx

from liger_jax import commands
from liger_jax.models import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from liger_jax.models.lora import add_lora, save_adapters
from liger_jax.trainers.distill_options import DistillOptions
from liger_jax.trainers.dpo_options import PairOptions
from liger_jax.trainers.finetune_options import FinetuneOptions
from liger_jax.trainers.grpo_options import GrpoOptions
from liger_jax.training.waiting import Compiling
from liger_jax.user_errors import UserError
from tests import _tiny
from tests.commands._pairwise import rows
from tests.trainers._runs import figures_of

pytestmark = pytest.mark.usefixtures("each_program_is_compiled_once")
# Options that other tests have: those of several processes, and one that grpo refuses, since it holds nothing out.
ELSEWHERE = {
    "--distributed": "test_finetune_processes.py",
    "--patience": "test_grpo.py",
    "--push": "test_model_card.py",
    "--help": "",
    "--help-all": "",
}

ADAPTERS = {
    "adapters": ["--lora 2", "# none", "--lora --merge", "--lora 3 --lora-experts --model {experts}"],
    "alpha": ["", "--lora-alpha 3"],
    "targets": ["", "--lora-targets q_proj,down_proj"],
    "dropout": ["", "--lora-dropout 0.1"],
    "rslora": ["", "--rslora"],
    "dora": ["", "--dora"],
    "quantize": ["", "--quantize nf4", "--quantize int8"],
}
TRAINING = ADAPTERS | {
    "remat": ["", "--remat dots", "--remat offload"],
    "dtype": ["", "--dtype bfloat16"],
    "param-dtype": ["", "--param-dtype bfloat16"],
    "micro-batches": ["", "--micro-batches 2"],
    "mesh": ["", "--mesh fsdp={devices}"],
    "steps": ["--steps 2", "--epochs 0.5"],
    "rate": ["", "--learning-rate 1e-4"],
    "optimizer": ["", "--optimizer adamw8bit"],
    "schedule": ["", "--schedule linear", "--schedule constant"],
    "warmup": ["", "--warmup 1"],
    "weight-decay": ["", "--weight-decay 0.1"],
    "clip": ["", "--clip 0"],
    "every": ["", "--every 1"],
    "samples": ["", "--samples 1"],
    "keep": ["", "--keep 2"],
    "log": ["", "--log csv,tensorboard"],
    "save-dtype": ["", "--save-dtype bfloat16"],
    "begin": ["", "--fresh", "--result-of 2"],
    "verify": ["", "--verify"],
    "memory": ["", "--risk-memory"],
    "seed": ["", "--seed 7"],
    "config": ["", "--config {config}"],
    "cache": ["", "--no-cache"],
}
ROWS = {
    "batch": ["--batch 4"],
    "pack": ["", "--pack"],
    "held out": ["--eval-share 0.3", "--eval-data {held_out}", "# a default share"],
    "patience": ["", "--patience 3"],
    "length": ["--length 64", "--length 64 --rope-scaling linear --model {short}"],
}
TEXTS = ROWS | {
    "data": ["--data {texts}", "--data {texts}=2", "--data org/words --subset one", "--data org/words --stream"],
    "field": ["", "--column text", "--format text"],
}
FACTORS = {
    "finetune": TRAINING | TEXTS | {"loss": ["", "--loss-type dft"]},
    "dpo": TRAINING | ROWS | {
        "loss": [
            "--data {pairs}",
            "--data {pairs} --loss robust --label-smoothing 0.1",
            "--data {pairs} --loss sigmoid,sft --loss-weights 1,0.5 --ld-alpha 0.5",
            "--data {pairs} --f-divergence alpha_divergence --f-alpha 0.3",
            "--data {pairs} --loss discopop --discopop-tau 0.1",
            "--data {pairs} --loss cpo --cpo-alpha 0.5",
            "--data org/pairs --subset one --loss simpo --gamma 1 --beta 2",
            "--data {pairs} --loss alphapo --reward-alpha 0.25 --gamma 1 --beta 2",
            "--data {answers} --loss kto --desirable-weight 2 --undesirable-weight 0.5",
        ],
    },
    "grpo": TRAINING | {
        "mesh": ["", "--mesh fsdp={devices} --micro-batches 4"],
        "data": ["--data {prompts}", "--data org/prompts --subset one"],
        "reward": ["--reward rewarded:size", "--reward rewarded:size rewarded:late=0.5 --reward-timeout 60"],
        "group": ["--group 2 --batch 8", "--group 4 --batch 8"],
        "lengths": ["--prompt-length 24 --completion-length 4", "--prompt-length 24 --completion-length 4 --length 60"],
        "temperature": ["", "--temperature 0.7"],
        "top-p": ["", "--top-p 0.9"],
        "top-k": ["", "--top-k 20"],
        "loss": [
            "", "--loss-type grpo", "--loss-type dr_grpo --advantages dr_grpo", "--loss-type bnpo --advantages rloo",
            "--loss-type cispo --epsilon-high 5", "--loss-type sapo", "--loss-type vespo --advantages reinforce",
            "--loss-type gmpo", "--loss-type luspo --importance-level sequence --advantages reinforce_baseline",
        ],
        "epsilon": ["", "--epsilon-low 0.1 --epsilon-high 0.3"],
        "delta": ["", "--delta 2"],
        "beta": ["", "--beta 0.1"],
        "correction": [
            "",
            "--importance-sampling token_truncate", "--importance-sampling sequence_mask --importance-max 2",
        ],
        "updates": ["", "--updates 2"],
        "truncated": ["", "--mask-truncated"],
        "rope": ["", "--rope-scaling linear --model {short}"],
    },
    "distill": TRAINING | TEXTS | {
        "teacher": ["--teacher {teacher}", "--teacher {teacher} --teacher-quantize nf4"],
        "divergence": [
            "", "--divergence reverse_kl --temperature 2", "--divergence jsd --beta 0.3", "--divergence tvd",
            "--divergence cosine", "--top-k 4 --temperature 2", "--top-k 4 --tail ignore",
        ],
        "hard": ["", "--hard-weight 0.3"],
    },
    "generate": {
        "model": ["--model {model}", "--model {adapters} --base {model}", "--model {adapters}"],
        "quantize": ["", "--quantize nf4", "--quantize int8"],
        "dtype": ["", "--dtype bfloat16"],
        "size": ["--max-new-tokens 3"],
        "temperature": ["", "--temperature 0.7"],
        "draw": ["", "--temperature 0.7 --top-p 0.9", "--temperature 0.7 --top-k 5"],
        "seed": ["", "--seed 3"],
        "prompt": [
            "--prompt one", "--prompt one --chat", "--prompt one --chat --system three", "--file {prompts}",
        ],
        "config": ["", "--config {config}"],
        "cache": ["", "--no-cache"],
    },
    "data": {"model": ["--model {model}"]} | {name: ROWS[name] for name in ("pack", "held out", "length")} | {
        "data": [
            "{texts}", "--data {texts}", "--data org/words --subset one", "{pairs} --loss sigmoid",
            "{answers} --loss kto",
        ],
        "field": ["", "--column text", "--format text"],
        "seed": ["", "--seed 3"],
        "rows": ["", "--rows 1", "--check"],
        "config": ["", "--config {config}"],
        "cache": ["", "--no-cache"],
    },
    "plan": {
        "model": ["--model qwen2-0.5b", "--model {model}"],
        "batch": ["--batch 8", "--batch 8 --micro-batches 2"],
        "seq": ["--seq 256", "--seq 64 --rope-scaling linear --model {short}"],
        "device": [
            "--device h100", "--device v5e:2x2 --mesh fsdp=4", "--memory 24GiB", "--device h100 --host-memory 64GiB",
        ],
        "optimizer": ["", "--optimizer adamw8bit", "--optimizer sgd", "--state-dtype bfloat16"],
        "state": ["", "--state-memory host"],
        "adapters": ["", "--lora 4", "--lora 4 --lora-targets q_proj --dora", "--lora --quantize nf4"],
        "dtypes": ["", "--dtype float16 --param-dtype bfloat16"],
        "remat": ["", "--remat dots", "--remat offload"],
        "loss": ["", "--loss logits"],
        "packed": ["", "--packed", "--pack"],
        "experts": ["", "--lora-experts --lora --model {experts}"],
        "level": ["", "--level estimate", "--search batch --level estimate"],
        "shown": ["", "--details", "--picture {folder}/plan.png"],
        "config": ["", "--config {config}"],
        "cache": ["", "--no-cache"],
    },
    "chat": {
        "model": ["--model {model}", "--model {adapters} --base {model}"],
        "quantize": ["", "--quantize nf4"],
        "dtype": ["", "--dtype bfloat16"],
        "size": ["--max-new-tokens 3"],
        "temperature": ["", "--temperature 0.7"],
        "draw": ["", "--temperature 0.7 --top-p 0.9", "--temperature 0.7 --top-k 5"],
        "seed": ["", "--seed 3"],
        "system": ["", "--system three"],
        "config": ["", "--config {config}"],
        "cache": ["", "--no-cache"],
    },
    "doctor": {"config": ["", "--config {config}"], "cache": ["", "--no-cache"]},
}  # fmt: skip
# Levels that a command refuses together, by regular expressions.
APART = [
    ("# none", "--lora-|--rslora|--dora|--quantize|--beta 0.1"),
    ("^--lora 2|^--lora 3", "--save-dtype"),
    ("--model {experts}", "--model {short}"),
    ("--model {experts}", "--lora-targets|--lora-dropout|--dora"),
    ("--stream", "--epochs|--eval-share|a default share|--top-k|=2"),
    ("--data org/", "--format"),
    ("--loss kto", "--micro-batches"),
    ("cispo|sapo|vespo", "--epsilon-low"),
    ("cispo|sapo|vespo|gmpo", "--delta"),
    ("} --loss", "--format|--column"),
]
METHODS = {"finetune": FinetuneOptions, "dpo": PairOptions, "grpo": GrpoOptions, "distill": DistillOptions}
QUICK = {"plan": (1,), "data": (0, 1), "grpo": (1,)}  # rows by default, of which training is traced alone


@functools.cache
def rows_of(command):
    return rows(FACTORS[command], APART)


def words(level):
    return shlex.split(level, comments=True)


def test_every_option_is_in_a_row_or_has_a_test_of_its_own():
    for command, parser in zip(commands._COMMANDS, commands._parsers()[1], strict=True):
        used = {word for levels in FACTORS[command].values() for level in levels for word in words(level)}
        for action in parser._actions:
            names = set(action.option_strings)
            is_known = not names or names & {*used, "--out", *ELSEWHERE}
            assert is_known, f"{command}: write a level of {action.option_strings[0]} into FACTORS"


class Place(dict):
    """What stands in braces in levels, in the current folder. A model is made when it is first asked for."""

    def __init__(self):
        rows = {
            "texts": [{"text": _tiny.text(5 + i, i)} for i in range(20)],
            "pairs": list(map(json.loads, _tiny.pairs(20).splitlines())),
            "answers": list(map(json.loads, _tiny.answers(20).splitlines())),
        }
        rows |= {f"held_{name}": [some.pop() for _ in range(4)] for name, some in rows.items()}
        rows["prompts"] = [{"prompt": _tiny.text(2 + i % 3, i), "letter": "e"} for i in range(8)]
        self.datasets = {"org/words": rows["texts"], "org/pairs": rows["pairs"], "org/prompts": rows["prompts"]}
        for name, some in rows.items():
            self[name] = f"{name}.jsonl"
            Path(self[name]).write_text("\n".join(map(json.dumps, some)))
        self["devices"] = min(2, jax.device_count())
        self["config"] = "config.toml"
        Path(self["config"]).write_text("seed = 5\n")
        Path("rewarded.py").write_text(
            "def size(completions):\n    return [len(each) for each in completions]\n\n"
            "async def late(completions, letter):\n    return [None if len(x) % 2 else 1.0 for x in completions]\n"
        )
        _tiny.checkpoint(Path("model"), width=64)
        self["model"] = "model"

    def __missing__(self, name):
        if name == "adapters":
            base = AutoModelForCausalLM.from_pretrained("model")
            adapted = add_lora(base, 2, alpha=4, rngs=nnx.Rngs(1))
            save_adapters(adapted, name, base_model=str(Path("model").resolve()), tokenizer_from="model")
        else:
            shutil.copytree("model", name)
        if name == "experts":
            config = MixtralConfig(
                vocab_size=320, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=512,
            )  # fmt: skip
            MixtralForCausalLM(config, rngs=nnx.Rngs(0)).save_pretrained(name)
        elif name == "short":
            config = json.loads(Path(name, "config.json").read_text())
            Path(name, "config.json").write_text(json.dumps(config | {"max_position_embeddings": 24}))
        self[name] = name
        return name


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("options"))
        found = Place()

        def load_dataset(name, subset=None, split=None, streaming=False):
            rows = found.datasets[name]
            return Dataset(rows) if streaming else rows

        patch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
        yield found


class Dataset(list):
    """A stream of rows."""

    def skip(self, number):
        return Dataset(self[number:])


def arguments(command, row, place):
    """What stands on the command line. What a level says later overrules what was said before."""
    kind = next((each for each in ("pairs", "answers") if any(each in level for level in row)), "texts")
    place["held_out"] = place[f"held_{kind}"]
    given = [word for level in row for word in words(level.format_map(place))]
    model = [] if "--model" in given or command == "doctor" else ["--model", place["model"]]
    return [command, *model, *given]


def problem(command, row, place, out):
    """What has gone wrong with a row; "" if nothing has."""
    place["folder"] = out.parent
    given = arguments(command, row, place)
    told, result_of = io.StringIO(), []
    if "--result-of" in given:
        at = given.index("--result-of")
        result_of, given[at : at + 2] = given[at : at + 2], []
    is_training = command in METHODS
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        try:
            code = commands.main([*given, *(["--out", str(out)] if is_training else [])])
            if is_training and not code and result_of:
                last = figures_of(out)[-1]["step"]
                code = commands.main([*given, "--out", str(out), "--result-of", f"{last:.0f}"])
        except SystemExit as error:
            code = error.code
        except Exception:
            code, _ = 1, traceback.print_exc()
    is_right = code == 0
    if is_training and is_right:
        result = "model" if "--merge" in given or "--lora" not in given else "adapters"
        figures = figures_of(out)
        is_right = all(math.isfinite(each["loss"]) for each in figures) and (out / result).is_dir()
    return "" if is_right else f"{shlex.join(given)}\n{code}: {told.getvalue()[-2000:]}"


@pytest.fixture(autouse=True)
def typed(monkeypatch):
    """What is typed into a chat."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))


@pytest.mark.parametrize(["command", "number"], [(command, i) for command, some in QUICK.items() for i in some])
def test_some_options_go_together(command, number, place, tmp_path, monkeypatch):
    def traced(self, program, *types):
        program.lower(*types)
        raise UserError("it is traced")

    monkeypatch.setattr(Compiling, "start", traced)
    found = problem(command, rows_of(command)[number], place, tmp_path / "out")
    assert found.endswith("it is traced\n") if command in METHODS else not found, found


PARTS = 8


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("command", FACTORS)
def test_each_pair_of_options_goes_together(command, part, place, tmp_path, monkeypatch):
    found = []
    for i, row in enumerate(rows_of(command)[part::PARTS]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))
        found.append(problem(command, row, place, tmp_path / str(i)))
    assert not any(found), "\n\n".join(filter(None, found))
