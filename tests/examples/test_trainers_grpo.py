"""The example of `trainers.grpo`: a model of letters learns to write the one that its prompt names."""

import numpy as np
import pytest
from tokenizers import Tokenizer

from examples import trainers_grpo


def test_its_tokens_are_characters_and_its_reward_is_the_share_of_a_letter(tmp_path):
    trainers_grpo.make_model(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("write c:").ids
    assert len(ids) == 8 and tokenizer.decode(ids) == "write c:"
    assert trainers_grpo.named_letter(["cc", "ac", ""], ["c", "c", "a"]) == [1.0, 0.5, 0.0]


@pytest.mark.full
def test_the_named_letter_becomes_likelier(tmp_path, capsys):
    rewards = trainers_grpo.main(["--steps=80", f"--out={tmp_path}"])
    assert np.mean(rewards[:8]) < 0.2 and np.mean(rewards[-8:]) > 0.8
    assert (tmp_path / "grpo.png").stat().st_size and "mean reward: 0." in capsys.readouterr().out
