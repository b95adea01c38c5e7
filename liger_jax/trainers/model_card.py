"""The model card beside a result, README.md as the hub's pages show it, and the result's way to the hub."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import flax
import jax
import optax

from liger_jax._install import version
from liger_jax.trainers import result
from liger_jax.trainers.options import Settings
from liger_jax.training.waiting import telling
from liger_jax.user_errors import UserError

FILE = "README.md"
_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def text(settings: Settings, figures: str, *, precision: dict[str, str], devices: str, chats: bool) -> str:
    """A card: the hub's fields, how to load the model, the recipe, figures and versions.

    `figures`: what the run has changed, in words. `precision`: dtypes by name. `devices`: those of the run, in words.
    No path of this machine is in it.
    """
    adapters, recipe = result.only_adapters(settings), settings.recipe
    base, command = settings.placement.model, settings.method.command
    data = [name.rpartition("=")[0] or name for name in settings.rows.data]
    sets = [name for name in data if _is_id(name) and name not in settings.rows.rows]
    fields = {
        "library_name": "peft" if adapters else "transformers",
        "pipeline_tag": "text-generation",
        **({"base_model": base} if _is_id(base) else {}),
        **({"datasets": sets} if sets else {}),
        "tags": ["liger-jax", command, *(["lora"] if settings.adapters.lora is not None else [])],
    }
    length = f"{recipe.steps:,} steps" if recipe.steps else f"{recipe.epochs_to_train:g} epochs"
    rows = {
        "method": f"liger-jax {command}",
        "base model": _shown(base),
        "data": ", ".join(map(_shown, data)),
        "length of a row, batch": f"{settings.rows.length:,} tokens, {recipe.batch:,}{', packed' * settings.rows.pack}",
        "duration": length,
        "optimizer": f"{recipe.optimizer}, peak rate {settings.peak_rate:.1e}, schedule {recipe.schedule}, "
        f"weight decay {recipe.weight_decay:g}",
        **({"adapters": f"rank {settings.adapters.lora}"} if settings.adapters.lora is not None else {}),
        **({"quantized base": settings.placement.quantize} if settings.placement.quantize else {}),
        "dtypes": f"computation {precision['dtype']}, weights {precision['param_dtype']}",
        "seed": f"{recipe.seed}",
        "figures": figures,
        "devices": devices,
        "versions": f"liger-jax {version()}, JAX {jax.__version__}, Flax {flax.__version__}, optax {optax.__version__}",
    }
    head = "\n".join(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items())
    table = "\n".join(f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in rows.items())
    model = "AutoPeftModelForCausalLM" if adapters else "AutoModelForCausalLM"
    package = "peft" if adapters else "transformers"
    talk = "chat --model FOLDER" if chats else "generate --model FOLDER --prompt 'Once upon a time'"
    return f"""---
{head}
---

# {_shown(base)}, trained by liger-jax {command}

With this folder, or the id under which it is on the hub, in the place of FOLDER:

```python
from {package} import {model}
from transformers import AutoTokenizer

model = {model}.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```

or `liger-jax {talk}`. The licence is that of the base model and of the data.

| | |
|---|---|
{table}
"""


def write(target: Path, content: str) -> None:
    """Writes a card."""
    try:
        (target / FILE).write_text(content, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{target / FILE} cannot be written: {error.strerror}. The checkpoint stays.") from error


def check_push(repository: str) -> None:
    """Checks before a run that its result can be handed to the hub."""
    _at_hub(repository, "", lambda hub: hub.whoami())


def push(repository: str, target: Path) -> str:
    """Hands a result to the hub, into a repository that is private if it is new. Returns its address."""

    def work(hub: Any) -> str:
        hub.create_repo(repository, private=True, exist_ok=True)
        return str(hub.upload_folder(repo_id=repository, folder_path=target, commit_message="A run of liger-jax"))

    with telling(f"pushing {target} to {repository}"):
        return _at_hub(
            repository, f" The result stays in {shlex.quote(str(target))}; the same command pushes it.", work
        )


def _at_hub(repository: str, left: str, work: Any) -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise UserError(f"--push={repository} needs huggingface_hub: pip install huggingface_hub.{left}") from error
    try:
        return work(HfApi())
    except Exception as error:  # whatever the package, the network and its account may raise
        said = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"--push={repository}: {said}. Log in by hf auth login, or set HF_TOKEN.{left}") from error


def _is_id(name: str) -> bool:
    """Whether a name is that of a model or dataset on the hub."""
    return _ID.fullmatch(name) is not None and not Path(name).exists()


def _shown(name: str) -> str:
    """A name without folders of this machine."""
    return name if _is_id(name) or " " in name else Path(name).name
