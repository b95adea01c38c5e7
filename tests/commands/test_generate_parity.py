"""`liger-jax generate` on a run's folder says what transformers and PEFT say with the same folder."""

import json

import jax
import pytest
from flax import nnx

from liger_jax.commands import main
from liger_jax.models import AutoModelForCausalLM
from liger_jax.models.lora import add_lora, save_adapters
from tests import _tiny

pytestmark = pytest.mark.parity


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("has_adapters", [False, True], ids=["model", "adapters"])
def test_a_chat_is_answered_as_by_transformers(has_adapters, tmp_path, capsys):
    torch, transformers, peft = map(pytest.importorskip, ("torch", "transformers", "peft"))
    source = folder = _tiny.checkpoint(tmp_path / "source", width=32)
    if has_adapters:
        model, folder = AutoModelForCausalLM.from_pretrained(source), tmp_path / "adapters"
        add_lora(model, 2, alpha=4, rngs=nnx.Rngs(1))
        for _, each in nnx.iter_graph(model):
            if isinstance(each, nnx.LoRAParam):
                shape = each.get_value().shape
                each.set_value(jax.random.normal(jax.random.key(sum(shape)), shape))
        save_adapters(model, folder, base_model=str(source), tokenizer_from=source)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": _tiny.text(4)}]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"messages": messages}))
    prompts = f"--file={tmp_path / 'prompts.jsonl'}"
    assert main(["generate", f"--model={tmp_path if has_adapters else folder}", prompts, "--max-new-tokens=24"]) == 0
    ours = capsys.readouterr().out

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, folder) if has_adapters else theirs
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    stops = [tokenizer.convert_tokens_to_ids(name) for name in ("<|endoftext|>", "<|im_end|>")]
    out = theirs.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=stops
    )
    assert ours == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) + "\n" and len(ours) > 8
