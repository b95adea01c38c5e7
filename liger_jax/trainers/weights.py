"""Checks that a model's weights are there, before anything is traced."""

from liger_jax.models.hugging_face.checkpoint import why_no_weights
from liger_jax.models.hugging_face.source import Source
from liger_jax.user_errors import UserError, of_option

_CURE = (
    "Pass a whole checkpoint. For random weights, write them first, by save_pretrained of a model's class, such as "
    "Qwen2ForCausalLM(config, rngs=nnx.Rngs(0))."
)


def check(flag: str, source: Source) -> None:
    """Refuses a model without the files of its weights."""
    if why := why_no_weights(source.folder):
        with of_option(flag):
            source.config  # noqa: B018 the folder of a run says which one is meant
        raise UserError(f"{flag}: {source.folder} {why} {_CURE}")
