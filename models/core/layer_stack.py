"""The layers of a decoder: how their parameters are stored, and how one layer runs after another."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from liger_jax.models.core import remat as remats
from liger_jax.models.core.cache import KVCache, LayerCache
from liger_jax.models.core.dropout import give_words
from liger_jax.models.core.feed_forward import DENSE, Aux
from liger_jax.models.core.gated_convolution import CONVOLUTION
from liger_jax.models.core.kernel_options import KernelOptions
from liger_jax.models.core.linear_attention import LINEAR
from liger_jax.models.core.parameters import stack_of_place
from liger_jax.models.core.remat import POLICIES, Mode, Remat
from liger_jax.models.core.stream import Stream, as_input
from liger_jax.ops.eager import compiled_once, is_part_of_a_program


class LayerKind(NamedTuple):
    """What a layer is made of."""

    attention: str  # the attention's kind, such as "sliding_attention". It says what the layer's inputs are.
    feed_forward: str = DENSE  # the feed-forward's kind

    @property
    def is_recurrent(self) -> bool:
        """Whether the layer has no keys, but linear attention or a convolution."""
        return self.attention in (LINEAR, CONVOLUTION)

    @property
    def structure(self) -> tuple[bool, str]:
        """What decides a layer's parameters: layers of equal structure have parameters of the same shapes."""
        return self.is_recurrent, self.feed_forward


class Decoded(NamedTuple):
    """What layers return."""

    hidden: Any  # hidden states (B, T, D), or a `Stream` with them
    # For each kind of feed-forward that returns sums over tokens, the sums of its layers, stacked along a leading axis
    # in the layers' order. It is empty where all are dense.
    aux: Aux
    cache: KVCache | None  # the cache with the tokens added; `None` without one


@dataclasses.dataclass(frozen=True)
class LayerStack:
    """Makes and runs layers: by a scan over stacked parameters, or by a Python loop.

    Layers may be of several kinds, in a pattern that repeats. The scan runs over the pattern's repetitions, and the
    layers that are left over follow in a loop. Layers with equal parameters are one stack; else each place of the
    pattern has its own. Both ways start from the same random numbers. A scan compiles its body once; it holds the
    gradients of all layers until the optimizer runs.

    The stack itself holds no parameters. The decoder holds the layers, so that the word "layers" stands only once in a
    parameter's name.
    """

    kinds: tuple[LayerKind, ...]  # the kind of each of the L layers
    scan: bool  # stack the parameters along a leading axis and scan over it
    # What a layer keeps for the backward. `"none"` keeps all but norms, gates and sums, which take one pass over memory
    # to compute again; `"full"` only its input; `"dots"` its matrix products too; `"offload"` its input, in the host's
    # memory; `"offload_attention"` attention's result there, too; a number is that of the last layers that are as with
    # `"dots"`, and the others are as with `"full"`.
    remat: Remat
    kernels: KernelOptions = KernelOptions()  # the model's options, for their layout

    def __post_init__(self):
        remats.check(self.remat, len(self.kinds))

    @property
    def modes(self) -> list[Mode]:
        """What each of the layers keeps."""
        return modes_of(self.kinds, self.remat)

    @property
    def stacked(self) -> dict[str, range]:
        """The numbers of the layers of each stack, by its name, which one stack of all does not need.

        It is empty without a scan.
        """
        if not self.scan:
            return {}
        length = pattern_length(self.kinds)
        count = len(self.kinds) - len(self.kinds) % length
        if len({kind.structure for kind in self.kinds}) == 1:
            return {"": range(count)}
        return {stack_of_place(place, length): range(place, count, length) for place in range(length)}

    def make(self, make_layer: Callable[[LayerKind, nnx.Rngs], nnx.Module], rngs: nnx.Rngs) -> tuple[Any, Any]:
        """Makes the layers.

        Returns with a scan: one layer with stacked parameters, and the layers after the scan by their numbers. If there
        are several stacks, the first is a dict of one such layer for each. Without a scan: the list of all layers, and
        an empty dict.
        """
        keys = jax.random.split(rngs.params(), len(self.kinds))
        layer_of = lambda kind, key: make_layer(kind, nnx.Rngs(key))
        layer = lambda i: layer_of(self.kinds[i], keys[i])
        if not self.scan:
            return nnx.List([layer(i) for i in range(len(keys))]), nnx.Dict({})
        stacks = {}
        for name, numbers in self.stacked.items():
            stacks[name] = nnx.vmap(functools.partial(layer_of, self.kinds[numbers[0]]))(keys[jnp.array(numbers)])
        num_stacked = sum(map(len, self.stacked.values()))
        stacked = nnx.Dict(stacks) if len(stacks) > 1 else next(iter(stacks.values()))
        return stacked, nnx.Dict({str(i): layer(i) for i in range(num_stacked, len(keys))})

    def __call__(
        self,
        layers: Any,
        last_layers: Mapping[str, nnx.Module],
        x: Float[Array, "B T D"] | Stream,
        inputs: Mapping[str, Sequence[Any]],
        cache: KVCache | None = None,
        *,
        gathered: Callable[[Any, Any], Any] | None = None,
        dropout_words: Any = None,
    ) -> Decoded:
        """Runs the layers. Each takes hidden states and its inputs, and returns hidden states and aux.

        `inputs`: for each kind of attention, a layer's arguments after the hidden states. `gathered`: makes a layer's
        parameters what the layer computes with, from them and the computation's dtype; `None` for the layout's
        `gathered`.
        """
        is_new = cache is not None and cache.is_known_empty()
        if gathered is not None or is_part_of_a_program():
            gathered = self.kernels.mesh_layout.gathered if gathered is None else gathered
            return self._run(layers, last_layers, x, inputs, cache, gathered, dropout_words, is_new)
        graphdef, state = nnx.split((layers, last_layers))
        leaves, tree = jax.tree.flatten(inputs)
        is_array = [isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves]
        numbers = tuple(None if known else leaf for known, leaf in zip(is_array, leaves, strict=True))
        arrays = [leaf if known else None for known, leaf in zip(is_array, leaves, strict=True)]
        return _decoded(_Call(self, graphdef, tree, numbers, is_new), state, x, arrays, cache, dropout_words)

    def _run(
        self,
        layers: Any,
        last_layers: Mapping[str, nnx.Module],
        x: Any,
        inputs: Mapping[str, Sequence[Any]],
        cache: KVCache | None,
        gathered: Callable[[Any, Any], Any],
        dropout_words: Any,
        is_new: bool,
    ) -> Decoded:
        """The call, with all static inputs."""
        made = _made_by(gathered, dropout_words)
        # Without a cache the scan carries hidden states alone.
        none_yet = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        carry = (x, None if cache is None else (cache, none_yet))
        sums: dict[str, list[Any]] = {}  # for each feed-forward, trees of its layers' sums, stacked
        first = 0
        # One token reads each weight once, and a scan would first copy each layer's weights and cache out of the stack.
        if self.scan and (cache is None or x.shape[1] > 1):
            carry, sums = self._scanned(layers, carry, inputs, made, is_new)
            first = sum(map(len, self.stacked.values()))
        calls: dict[Any, Any] = {}  # one function for equal layers: JAX traces and lowers it once
        for i, mode in [*enumerate(self.modes)][first:]:
            kind, (graphdef, state) = self.kinds[i], self._split(layers, last_layers, i)
            if (own := (kind, mode, graphdef)) not in calls:
                calls[own] = self._layer_call(*own, inputs, made, is_new, prevent_cse=True)
            carry, aux = calls[own](carry, state)
            sums.setdefault(kind.feed_forward, []).append(jax.tree.map(lambda leaf: leaf[None], aux))
        x, memory = carry
        joined = {kind: jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *trees) for kind, trees in sums.items()}
        aux = {kind: tree for kind, tree in joined.items() if jax.tree.leaves(tree)}
        return Decoded(x, aux, None if memory is None else memory[0])

    def _split(self, layers: Any, last_layers: Mapping[str, nnx.Module], number: int) -> tuple[Any, Any]:
        """The graph and the state of one layer; that of a stacked layer is a slice."""
        if not self.scan:
            return nnx.split(layers[number])
        for name, numbers in self.stacked.items():
            if number in numbers:
                graphdef, state = nnx.split(layers[name] if name else layers)
                return graphdef, jax.tree.map(operator.itemgetter(numbers.index(number)), state)
        # By number: nnx.Dict sorts by name, and nnx.tabulate leaves a separate name among them.
        return nnx.split(last_layers[str(number)])

    def _layer_call(
        self,
        kind: LayerKind,
        mode: Mode,
        graphdef: Any,
        inputs: Mapping[str, Sequence[Any]],
        made: Callable[[Any, Any, Any], Any],
        is_new: bool,
        *,
        prevent_cse: bool,
        read: Callable[[Any], Any] = lambda state: state,
    ) -> Callable[[Any, Any], Any]:
        """One layer's (carry, state) → (carry, aux). `read` takes its state out of one that holds more."""
        own_inputs = inputs[kind.attention]

        def call(carry, state):
            x, memory = carry
            state = read(state)  # inside the checkpoint, so that the slice is not kept for the backward
            layer, x = made(graphdef, state, x.dtype), as_input(x)
            if mode != remats.mode_of_first(self.remat):
                _set_mode(layer, mode)
            if memory is None:
                x, aux = layer(x, *own_inputs)
                return (x, None), aux
            cache, earlier = memory  # how many layers there were with keys, and without
            own = LayerCache(cache, earlier[kind.is_recurrent], is_new)
            x, aux = layer(x, *own_inputs, own)
            earlier = tuple(number + int(i == kind.is_recurrent) for i, number in enumerate(earlier))
            return (x, (own.cache, earlier)), aux

        if mode == "none" and "mosaic_tpu:interpret" in (self.kernels.implementation or ()):
            return call  # JAX's TPU interpreter has effects, which jax.checkpoint refuses
        return jax.checkpoint(call, prevent_cse=prevent_cse, policy=POLICIES[mode])

    def _scanned(
        self,
        layers: Any,
        carry: Any,
        inputs: Mapping[str, Sequence[Any]],
        made: Callable[[Any, Any, Any], Any],
        is_new: bool,
    ) -> tuple[Any, dict[str, list[Any]]]:
        """The carry after the stacked layers, and for each feed-forward a list of one tree of its layers' sums."""
        pattern, mode = self.kinds[: pattern_length(self.kinds)], remats.mode_of_first(self.remat)
        if isinstance(self.remat, int) and carry[1] is None:  # with a cache nothing is kept for a backward
            return self._in_two_loops(layers, pattern, carry, inputs, made)
        graphdefs, groups = {}, {}
        for name in self.stacked:
            graphdefs[name], state = nnx.split(layers[name] if name else layers)
            in_groups = lambda leaf: leaf.reshape(-1, len(pattern), *leaf.shape[1:])
            groups[name] = state if name else jax.tree.map(in_groups, state)
        # The scan's loop already separates the recomputation from the forward, so no barriers are needed.
        calls = []
        for i, (name, kind) in enumerate(zip(itertools.cycle(groups), pattern, strict=False)):
            place = {} if name else dict(read=functools.partial(jax.tree.map, operator.itemgetter(i)))
            call = self._layer_call(kind, mode, graphdefs[name], inputs, made, is_new, prevent_cse=False, **place)
            calls.append((name, kind, call))

        def group(carry, states):
            sums: dict[str, list[Any]] = {}
            for name, kind, call in calls:
                carry, aux = call(carry, states[name])
                sums.setdefault(kind.feed_forward, []).append(aux)
            return carry, {kind: jax.tree.map(lambda *leaves: jnp.stack(leaves), *of) for kind, of in sums.items()}

        carry, sums = jax.lax.scan(group, carry, groups)
        return carry, {kind: [jax.tree.map(_in_a_row, tree)] for kind, tree in sums.items()}

    def _in_two_loops(
        self,
        layers: Any,
        pattern: tuple[LayerKind, ...],
        carry: Any,
        inputs: Mapping[str, Sequence[Any]],
        made: Callable[[Any, Any, Any], Any],
    ) -> tuple[Any, dict[str, list[Any]]]:
        """The same by two loops: over the layers that are computed again, and over those that keep their products.

        A slice of the stack for each loop would copy the weights, and two stacks of gradients would be copied into one.
        So each loop reads a layer's parameters out of the whole stack, by the layer's number. Their gradients take
        another way: the loops hand on the stack, which no layer reads, and in the backward it is the stack of
        gradients, into which each layer writes its own.
        """
        graphdefs, stacks = {}, {}
        for name in self.stacked:
            graphdefs[name], stacks[name] = nnx.split(layers[name] if name else layers)
        values, length = jax.lax.stop_gradient(stacks), len(pattern)
        modes = self.modes[: sum(map(len, self.stacked.values())) : length]
        carry, sums = (carry, stacks), {}
        for mode in ("full", "dots"):
            layer_call = functools.partial(self._layer_call, prevent_cse=False, read=_read_by_number)
            calls = [
                (name, kind, layer_call(kind, mode, graphdefs[name], inputs, made, False))
                for name, kind in zip(itertools.cycle(stacks), pattern, strict=False)
            ]

            def group(carry, number, calls=calls):
                (carry, stacks), sums = carry, {}
                for i, (name, kind, call) in enumerate(calls):
                    place = number if name else number * length + i
                    leaves, tree = jax.tree.flatten(stacks[name])
                    handed_on = [_handed_on(leaf, place) for leaf in leaves]
                    stacks[name], own = (jax.tree.unflatten(tree, part) for part in zip(*handed_on, strict=True))
                    carry, aux = call(carry, (values[name], own, place))
                    sums.setdefault(kind.feed_forward, []).append(aux)
                stacked = {kind: jax.tree.map(lambda *leaves: jnp.stack(leaves), *of) for kind, of in sums.items()}
                return (carry, stacks), stacked

            numbers = jnp.array([number for number, own in enumerate(modes) if own == mode], jnp.int32)
            if len(numbers):
                carry, of_loop = jax.lax.scan(group, carry, numbers)
                for kind, tree in of_loop.items():
                    sums.setdefault(kind, []).append(jax.tree.map(_in_a_row, tree))
        return carry[0], sums


