"""Models by name or by config.json, and how many parameters they have."""

import dataclasses
import functools
import math
import os
import pathlib
from typing import Any

import jax
from flax import nnx

from liger_jax.models import auto, checkpoint, config_json

_LLAMA_3 = dict(model_type="llama", vocab_size=128256, num_key_value_heads=8, rope_theta=500000.0)
_QWEN2 = dict(model_type="qwen2", vocab_size=152064, rope_theta=1000000.0, max_position_embeddings=131072)
_SMALL_QWEN2 = _QWEN2 | dict(vocab_size=151936, tie_word_embeddings=True)


def _sizes(width: int, inner: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    return dict(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads, **others
    )


# What config.json says of them.
MODELS: dict[str, dict[str, Any]] = {
    "llama-2-7b": dict(model_type="llama", max_position_embeddings=4096, **_sizes(4096, 11008, 32, 32)),
    "llama-3-8b": _LLAMA_3 | _sizes(4096, 14336, 32, 32, max_position_embeddings=131072),
    "llama-3-70b": _LLAMA_3 | _sizes(8192, 28672, 80, 64, max_position_embeddings=131072),
    "llama-3.2-1b": _LLAMA_3 | _sizes(2048, 8192, 16, 32, max_position_embeddings=131072, tie_word_embeddings=True),
    "llama-3.2-3b": _LLAMA_3 | _sizes(3072, 8192, 28, 24, max_position_embeddings=131072, tie_word_embeddings=True),
    "qwen2-0.5b": _SMALL_QWEN2 | _sizes(896, 4864, 24, 14, num_key_value_heads=2),
    "qwen2-1.5b": _SMALL_QWEN2 | _sizes(1536, 8960, 28, 12, num_key_value_heads=2),
    "qwen2-7b": _QWEN2 | _sizes(3584, 18944, 28, 28, num_key_value_heads=4),
    "qwen2.5-14b": _QWEN2 | _sizes(5120, 13824, 48, 40, num_key_value_heads=8),
    "qwen2-72b": _QWEN2 | _sizes(8192, 29568, 80, 64, num_key_value_heads=8),
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model that can be made, or thought of.

    Attributes:
        name: as it was asked for.
        family: its class, a `CausalLM`.
        config: what the class takes.
    """

    name: str
    family: Any
    config: Any

    def abstract(self, **options: Any) -> tuple[Any, Any]:
        """The model without its numbers.

        Args:
            **options: as the family's constructor takes them.

        Returns:
            (graph, parameters as shapes and dtypes).
        """
        make = lambda: self.family(self.config, **options, rngs=nnx.Rngs(0))
        return nnx.split(nnx.eval_shape(make))

    @functools.cached_property
    def parameters(self) -> list[tuple[Any, Any]]:
        """Path and type of every parameter, as of layers of one type: those of others have equal ones.

        Layers of one type are one stack, whatever their number; others could be made one by one.
        """
        config = self.config
        if "layer_types" in {field.name for field in dataclasses.fields(config)}:
            config = dataclasses.replace(config, layer_types=("full_attention",) * config.num_hidden_layers)
        return jax.tree_util.tree_leaves_with_path(dataclasses.replace(self, config=config).abstract()[1])

    @functools.cached_property
    def norms_results(self) -> bool:
        """Whether layers norm what attention and feed-forward give, as Gemma does from its second version on."""
        return any("post_feedforward_layernorm" in jax.tree_util.keystr(path) for path, _ in self.parameters)

    @property
    def num_parameters(self) -> int:
        """How many numbers are trained, a tied head counted once."""
        return sum(math.prod(x.shape) for _, x in self.parameters)


def architecture(name_or_path: str | os.PathLike[str]) -> Architecture:
    """A model by its name, or by a config.json of Hugging Face's, or by the folder that it is in.

    Args:
        name_or_path: one of `MODELS`, in any case; or a path.

    Returns:
        The architecture.

    Raises:
        ValueError: neither a known name nor a file, a family that is not here, or a config that its model does not
            support.

    Example:
        >>> architecture("qwen2-0.5b").num_parameters
        494032768
    """
    name = str(name_or_path)
    path = pathlib.Path(name_or_path)
    path = path / "config.json" if path.is_dir() else path
    if name.lower() in MODELS:
        values, source = MODELS[name.lower()], name
    elif path.is_file():
        values, source = checkpoint.config_values(path), path
    else:
        raise ValueError(
            f"model={name!r} is neither a file nor known. Pass the path of a config.json, or one of "
            f"{', '.join(MODELS)}."
        )
    family = auto.FAMILIES.get(values.get("model_type"))
    if family is None:
        raise ValueError(
            f"model={name!r} has model_type={values.get('model_type')!r}, which must be one of {sorted(auto.FAMILIES)}."
        )
    return Architecture(name, family, config_json.read(values, family.config_type, family.config_fixed, source))
