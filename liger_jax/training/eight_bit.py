"""AdamW with a state in 8 bits: two bytes per parameter and a scale for each block of 256, in place of eight bytes."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax.models.core.parallel.parameter_shards import sharding_like
from liger_jax.models.core.parameters import is_matrix
from liger_jax.ops.layout import devices_along, full_spec, is_explicit, named_sharding
from liger_jax.ops.place import place_of
from liger_jax.training import dynamic_code as code
from liger_jax.training.rounding import check_numbers, check_rate

MIN_SIZE = 4096  # as in bitsandbytes: smaller arrays take little memory, and some of them are sensitive to rounding
MIN_WIDTH = 16  # of the last axis: in narrower arrays a scale would serve very few numbers
BLOCK_SIZE = 256  # as in bitsandbytes
_LARGEST = 2.0**62  # of a gradient: the reciprocal of its square, which scales a block, is a normal float32 number
_LEAST_PIECE = 32  # numbers of a block that are reduced first, so that their maxima are few in comparison
_LEAST_SHARE = 1e-30  # of a block's largest second moment: less may become 0 in float32, which must not happen


class ScaleByAdam8bitState(NamedTuple):
    """The state of `scale_by_adam_8bit`: each tree has the parameters' structure.

    Attributes:
        count: the number of updates so far.
        mu: first moments: uint8 codes of the parameter's shape, or float32 numbers.
        mu_scale: the scales of codes (…, D), float32 (…, ⌈D / block_size⌉); the number 1 for float32 moments.
        nu: second moments: uint8 codes of the parameter's shape, or float32 numbers.
        nu_scale: their scales.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]  # optax's name; a tuple's method is lost
    mu: Any
    mu_scale: Any
    nu: Any
    nu_scale: Any


def adamw_8bit(
    learning_rate: optax.ScalarOrSchedule,
    b1: float | jax.Array = 0.9,
    b2: float | jax.Array = 0.999,
    eps: float | jax.Array = 1e-8,
    weight_decay: float | jax.Array = 1e-4,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    block_size: int | None = None,
    float32_names: Sequence[str] = (),
) -> optax.GradientTransformationExtraArgs:
    """AdamW with both moments in 8 bits: about 2.03 bytes per parameter instead of 8.

    The update is AdamW's in float32, m̂ / (√v̂ + eps). Then m and v are rounded to bitsandbytes' dynamic code, in
    blocks of 256 numbers along the last axis, where a block's scale is its largest magnitude. A second moment above 0
    is never rounded to 0. On a GPU, XLA makes two passes over a parameter, one for the scales and one for codes and
    update, and no float32 array of all its moments is in memory. On a TPU, the moments of one parameter are in float32
    during its update.

    Some parameters have float32 moments: those of fewer than 4,096 numbers, those whose last axis has fewer than 16,
    norms, biases and other vectors, stacked or not, and those named by `float32_names`. A gradient above 2^62, whose
    square would overflow, counts as 2^62; one that is not finite makes its block NaN.

    For bfloat16 parameters, wrap it in `stochastic_rounding`. Parameter and state then take 2 + 2.03 bytes, and a run
    that resumes from a saved state continues as if it had not stopped. Codes have the parameter's shape and are sharded
    like it. Blocks depend only on that shape, so a saved state can be restored onto another mesh. If blocks are
    sharded, devices exchange the maxima of their shards. Scales are replicated if the mesh does not divide their
    number, or if blocks differ in size.

    Args:
        learning_rate: a finite number, at least 0, or an optax schedule. `optax.inject_hyperparams` may pass this
            number, and the next four, as arrays. If they are traced, a value of b1, b2 or eps out of its range makes
            the update NaN.
        b1: the decay of first moments, in [0, 1).
        b2: the decay of second moments, in [0, 1).
        eps: added to √v̂; above 0.
        weight_decay: multiplied with parameter and learning rate, as in `optax.adamw`.
        mask: which parameters decay, as in `optax.adamw`.
        block_size: the number of values that share a scale; None for 256. The last block of a row may be shorter.
        float32_names: parameters with one of these names in their path have float32 moments, such as a model's
            embedding with `("embed_tokens",)`.

    Returns:
        The transformation; its updates are float32.

    Raises:
        ValueError: `learning_rate`, `b1`, `b2`, `eps` or `block_size` is out of range; from `init`, if no path has a
            name of `float32_names`; from `update`, if the state has other blocks.
        TypeError: `block_size` is an array, or `b1` or `b2` is one of 16 bits; from `init`, if a parameter does not
            have a real floating-point dtype.

    Example:
        >>> params = {"kernel": jnp.ones((64, 512), jnp.float32)}
        >>> optimizer = adamw_8bit(1e-3)
        >>> updates, state = optimizer.update(params, optimizer.init(params), params)
        >>> state[0].mu["kernel"].dtype, state[0].mu_scale["kernel"].shape
        (dtype('uint8'), (64, 2))

    References:
        Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021 (arXiv:2110.02861).
    """
    check_rate("adamw_8bit", "learning_rate", learning_rate)
    return optax.chain(
        scale_by_adam_8bit(b1, b2, eps, block_size=block_size, float32_names=float32_names),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def scale_by_adam_8bit(
    b1: float | jax.Array = 0.9,
    b2: float | jax.Array = 0.999,
    eps: float | jax.Array = 1e-8,
    *,
    block_size: int | None = None,
    float32_names: Sequence[str] = (),
) -> optax.GradientTransformation:
    """`optax.scale_by_adam` with moments in 8 bits, for use in chains. Its arguments are those of `adamw_8bit`.

    Returns:
        The transformation; its updates are float32.

    Example:
        >>> optimizer = optax.chain(scale_by_adam_8bit(b2=0.95), optax.scale(-1e-3))
        >>> optimizer.init(jnp.ones((64, 512)))[0].nu.dtype
        dtype('uint8')
    """
    b1, b2, eps = _checked(b1, b2, eps)
    block_size = _checked_block_size(block_size)

    def init(params):
        _check_names(params, float32_names)
        leaves, structure = jax.tree.flatten_with_path(params)
        fields = zip(*(_zeros(path, x, block_size, float32_names) for path, x in leaves), strict=True)
        trees = [jax.tree.unflatten(structure, field) for field in fields] or [params] * 4
        return ScaleByAdam8bitState(jnp.zeros((), jnp.int32), *trees)

    def update(grads, state, params=None):
        del params
        count = optax.safe_increment(state.count)
        steps = jnp.asarray(count, jnp.float32)
        # The bias corrections of m and v, which start at 0.
        corrections = [1 / (1 - jnp.float32(decay) ** steps) for decay in (b1, b2)]
        leaves, structure = jax.tree.flatten_with_path(grads)
        rows = zip(leaves, *(jax.tree.leaves(tree) for tree in state[1:]), strict=True)
        update_of = lambda path, *arrays: _updated(path, arrays, corrections, (b1, b2, eps), block_size)
        fields = zip(*(update_of(path, grad, *moments) for (path, grad), *moments in rows), strict=True)
        updates, *trees = [jax.tree.unflatten(structure, field) for field in fields] or [grads] * 5
        return updates, ScaleByAdam8bitState(count, *trees)

    return optax.GradientTransformation(init, update)


def _checked(b1, b2, eps):
    """The numbers, in float32 if they are arrays, such as those of `optax.inject_hyperparams`. Tracers are not read."""
    check_numbers("adamw_8bit", b1=b1, b2=b2)
    for name, value in (("b1", b1), ("b2", b2)):
        if not isinstance(value, Tracer) and not 0 <= value < 1:
            raise ValueError(f"adamw_8bit: {name}={value} must be at least 0 and less than 1, such as 0.9.")
    if not isinstance(eps, Tracer) and not eps > 0:
        raise ValueError(f"adamw_8bit: eps={eps} must be above 0, such as 1e-8.")
    # A traced number out of its range makes NaN.
    valid = [lambda x: (x >= 0) & (x < 1)] * 2 + [lambda x: x > 0]
    checked = lambda x, valid: jnp.where(valid(x), x, jnp.nan).astype(jnp.float32) if isinstance(x, jax.Array) else x
    return [checked(x, valid) for x, valid in zip((b1, b2, eps), valid, strict=True)]


def _checked_block_size(block_size):
    if block_size is None:
        return BLOCK_SIZE
    if isinstance(block_size, jax.Array):
        raise TypeError(
            "adamw_8bit: block_size is an array, and must be a Python int, because shapes depend on it. Pass "
            'static_args=("block_size",) to optax.inject_hyperparams.'
        )
    if block_size < MIN_WIDTH:
        raise ValueError(f"adamw_8bit: block_size={block_size} must be at least {MIN_WIDTH}; 256 is bitsandbytes'.")
    return block_size


# --- one parameter ----------------------------------------------------------------------------------------------------


def _zeros(path, param, block_size, float32_names):
    """Moments and scales before the first update: mu, mu_scale, nu, nu_scale."""
    if not jnp.issubdtype(param.dtype, jnp.floating):
        raise TypeError(
            f"adamw_8bit: {_text(path)} is {param.dtype}, and must have a real floating-point dtype. Leave it out "
            "with optax.masked or optax.partition."
        )
    if not _is_in_8_bits(path, param, float32_names):
        # Separate arrays, since the state may be donated to a step.
        zeros, one = (lambda: jnp.zeros_like(param, jnp.float32)), (lambda: jnp.ones((), jnp.float32))
        return zeros(), one(), zeros(), one()
    shape = code.scale_shape(param.shape, block_size)
    if (sharding := _sharding(param)) is not None:
        sharding = sharding_like(shape, param.shape, sharding)
    scales = [jnp.zeros(shape, jnp.float32, device=sharding) for _ in range(2)]
    return jnp.full_like(param, code.ZERO, jnp.uint8), scales[0], jnp.zeros_like(param, jnp.uint8), scales[1]


def _updated(path, arrays, corrections, settings, block_size):
    """The update of one parameter, and its new moments: update, mu, mu_scale, nu, nu_scale."""
    grad, mu, mu_scale, nu, nu_scale = arrays
    if mu.dtype != jnp.uint8:
        mu, nu = _next_moments(grad, mu, nu, *settings[:2])
        return _direction(mu, nu, corrections, settings[2]), mu, mu_scale, nu, nu_scale
    wanted = code.scale_shape(mu.shape, block_size)
    if mu_scale.shape != wanted:
        raise ValueError(
            f"adamw_8bit: the state of {_text(path)} has scales of shape {mu_scale.shape}, and block_size={block_size} "
            f"makes them {wanted}. Pass the block_size with which the state was initialised."
        )
    return _updated_codes(arrays, corrections, settings, _Blocks.of(grad, block_size))


def _updated_codes(arrays, corrections, settings, blocks):
    """`_updated` for moments in codes, in two passes over them: the scales, then codes and update."""
    grad, mu_codes, mu_scale, nu_codes, nu_scale = arrays
    b1, b2, eps = settings
    decoders = code.decode_signed, code.decode_unsigned

    def moments(zero, decoders=decoders):
        signed, unsigned = decoders
        mu, nu = signed(mu_codes ^ zero) * blocks.spread(mu_scale), unsigned(nu_codes ^ zero) * blocks.spread(nu_scale)
        return _next_moments(grad, mu, nu, b1, b2)

    # A GPU looks numbers up faster than it computes them. A TPU does not. The second pass must not look them up: XLA
    # copies codes that index a table before it overwrites them.
    on_gpu = place_of(grad).platform == "gpu"
    looked_up = lambda decode: code.looked_up(decode, blocks.place)
    mu, nu = moments(jnp.uint8(0), tuple(map(looked_up, decoders)) if on_gpu else decoders)
    mu_max, nu_max = blocks.maxima(jnp.abs(mu)), blocks.maxima(nu)
    # XLA would decode moments with several uses once, and keep them in float32. It does not know that these are zeros,
    # so it takes the moments of each use for different ones, and decodes them within the use.
    zeros = jax.lax.optimization_barrier((jnp.uint8(0),) * 3)
    (mu, _), (_, nu) = moments(zeros[0]), moments(zeros[1])
    new_mu = code.encode_signed(mu * blocks.spread(code.reciprocals(mu_max)))
    shares = nu * blocks.spread(code.reciprocals(nu_max))
    new_nu = code.encode_unsigned(jnp.where(nu > 0, jnp.maximum(shares, _LEAST_SHARE), shares))
    update = _direction(*moments(zeros[2]), corrections, eps)
    return update, new_mu, blocks.placed(mu_max, mu_scale), new_nu, blocks.placed(nu_max, nu_scale)


def _next_moments(grad, mu, nu, b1, b2):
    grad = grad.astype(jnp.float32)
    grad = jnp.where(jnp.isfinite(grad), jnp.clip(grad, -_LARGEST, _LARGEST), grad)
    return b1 * mu + (1 - b1) * grad, b2 * nu + (1 - b2) * (grad * grad)


def _direction(mu, nu, corrections, eps):
    """m̂ / (√v̂ + eps)."""
    return mu * corrections[0] / (jnp.sqrt(nu * corrections[1]) + eps)


# --- blocks on a mesh -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """The blocks of a parameter (…, D)."""

    width: int  # D
    size: int  # of a block
    # How many consecutive numbers of a block are on one device, as far as is known. It divides size, and D where D may
    # be sharded. Maxima of these pieces are made first, so that a mesh may split blocks between them.
    piece: int
    place: NamedSharding | None  # how the parameter is sharded over Explicit axes; `None` where there are none

    @classmethod
    def of(cls, x: jax.Array, size: int) -> "_Blocks":
        """The blocks of an array. Types do not show Auto axes, so that each of them may shard its last axis."""
        width, sharding = x.shape[-1], jax.typeof(x).sharding
        mesh, explicit = sharding.mesh, devices_along(full_spec(sharding.spec, x.ndim)[-1], sharding.mesh.shape)
        auto = [mesh.shape[name] for name in mesh.auto_axes]
        own = width // explicit
        piece = size if explicit == 1 else math.gcd(own, size)
        if (shards := math.lcm(*auto)) > 1 and (least := math.gcd(own, piece, _LEAST_PIECE)) > 1:
            piece = max(math.gcd(own // math.gcd(own, shards), piece), least)
        return cls(width, size, piece, sharding if is_explicit(x) else None)

    def maxima(self, x: jax.Array) -> jax.Array:
        """The largest number of each block: x (…, D), not below 0 → (…, ⌈D / size⌉)."""
        maxima = code.block_maxima(x, self.piece)
        return maxima if self.piece == self.size else code.block_maxima(self._whole(maxima), self.size // self.piece)

    def spread(self, scales: jax.Array) -> jax.Array:
        """Each block's scale for each of its numbers: (…, ⌈D / size⌉) → (…, D)."""
        scales = self._whole(scales)
        if self.piece < self.size:
            scales = code.spread(scales, self.width // self.piece, self.size // self.piece)
        scales = scales if self.place is None else jax.sharding.reshard(scales, self.place)
        return code.spread(scales, self.width, self.piece)

    def placed(self, scales: jax.Array, old: jax.Array) -> jax.Array:
        """New scales that are sharded as the old ones are."""
        return scales if self.place is None else jax.sharding.reshard(scales, jax.typeof(old).sharding)

    def _whole(self, x):
        """The array with its last axis whole on each device, if that axis is of pieces or blocks that a mesh splits."""
        if self.place is None or self.piece == self.size:
            return x
        return jax.sharding.reshard(x, NamedSharding(self.place.mesh, P(*self.place.spec[:-1])))


# --- paths and meshes -------------------------------------------------------------------------------------------------


def _names(path):
    return [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]


def _text(path):
    return ".".join(_names(path)) or "the parameter"


def _check_names(params, float32_names):
    paths = [path for path, _ in jax.tree.leaves_with_path(params)]
    known = {name for path in paths for name in _names(path)}
    for name in float32_names if paths else ():
        if name not in known and name not in ("scale", "bias"):  # which are not matrices, even if they are named
            raise ValueError(
                f"adamw_8bit: float32_names has {name!r}, which is in no parameter's path. Name one of {sorted(known)}."
            )


def _sharding(x):
    """The sharding of a concrete array, or that of its type; None if neither has one."""
    return jax.typeof(x).sharding if isinstance(x, Tracer) and is_explicit(x) else named_sharding(x)


def _is_in_8_bits(path, param, float32_names):
    if param.size < MIN_SIZE or param.shape[-1] < MIN_WIDTH or not set(_names(path)).isdisjoint(float32_names):
        return False
    return is_matrix(path, param)