def _in_a_row(leaf: jax.Array) -> jax.Array:
    """Merges the axes of groups and of their layers."""
    return leaf.reshape(-1, *leaf.shape[2:])


@jax.custom_vjp
def _handed_on(stack: jax.Array, number: Any) -> tuple[jax.Array, jax.Array]:
    """The stack, and the slot of one layer's gradient, whose values nobody reads."""
    return stack, jax.lax.dynamic_index_in_dim(stack, number, keepdims=False)


def _handed_on_backward(number, gradients):
    of_stack, own = gradients
    return jax.lax.dynamic_update_index_in_dim(of_stack, own, number, 0), None


_handed_on.defvjp(lambda stack, number: (_handed_on(stack, number), number), _handed_on_backward)


@jax.custom_vjp
def _with_gradient_of(value: jax.Array, slot: jax.Array) -> jax.Array:
    """The value, whose gradient goes to the slot."""
    return value


_with_gradient_of.defvjp(lambda value, slot: (value, None), lambda _, gradient: (None, gradient))


def _read_by_number(state: tuple[Any, Any, Any]) -> Any:
    """One layer's parameters, from all of them, the slots of its gradients, and its number."""
    stack, slots, number = state
    read = lambda leaf, slot: _with_gradient_of(jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False), slot)
    return jax.tree.map(read, stack, slots)


