"""A checkpoint whose tokens are the words "0", "1", "2" and so on, as commands read it."""

import json
from pathlib import Path
from typing import Any

from flax import nnx
from tokenizers import Tokenizer, models, pre_tokenizers


def write_checkpoint(folder: Path, graph: Any, params: Any, end: int) -> Path:
    """Writes a model and its tokenizer.

    Args:
        folder: where they go.
        graph: the model's structure; its vocabulary has `end` + 1 entries.
        params: its parameters.
        end: the token that ends a text. Those before it are numbers.

    Returns:
        The folder.
    """
    nnx.merge(graph, params).save_pretrained(folder, config_fields={"eos_token_id": end})
    words = {str(number): number for number in range(end)} | {"<end>": end}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder
