"""The layer of a hybrid model, which has either attention or a mixer without keys."""

from collections.abc import Callable
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from liger_jax.models.core.blocks import Blocks
from liger_jax.models.core.experts import fed
from liger_jax.models.core.feed_forward import Aux


class HybridLayer(nnx.Module):
    """h = x + mixer(norm(x)), then h + mlp(norm(h)), where the mixer is attention or has no keys."""

    recurrent: Callable[[Blocks], Any]  # makes the mixer without keys
    # By their names in a checkpoint: the norms, the mixer without keys, and the feed-forward.
    names: tuple[str, str, str, str] = ("input_layernorm", "post_attention_layernorm", "linear_attn", "mlp")

    def __init__(self, blocks: Blocks):
        norm, next_norm, recurrent, mlp = self.names
        self.is_recurrent, self.mixer = blocks.is_recurrent, recurrent if blocks.is_recurrent else "self_attn"
        setattr(self, norm, blocks.norm())
        setattr(self, self.mixer, self.recurrent(blocks) if self.is_recurrent else blocks.attention())
        setattr(self, next_norm, blocks.norm())
        setattr(self, mlp, self.feed_forward_of(blocks))

    def feed_forward_of(self, blocks: Blocks) -> Any:
        """Makes the feed-forward."""
        return blocks.mlp()

    def __call__(self, x: Float[Array, "B T D"], *attention_inputs) -> tuple[Float[Array, "B T D"], Aux]:
        names = self.names[0], self.names[1], self.mixer, self.names[3]
        norm, next_norm, mixer, mlp = (getattr(self, name) for name in names)
        _, _, rows, _, *cache = attention_inputs
        normed, x = norm.fork(x)
        mixed = mixer(normed, rows, *cache) if self.is_recurrent else mixer(normed, *attention_inputs)
        normed, x = next_norm.add(mixed, x)
        y, aux = fed(mlp, normed, rows)
        return x + y, aux
