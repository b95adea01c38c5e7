"""A check of config.json against the tensors' shapes, before a model is made: the number of layers and of tokens."""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

from liger_jax.models.core.config_fields import short
from liger_jax.models.hugging_face.weights import EMBEDDING

_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


def check(config: Any, shapes: Mapping[str, tuple[int, ...]], folder: pathlib.Path) -> None:
    """Raises an error if a config does not belong to these tensors.

    `weights.read` compares all other names and shapes with the model's own.
    """
    wrong, count = [], config.num_hidden_layers
    layers = sorted({int(match[1]) for match in map(_LAYER.match, shapes) if match})
    if layers != list(range(count)):
        wrong.append(f"num_hidden_layers={count}, and the tensors are of {len(layers)} layers: {short(layers)}")
    if EMBEDDING in shapes and shapes[EMBEDDING][:1] != (config.vocab_size,):
        wrong.append(f"vocab_size={config.vocab_size}, and {EMBEDDING} has the shape {shapes[EMBEDDING]}")
    if wrong:
        raise ValueError(
            f"from_pretrained: config.json of {folder} says {'; '.join(wrong)}. Does it belong to these weights?"
        )
