"""What `liger-jax finetune` leaves is loaded by transformers and PEFT as it is. `make parity` installs both."""

import importlib
import importlib.util
import json
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.chat.template import ChatTemplate
from liger_jax.commands import main
from liger_jax.models import AutoModelForCausalLM
from liger_jax.models.lora import load_adapters
from tests import _tiny

HAS_PEFT = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "peft"))
pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(not HAS_PEFT, reason="torch, transformers or peft is absent"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT asks for it
]
PAGE = Path(__file__).parents[2] / "docs" / "finetune.md"
MESSAGES = [
    {"role": "user", "content": "one two"},
    {"role": "assistant", "content": "three"},
    {"role": "user", "content": "four"},
]
GENERATION = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = _tiny.checkpoint(tmp_path_factory.mktemp("source") / "model")
    (folder.parent / "chats.jsonl").write_text(_tiny.chats(12))
    return folder


@pytest.mark.parametrize("options", [[], ["--lora=4"]], ids=["weights", "adapters"])
def test_transformers_loads_what_a_run_leaves(source, tmp_path, options):
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    data = f"--data={source.parent / 'chats.jsonl'}"
    sizes = "--length=64 --batch=4 --steps=4 --learning-rate=0.05".split()
    assert main(["finetune", f"--model={source}", data, f"--out={tmp_path}", *sizes, *options]) == 0
    folder = tmp_path / ("adapters" if options else "model")

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert text == ChatTemplate(_tiny.CHAT_TEMPLATE, {}).render(MESSAGES)[0]
    tokens = tokenizer(text, return_tensors="np")["input_ids"]

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ours = AutoModelForCausalLM.from_pretrained(source if options else folder)
    ours = load_adapters(ours, folder) if options else ours
    logits = theirs(input_ids=torch.from_numpy(tokens)).logits.detach().numpy()
    np.testing.assert_allclose(ours(jnp.asarray(tokens)).logits, logits, atol=1e-4)

    config = transformers.GenerationConfig.from_pretrained(folder)
    stops = {tokenizer.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|im_end|>")}
    assert set(config.eos_token_id) == stops
    prompt = torch.from_numpy(tokens)
    written = theirs.generate(input_ids=prompt, max_new_tokens=4, do_sample=False, generation_config=config)
    assert prompt.shape[1] < written.shape[1] <= prompt.shape[1] + 4


def test_the_page_s_lines_load_adapters_of_a_multimodal_checkpoint(source, tmp_path, monkeypatch):
    """The lines of docs/finetune.md, on what a run leaves that began from a multimodal Gemma 3."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    text = dict(vocab_size=320, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    vision = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=28)
    config = transformers.Gemma3Config(
        text_config=text | dict(num_key_value_heads=1, head_dim=8, eos_token_id=0), vision_config=vision
    )
    torch.manual_seed(0)
    shutil.copytree(source, tmp_path / "base")
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    sizes = "--length=64 --batch=4 --steps=4 --learning-rate=0.05 --lora=4".split()
    assert (
        main(["finetune", "--model=base", f"--data={source.parent / 'chats.jsonl'}", "--out=runs/finetune", *sizes])
        == 0
    )

    lines = re.search(r"```\n(model = AutoModelForCausalLM.*?)```", PAGE.read_text(), re.DOTALL)
    assert lines is not None
    names = ("AutoModelForCausalLM", "AutoTokenizer", "GenerationConfig")
    found = {name: getattr(transformers, name) for name in names}
    exec(lines[1], found)
    model, tokenizer = found["model"], found["tokenizer"]
    ends = json.loads((tmp_path / "runs/finetune/adapters/generation_config.json").read_text())["eos_token_id"]
    assert model.generation_config.eos_token_id == ends
    tokens = tokenizer(_tiny.text(20), return_tensors="np")["input_ids"]
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.from_numpy(tokens)).logits.numpy()
    base = AutoModelForCausalLM.from_pretrained("base")
    before = base(jnp.asarray(tokens)).logits
    after = load_adapters(base, "runs/finetune/adapters")(jnp.asarray(tokens)).logits
    np.testing.assert_allclose(after, logits, atol=1e-4)
    assert np.abs(after - before).max() > 1e-2  # the adapters count


@pytest.mark.parametrize("template", [_tiny.CHAT_TEMPLATE, GENERATION], ids=["plain", "generation"])
def test_conversations_are_rendered_as_transformers_does(source, tmp_path, template):
    transformers = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    for line in (source.parent / "chats.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        text, spans, *_ = ChatTemplate(template, {}).render(messages)
        assert text == tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        if template == GENERATION:
            found = tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            offsets = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
            ours = [int(any(begin <= at < end for begin, end in spans)) for at, _ in offsets]
            assert found["assistant_masks"] == ours and sum(ours)
