"""A line that a model is to answer: a prompt, or messages."""

from typing import Any

from liger_jax.commands import _messages
from liger_jax.commands._document import Document
from liger_jax.commands._errors import UserError

_ANSWER = {"role": "assistant", "content": "."}  # follows messages while they are checked


def document(where: str, values: Any) -> Document:
    """What a line asks of a model."""
    fields = values if isinstance(values, dict) else {}
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if isinstance(prompt, str):
        return Document(where, prompt)
    asked = prompt if isinstance(prompt, list) else messages
    if not isinstance(asked, list):
        raise UserError(f"{where}, must hold an object with a prompt, which is a text, or with messages.")
    try:
        messages = _messages.messages({"messages": [*asked, _ANSWER]})[:-1]
        tools = _messages.tools(fields.get("tools"))
        more = _messages.template_values(fields.get(_messages.VALUES))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if not messages or messages[-1]["role"] == "assistant":
        raise UserError(f"{where}: the last message must be one that the assistant answers.")
    return Document(where, messages=messages, tools=tools, values=more)
