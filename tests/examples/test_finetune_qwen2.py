"""The fine-tuning example is the command with defaults of its own, which its options replace."""

from examples import finetune_qwen2
from liger_jax.commands import finetune


def test_it_is_the_command_for_qwen2(monkeypatch):
    runs = []
    monkeypatch.setattr(finetune, "run", lambda args: runs.append(args) or 0)
    assert finetune_qwen2.main(["--data=text.txt", "--pack"]) == 0
    assert finetune_qwen2.main(["--data=text.txt", "--model=./mine", "--out=there"]) == 0
    assert [(args.model, args.out, bool(args.pack)) for args in runs] == [
        ("Qwen/Qwen2-0.5B", "runs/finetune_qwen2", True),
        ("./mine", "there", False),
    ]


def test_a_user_s_error_is_one_sentence(capsys):
    assert finetune_qwen2.main(["--data=text.txt", "--model=./nowhere", "--batch=0"]) == 2
    assert capsys.readouterr().err == "liger-jax finetune: --batch=0 must be at least 1.\n"
