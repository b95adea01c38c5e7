"""A tokenizer's chat templates and special tokens by name, and which template is a conversation's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from liger_jax.user_errors import UserError


def by_name(places: Sequence[Any], folder: Path) -> dict[str, str]:
    """The chat templates of the first file that has some."""
    templates = next((place for place in places if place), None)
    if isinstance(templates, str):
        templates = {"default": templates}
    elif isinstance(templates, list):  # several by name
        if not all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in templates):
            raise UserError(
                f"The chat_template of the tokenizer in {folder} is a list, and must then be of objects, each with a "
                "name and a template."
            )
        templates = {each["name"]: each.get("template") for each in templates}
    templates = templates if isinstance(templates, dict) else {}
    return {name: each for name, each in templates.items() if isinstance(name, str) and isinstance(each, str)}


def chosen(sources: dict[str, str], tools: Any, folder: Path) -> str:
    """The template for a conversation: "tool_use" where there are tools and such a template, else "default"."""
    name = "tool_use" if tools is not None and "tool_use" in sources else "default"
    if name in sources:
        return sources[name]
    if sources:
        raise UserError(
            f"The tokenizer in {folder} has the chat templates {', '.join(sorted(sources))}, and none is the "
            "default. Put the one to take into chat_template.jinja there."
        )
    raise UserError(
        f"The data has messages, and the tokenizer in {folder} has no chat template. Take an instruct "
        "model's, or put one into chat_template.jinja there."
    )


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The special tokens by name, each a string or an object with `content`."""
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[name] = value
    return tokens
