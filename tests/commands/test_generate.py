"""`liger-jax generate` and `liger-jax chat`: what they print is what the model says by its own functions."""

import io
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from liger_jax.commands import main
from liger_jax.commands._text_generator import _Words
from liger_jax.models import AutoModelForCausalLM
from liger_jax.models.lora import add_lora, load_adapters, save_adapters
from tests import _tiny

WIDTH = 64  # prompts are padded, so that one program serves all


@pytest.fixture(scope="module", autouse=True)
def each_program_is_compiled_once(caches):
    """Products are exact, so that the command's programs and the library's choose the same tokens on a GPU, too."""
    with pytest.MonkeyPatch.context() as patch, jax.default_matmul_precision("highest"):
        patch.setenv("XDG_CACHE_HOME", str(caches))
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return _tiny.checkpoint(tmp_path_factory.mktemp("source") / "model", vocab_size=303)  # a token for each number


@pytest.fixture(scope="module")
def run(source, tmp_path_factory):
    """A run's folder with adapters that change what the model says."""
    model = AutoModelForCausalLM.from_pretrained(source)
    add_lora(model, 2, alpha=4, rngs=nnx.Rngs(1))
    for _, each in nnx.iter_graph(model):
        if isinstance(each, nnx.LoRAParam):
            each.set_value(jax.random.normal(jax.random.key(each.get_value().size), each.get_value().shape))
    folder = tmp_path_factory.mktemp("run")
    save_adapters(model, folder / "adapters", base_model=str(source), tokenizer_from=source)
    return folder


def expected(source, prompt, count, adapters=None, **options):
    """The text after a prompt by the library's own functions, up to a token that ends it."""
    model = AutoModelForCausalLM.from_pretrained(source)
    if adapters is not None:
        load_adapters(model, adapters)
    tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    ids = tokenizer.encode(prompt).ids
    stops = [tokenizer.token_to_id(name) for name in ("<|endoftext|>", "<|im_end|>")]
    if options:
        options["key"] = jax.random.fold_in(jax.random.key(0), 0)
    padded = jnp.asarray([[0] * (WIDTH - len(ids)) + ids])
    options |= dict(attention_mask=jnp.arange(WIDTH)[None] >= WIDTH - len(ids), eos_token_id=stops)
    new = model.generate(padded, max_new_tokens=count, **options)[0, WIDTH:].tolist()
    new = new[: next((i for i, token in enumerate(new) if token in stops), count)]
    return tokenizer.decode(new, skip_special_tokens=True)


def generated(capsys, *arguments):
    capsys.readouterr()
    assert main(["generate", "--dtype=float32", *map(str, arguments)]) == 0
    return capsys.readouterr()


@pytest.mark.parametrize("options", [{}, dict(temperature=2.0, top_k=20)], ids=["likeliest", "random"])
def test_a_text_goes_on_as_the_model_s_own_generate(source, capsys, options):
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    printed = generated(capsys, "--model", source, "--prompt", _tiny.text(5), "--max-new-tokens=8", *given)
    assert printed.out == expected(source, _tiny.text(5), 8, **options) + "\n" and len(printed.out) > 4
    assert f"reading {source} … " in printed.err and " tokens/s" in printed.err


def test_figures_have_a_line_of_their_own(source, monkeypatch):
    both = io.StringIO()
    monkeypatch.setattr(sys, "stdout", both)
    monkeypatch.setattr(sys, "stderr", both)
    assert main(["generate", f"--model={source}", "--prompt", _tiny.text(5), "--max-new-tokens=8"]) == 0
    text, figures = both.getvalue().splitlines()[-2:]
    assert text and figures.startswith("[8 tokens: the first after ")


def test_adapters_speak_with_the_model_that_they_name_and_their_chat_template(source, run, capsys):
    prompt = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\n"
    options = ["--chat", "--system=be brief", "--prompt=one two", "--max-new-tokens=8"]
    printed = generated(capsys, "--model", run, *options)
    assert printed.out.strip("\n") == expected(source, prompt, 8, run / "adapters").strip("\n")
    assert printed.out != generated(capsys, "--model", source, *options).out
    assert printed.out == generated(capsys, "--model", run / "adapters", "--base", source, *options).out


def test_a_file_holds_prompts_and_conversations(source, capsys, tmp_path):
    conversation = {"messages": [{"role": "user", "content": "three"}]}
    lines = [{"prompt": _tiny.text(3)}, conversation]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "prompt.txt").write_text(_tiny.text(3))
    printed = generated(capsys, "--model", source, "--file", tmp_path / "prompts.jsonl", "--max-new-tokens=8").out
    first, second = printed.split("── ")[1:]
    alone = generated(capsys, "--model", source, "--file", tmp_path / "prompt.txt", "--max-new-tokens=8").out
    assert first.partition("\n")[2] == alone
    answer = expected(source, "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n", 8)
    assert second.partition("\n")[2].strip("\n") == answer.strip("\n")


@pytest.mark.parametrize(
    ["line", "sentence"],
    [
        ("{", "line 1, is no JSON"),
        ('{"text": "one"}', "line 1, must hold an object with a prompt, which is a text, or with messages."),
        ('{"messages": [{"role": "assistant", "content": "one"}]}', "line 1: the last message must be one that the"),
        ('{"messages": [{"role": "user", "content": 1}]}', "line 1: message 1, the user's,"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line, sentence, source, capsys, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(line)
    assert main(["generate", f"--model={source}", f"--file={tmp_path / 'prompts.jsonl'}"]) == 2
    assert sentence in capsys.readouterr().err


def test_a_chat_remembers_what_was_said_until_a_new_one_begins(source, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one two\n\nand?\n/new\none two\n"))
    assert main(["chat", f"--model={source}", "--max-new-tokens=8"]) == 0
    printed = capsys.readouterr().out
    first = expected(source, "<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\n", 8)
    history = f"<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\n{first.strip()}<|im_end|>\n"
    second = expected(source, f"{history}<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n", 8)
    assert printed == f"{first}\n{second}\n{first}\n"


def test_characters_of_several_tokens_come_whole_and_nothing_is_lost(source):
    inner = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))

    text = lambda tokens: inner.decode(tokens, skip_special_tokens=True)
    ids = inner.encode("one ☃☃ two").ids
    words = _Words(text, np.asarray(inner.encode("ten").ids))
    parts = [words.of(token) for token in ids[:-1]]
    assert "".join(parts) + words.rest() + words.of(ids[-1]) == "one ☃☃ two"
    assert "☃" in parts and "" in parts and not any("\ufffd" in part for part in parts)
    words = _Words(text, np.asarray(inner.encode("ten").ids))
    assert [words.of(inner.encode("☃").ids[0]), words.rest()] == ["", "\ufffd"]  # a text that ends within a character


@pytest.mark.parametrize(
    ["options", "sentence"],
    [
        (["--prompt=one", "--file=x"], "Pass either --prompt TEXT or --file FILE."),
        ([], "Pass either --prompt TEXT or --file FILE."),
        (["--prompt=one", "--system=x"], "--system is for conversations: pass --chat as well."),
        (["--prompt=one", "--top-k=5"], "--top-k is for sampling: pass --temperature, such as"),
        (["--prompt=one", "--temperature=1e-39"], "--temperature=1e-39 must be 0, for the most likely token"),
        (["--prompt=one", "--temperature=-1"], "--temperature=-1.0 must be 0, for the most likely token"),
        (["--prompt=one", "--max-new-tokens=600"], "--prompt has 1 token, and --max-new-tokens=600 adds to them: the"),
        (["--prompt="], "--prompt has no tokens, and a model needs at least one to continue."),
        (["--file=none"], "--file=none is not a file."),
        (["--prompt=one", "--base=x"], "--base is for adapters, and"),
    ],
)
def test_what_cannot_be_said_is_one_sentence(source, capsys, options, sentence):
    assert main(["generate", f"--model={source}", *options]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("liger-jax generate: ") and sentence in error


def test_folders_without_a_model_are_told_apart(source, run, tmp_path, capsys):
    def error(model, command="generate", *options):
        capsys.readouterr()
        assert main([command, f"--model={model}", *options]) == 2
        return capsys.readouterr().err.splitlines()[-1]

    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert "holds a run that is not finished" in error(tmp_path / "run", "generate", "--prompt=one")
    assert "has no config.json" in error(tmp_path, "generate", "--prompt=one")
    (tmp_path / "adapters").mkdir()
    config = json.loads((run / "adapters" / "adapter_config.json").read_text())
    for name, sentence in ((None, "does not name the base model"), ("./none", "The adapters' base model, './none': ")):
        (tmp_path / "adapters" / "adapter_config.json").write_text(
            json.dumps(config | {"base_model_name_or_path": name})
        )
        assert sentence in error(tmp_path, "generate", "--prompt=one")
    fields = json.loads((source / "tokenizer_config.json").read_text())
    plain = _tiny.checkpoint(tmp_path / "plain")
    (plain / "tokenizer_config.json").write_text(json.dumps({**fields, "chat_template": None}))
    assert "has no chat template, so a conversation cannot be rendered" in error(plain, "chat")
