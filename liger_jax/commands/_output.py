"""What a run leaves behind: a folder that transformers loads as it is."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from liger_jax.commands._errors import UserError
from liger_jax.commands.finetune import Settings
from liger_jax.models.hugging_face import checkpoint
from liger_jax.models.lora import merge_lora, save_adapters


def write(model: Any, settings: Settings, source: Path, stops: Sequence[int]) -> Path:
    """Writes weights or adapters, the tokenizer's files with the chat template, and the generation config.

    Args:
        model: the trained model.
        settings: the run; they say whether weights or adapters are written, and where.
        source: folder of the model that was tuned.
        stops: the tokens that end a text.

    Returns:
        The folder, OUT/model or OUT/adapters.

    Raises:
        UserError: something cannot be written.
    """
    only_adapters = settings.lora is not None and not settings.merge
    folder = Path(settings.out) / ("adapters" if only_adapters else "model")
    generation = _generation(model.kept, stops)
    try:
        if only_adapters:
            base = str(source.resolve()) if Path(settings.model).is_dir() else settings.model
            save_adapters(model, folder, base_model=base)
            files = checkpoint.tokenizer_files(source)
            files[checkpoint.GENERATION] = None if generation is None else generation.encode()
            for name, content in files.items():
                if content is not None:
                    (folder / name).parent.mkdir(exist_ok=True)
                    (folder / name).write_bytes(content)
            return folder
        if settings.lora is not None:
            merge_lora(model)
        model.kept = dataclasses.replace(model.kept, generation=generation)
        has_eos = json.loads(model.kept.config).get("eos_token_id") is not None
        fields = None if has_eos or not stops else {"eos_token_id": stops[0]}
        model.save_pretrained(folder, tokenizer_from=source, config_fields=fields)
    except OSError as error:
        raise UserError(f"The result cannot be written to {folder}: {error}. The checkpoint stays.") from error
    return folder


def _generation(kept: checkpoint.Kept, stops: Sequence[int]) -> str | None:
    """The text of generation_config.json, whose `eos_token_id` are all tokens that end a text."""
    if not stops or kept.generation is not None and set(stops) <= set(kept.stops):
        return kept.generation
    config = json.loads(kept.config)
    starts = {name: config[name] for name in ("bos_token_id", "pad_token_id") if config.get(name) is not None}
    values = json.loads(kept.generation) if kept.generation is not None else starts
    values["eos_token_id"] = list(stops) if len(stops) > 1 else stops[0]
    return json.dumps(values, indent=2) + "\n"
