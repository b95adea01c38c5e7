"""Generated texts and conversations in a terminal."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from liger_jax.chat import strict_json
from liger_jax.commands._generation import Generation
from liger_jax.commands._text_generator import TextGenerator
from liger_jax.data import file_rows, files, formats
from liger_jax.data.reading import Document
from liger_jax.user_errors import UserError, in_one_line, is_text

_NEW = "/new"
_JSON_LINES = (".jsonl", ".ndjson")


def generate(options: Generation, prompt: str | None, file: str | None, chat: bool) -> int:
    """Prints the continuation of each prompt, which are messages for `chat`. Returns the exit code, 0."""
    documents = [Document("--prompt", prompt or "")] if file is None else list(_prompts(Path(file)))
    if chat:
        documents = [_as_conversation(document, options.system) for document in documents]
    generator = TextGenerator(options)
    if any(document.messages is not None for document in documents):
        generator.check_template()
    for document in documents:
        if len(documents) > 1:
            print(f"── {document.where}")
        _printed(generator, document)
    return 0


def chat(options: Generation) -> int:
    """Answers one line after another, until the input ends. Returns the exit code, 0."""
    generator = TextGenerator(options)
    generator.check_template()
    beginning = _system(options.system)
    messages = list(beginning)
    for line in _lines():
        if line == _NEW:
            messages = list(beginning)
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            answer = _printed(generator, Document("The conversation", messages=asked), stoppable=True)
        except UserError as error:
            print(f"{in_one_line(error)} {_NEW} begins another conversation.", file=sys.stderr)
            continue
        messages = [*asked, {"role": "assistant", "content": answer.strip()}]
    return 0


def _prompts(path: Path) -> Iterator[Document]:
    """The prompts of a file: its text without the last line's end, or what the lines of JSON hold."""
    if not path.is_file():
        raise UserError(f"--file={path} is not a file.")
    (text,) = files.read_texts(str(path)).values()
    if path.suffix.lower() not in _JSON_LINES:
        yield Document(str(path), text.removesuffix("\n"))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _prompt(f"{path}, line {number}", line)


def _prompt(where: str, line: str) -> Document:
    try:
        values = strict_json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}, {file_rows.why_no_json(error)}.") from error
    return formats.prompt(where, values)


def _lines() -> Iterator[str]:
    """The lines that are typed, without empty ones."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  lines can be edited then; Windows has none
    if sys.stdin is None:  # the input was closed
        return
    if (reconfigure := getattr(sys.stdin, "reconfigure", None)) is not None:
        reconfigure(errors="surrogateescape")  # so that other lines are read after one that is not text
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if not is_text(line):
            print(f"This line is no {sys.stdin.encoding} text, and is left out: {ascii(line)[:80]}", file=sys.stderr)
        elif line:
            yield line


def _printed(generator: TextGenerator, document: Document, stoppable: bool = False) -> str:
    """Prints a text in pieces as they are generated, then its figures, and returns the text. Ctrl-C may end it."""
    said: list[str] = []
    try:
        for text in generator.generate(document):
            said.append(text)
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        if not stoppable:
            raise
    finally:
        if said:
            print(flush=True)
    if generator.figures:
        print(generator.figures, file=sys.stderr)
    return "".join(said)


def _as_conversation(document: Document, system: str | None) -> Document:
    if document.messages is not None:
        return document
    return Document(document.where, messages=[*_system(system), {"role": "user", "content": document.text}])


def _system(text: str | None) -> list[dict[str, Any]]:
    return [] if text is None else [{"role": "system", "content": text}]
