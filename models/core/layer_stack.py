"""The layers of a decoder: how their parameters lie in memory, and how one layer runs after another."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from liger_jax.models.core.cache import KVCache, LayerCache
from liger_jax.models.core.kernel_options import KernelOptions
from liger_jax.models.core.remat import INPUT, POLICIES, Remat


@dataclasses.dataclass(frozen=True)
class LayerStack:
    """Makes and runs layers with parameters of equal shapes: by a scan over stacked parameters, or by a Python loop.

    Layers may be of several kinds, in a pattern that repeats. The scan runs over the pattern's repetitions. The layers
    that are left over follow in a loop. Both ways start from the same random numbers. A scan compiles its body
    once; it holds the gradients of all layers until the optimizer runs.

    The stack itself holds no parameters. The decoder holds the layers, so that the word "layers" stands only once in a
    parameter's name.

    Args:
        kinds: the kind of each of the L layers.
        scan: stack the parameters along a leading axis and scan over it.
        remat: what a layer keeps for the backward. `"none"` keeps all but norms, gates and sums, which take one pass
            over memory to compute again; `"full"` only its input; `"dots"` its matrix products too; `"offload"` its
            input, in the host's memory.
        kernels: the model's options, for their layout.

    Raises:
        ValueError: `remat` is unknown.
    """

    kinds: tuple[str, ...]
    scan: bool
    remat: Remat
    kernels: KernelOptions = KernelOptions()

    def __post_init__(self):
        if self.remat not in POLICIES:
            raise ValueError(f"remat={self.remat!r} must be one of {list(POLICIES)}.")

    def make(self, make_layer: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs) -> tuple[Any, Any]:
        """Makes the layers.

        Args:
            make_layer: makes one layer from its `rngs`.
            rngs: source of the layers' keys.

        Returns:
            With a scan: one layer with stacked parameters, and the layers after the scan by their numbers. Without:
            the list of all layers, and an empty dict.
        """
        keys = jax.random.split(rngs.params(), len(self.kinds))
        if not self.scan:
            return nnx.List([make_layer(nnx.Rngs(key)) for key in keys]), nnx.Dict({})
        num_stacked = len(keys) - len(keys) % max(pattern_length(self.kinds), 1)
        stacked = nnx.vmap(lambda key: make_layer(nnx.Rngs(key)))(keys[:num_stacked])
        return stacked, nnx.Dict({str(i): make_layer(nnx.Rngs(keys[i])) for i in range(num_stacked, len(keys))})

    def __call__(
        self,
        layers: Any,
        last_layers: Mapping[str, nnx.Module],
        x: Float[Array, "B T D"],
        inputs: Mapping[str, Sequence[Any]],
        cache: KVCache | None = None,
    ) -> Any:
        """Runs the layers.

        Args:
            layers: as `make` returns them.
            last_layers: as `make` returns them.
            x: hidden states.
            inputs: for each kind of layer, its arguments after the hidden states.
            cache: the key-value cache; each layer reads and writes its own part of it. `None` for no cache.

        Returns:
            Hidden states; with a cache these and the cache.
        """
        # Without a cache the scan carries hidden states alone.
        carry = (x, None if cache is None else (cache, jnp.zeros((), jnp.int32)))
        if self.scan:
            carry = self._scanned(layers, carry, inputs)
            unrolled = [(i, last_layers[str(i)]) for i in sorted(map(int, last_layers))]  # nnx.Dict sorts by name
        else:
            unrolled = enumerate(layers)
        calls: dict[Any, Any] = {}  # one function for equal layers: JAX traces and lowers it once
        for i, layer in unrolled:
            kind, (graphdef, state) = self.kinds[i], nnx.split(layer)
            if (kind, graphdef) not in calls:
                calls[kind, graphdef] = self._layer_call(graphdef, inputs[kind], prevent_cse=True)
            carry = calls[kind, graphdef](carry, state)
        x, memory = carry
        return x if memory is None else (x, memory[0])

    def _layer_call(
        self, graphdef: Any, inputs: Sequence[Any], *, prevent_cse: bool, place: int | None = None
    ) -> Callable[[Any, Any], Any]:
        """One layer's call on (carry, state). With a `place`, the state holds its whole group of layers."""

        def call(carry, state):
            x, memory = carry
            if place is not None:  # inside the checkpoint, so that the slice is not kept for the backward
                state = jax.tree.map(lambda leaf: leaf[place], state)
            whole = self.kernels.mesh_layout.gathered(state, x.dtype)
            layer, x = nnx.merge(graphdef, whole), checkpoint_name(x, INPUT)
            if memory is None:
                return layer(x, *inputs), None
            cache, number = memory
            own = LayerCache(cache, number)
            x = layer(x, *inputs, own)
            return x, (own.cache, number + 1)

        if self.remat == "none" and "mosaic_tpu:interpret" in (self.kernels.implementation or ()):
            return call  # JAX's TPU interpreter has effects, which jax.checkpoint refuses
        return jax.checkpoint(call, prevent_cse=prevent_cse, policy=POLICIES[self.remat])

    def _scanned(self, layers: Any, carry: Any, inputs: Mapping[str, Sequence[Any]]) -> Any:
        """The carry after the stacked layers."""
        pattern = self.kinds[: pattern_length(self.kinds)]
        graphdef, stacked = nnx.split(layers)
        # The scan's loop already separates the recomputation from the forward, so no barriers are needed.
        calls = [self._layer_call(graphdef, inputs[kind], prevent_cse=False, place=i) for i, kind in enumerate(pattern)]
        groups = jax.tree.map(lambda leaf: leaf.reshape(-1, len(pattern), *leaf.shape[1:]), stacked)

        def group(carry, states):
            for call in calls:
                carry = call(carry, states)
            return carry, None

        return jax.lax.scan(group, carry, groups)[0]


def pattern_length(kinds: Sequence[str]) -> int:
    """The length of the shortest pattern that gives these kinds when repeated; the last repetition may be incomplete.

    Args:
        kinds: the kind of each layer.

    Returns:
        A number from 1 to `len(kinds)`.

    Example:
        >>> pattern_length("aabaabaa"), pattern_length("aab"), pattern_length("aaaa")
        (3, 3, 1)
    """
    return next(n for n in range(1, len(kinds) + 1) if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