class _Call(NamedTuple):
    """The static inputs of a stack's program."""

    stack: LayerStack
    graphdef: Any  # of the layers and the last layers
    tree: Any  # of the inputs
    numbers: tuple[Any, ...]  # of the inputs' leaves, those that are no arrays; `None` for an array
    is_new: bool  # whether the cache is known to be empty


@functools.partial(compiled_once, static_argnums=0)
def _decoded(call: _Call, state, x, arrays, cache, dropout_words) -> Decoded:
    leaves = [number if array is None else array for number, array in zip(call.numbers, arrays, strict=True)]
    inputs = jax.tree.unflatten(call.tree, leaves)
    gathered = call.stack.kernels.mesh_layout.gathered
    layers, last_layers = nnx.merge(call.graphdef, state)
    return call.stack._run(layers, last_layers, x, inputs, cache, gathered, dropout_words, call.is_new)


def _made_by(gathered: Callable[[Any, Any], Any], dropout_words: Any) -> Callable[[Any, Any, Any], Any]:
    """Makes a layer of its graph and its state, as it computes in a dtype."""

    def made(graphdef, state, dtype):
        layer = nnx.merge(graphdef, gathered(state, dtype))
        if dropout_words is not None:
            give_words(layer, dropout_words)
        return layer

    return made


def _set_mode(layer: nnx.Module, mode: Mode) -> None:
    """Tells the blocks of a layer that was just merged what it keeps, in place."""
    blocks: list[Any] = [node for _, node in nnx.iter_graph(layer) if hasattr(node, "remat")]
    for block in blocks:
        block.remat = mode


def kinds_of(config: Any) -> tuple[LayerKind, ...]:
    """The kinds of an architecture's layers."""
    return tuple(LayerKind(config.attention_of(i), config.feed_forward_of(i)) for i in range(config.num_hidden_layers))


def modes_of(kinds: Sequence[Any], remat: Remat) -> list[Mode]:
    """What each layer keeps. A number of layers is taken down to whole repetitions of the layers' pattern, and to the
    layers that are left over after the last one.
    """
    if not isinstance(remat, int):
        return [remat] * len(kinds)
    first, length = len(kinds) - remat, pattern_length(kinds)
    whole = len(kinds) - len(kinds) % length
    first = min(-(-first // length) * length, whole) if first < whole else first
    return [*itertools.repeat("full", first), *itertools.repeat("dots", len(kinds) - first)]


def pattern_length(kinds: Sequence[Any]) -> int:
    """The length of the shortest pattern that gives these kinds when it is repeated; the last one may be incomplete."""
    return next(n for n in range(1, len(kinds) + 1) if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
