"""A folder of adapters in the place of a checkpoint: it names the model that the adapters belong to."""

from liger_jax.models.core.config_fields import short
from liger_jax.models.hugging_face import config_json
from liger_jax.models.hugging_face.checkpoint import ADAPTERS, own_file
from liger_jax.models.hugging_face.source import Source, find


def is_adapted(source: Source) -> bool:
    """Whether a folder holds adapters. As in transformers, these count before a model in the same folder."""
    return (source.folder / ADAPTERS.config).exists()


def base_of(source: Source) -> tuple[Source, str]:
    """The model that adapters belong to, by `base_model_name_or_path`.

    Returns the model's folder, and the path or id that names it. A tokenizer and a generation_config.json beside the
    adapters take the place of the model's.
    """
    path = source.folder / ADAPTERS.config
    file = own_file(source.folder, ADAPTERS.config)
    values = {} if file is None else config_json.loads(file.read_bytes(), path)
    name, revision = values.get("base_model_name_or_path"), values.get("revision")
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"{path}: base_model_name_or_path={short(name)} must name the model that the adapters belong to. Load that "
            "model, and load_adapters(model, folder)."
        )
    if revision not in (None, "main"):
        raise ValueError(
            f"{path}: revision={short(revision)} of {short(name)}, and only the main one is fetched. Load that model "
            "from a folder, and load_adapters(model, folder)."
        )
    try:
        base = find(name)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{source.folder} holds adapters for the model {short(name)}, which was not found: {error}"
        ) from error
    if is_adapted(base):
        raise ValueError(
            f"{path}: base_model_name_or_path={short(name)} is a folder of adapters and not a model. Merge them."
        )
    if any(source.tokenizer.values()):
        base.tokenizer = source.tokenizer
    if source.generation is not None:
        base.generation = source.generation
    return base, name
