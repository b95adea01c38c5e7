"""Tables of cosines and sines for the rotary embedding, with the scalings by which models reach longer contexts.

Each scaling is a frozen dataclass. Its fields have the names that they have in `rope_scaling` of a Hugging Face
checkpoint. Frequencies are constants, computed in float64 and rounded once; angle, cosine and sine are float32.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from liger_jax.ops import checks
from liger_jax.ops.checks import ArrayLike

_OP = "rope_table"


def _check_at_least(scaling: object, least: int, *names: str) -> None:
    for name in names:
        value = getattr(scaling, name)
        if not value >= least:
            raise ValueError(f"{type(scaling).__name__}: {name}={value} must be at least {least}.")


@dataclasses.dataclass(frozen=True)
class LinearRope:
    """Positions divided by `factor`.

    Args:
        factor: how many times longer the context gets, at least 1.

    Example:
        >>> LinearRope(factor=2.0)
        LinearRope(factor=2.0)

    References:
        Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation", 2023
        (arXiv:2306.15595).
    """

    factor: float

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "factor")


@dataclasses.dataclass(frozen=True)
class DynamicRope:
    """A base that grows with the sequence once it is longer than in training ("dynamic NTK").

    theta' = theta·(factor·length/original − factor + 1)^(R/(R−2)). length is the largest position in the call plus one,
    or original if that is more. Inside `shard_map` it is the largest position of the shard.

    Args:
        factor: at least 1.
        original_max_position_embeddings: the length in training. Hugging Face takes its config's
            `max_position_embeddings`, so a model is saved with this number under that name.

    Example:
        >>> DynamicRope(factor=2.0, original_max_position_embeddings=2048).factor
        2.0

    References:
        Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023 (arXiv:2309.00071),
        section 3.3 and appendix B.1.
    """

    factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "factor", "original_max_position_embeddings")


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """LLaMA 3.1's scaling: low frequencies are divided by `factor`, high ones kept, those in between interpolated.

    f' = f·(s + (1 − s)/factor), where s = (original·f/2π − low_freq_factor)/(high_freq_factor − low_freq_factor),
    clipped to [0, 1], is the weight of the unscaled frequency.

    Args:
        factor: at least 1.
        low_freq_factor: frequencies with fewer turns than this in the original length are divided.
        high_freq_factor: frequencies with more turns than this are kept; more than `low_freq_factor`.
        original_max_position_embeddings: the length in training.

    Example:
        >>> Llama3Rope(factor=8.0).original_max_position_embeddings
        8192

    References:
        Meta's reference code of LLaMA 3.1, `apply_scaling` in models/llama3/reference_impl/model.py of
        github.com/meta-llama/llama-models.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "factor", "original_max_position_embeddings")
        if not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"Llama3Rope: high_freq_factor={self.high_freq_factor} must be more than "
                f"low_freq_factor={self.low_freq_factor}: between the two, both are blended."
            )


@dataclasses.dataclass(frozen=True)
class YarnRope:
    """YaRN: like `Llama3Rope`, but the blend is linear in the column, and `attention_factor` scales both tables.

    Args:
        factor: at least 1.
        original_max_position_embeddings: the length in training.
        beta_fast: columns with more turns than this in the original length are kept.
        beta_slow: columns with fewer turns than this are divided by `factor`; less than `beta_fast`.
        attention_factor: scale of both tables; `None` for m(factor, mscale)/m(factor, mscale_all_dim) where both are
            given, else for m(factor, 1), with m(factor, s) = s·ln(factor)/10 + 1.
        mscale: in the formula of `attention_factor`; DeepSeek's configs have it. `None` or 0 for none.
        mscale_all_dim: in the formula of `attention_factor`; DeepSeek's configs have it. `None` or 0 for none.
        truncate: whether the ends of the blend are rounded outwards to whole columns.

    Example:
        >>> round(YarnRope(factor=4.0, original_max_position_embeddings=4096).scale, 4)
        1.1386

    References:
        Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023 (arXiv:2309.00071),
        sections 3.2 and 3.4.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "factor", "original_max_position_embeddings")
        if not self.beta_fast > self.beta_slow > 0:
            raise ValueError(
                f"YarnRope: beta_fast={self.beta_fast} must be more than beta_slow={self.beta_slow}, and both more "
                "than 0: between the two, both are blended."
            )

    @property
    def scale(self) -> float:
        """The scale of both tables."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._m(self.mscale) / self._m(self.mscale_all_dim)
        return self._m(1.0)

    def _m(self, s: float) -> float:
        """m(factor, s)."""
        return 0.1 * s * math.log(self.factor) + 1.0


@dataclasses.dataclass(frozen=True)
class LongRope:
    """LongRoPE: each frequency is divided by its own factor, and `scale` scales both tables.

    length is the largest position in the call plus one; inside `shard_map`, in the shard. If it is at most the length
    in training, all positions use `short_factor`, and otherwise all use `long_factor`.

    Args:
        short_factor: R/2 numbers.
        long_factor: R/2 numbers.
        factor: how many times longer the context gets. It determines only the scale of the tables.
        original_max_position_embeddings: the length in training, at least 2.
        attention_factor: scale of both tables; `None` for √(1 + ln(factor)/ln(original)), or 1 for a factor up to 1.

    Example:
        >>> LongRope((1.0, 1.0), (1.0, 4.0), factor=32.0, original_max_position_embeddings=4096).scale
        1.1902380714238083

    References:
        Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens", 2024 (arXiv:2402.13753).
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _check_at_least(self, 2, "original_max_position_embeddings")
        if len(self.short_factor) != len(self.long_factor):
            raise ValueError(
                f"LongRope: short_factor has {len(self.short_factor)} numbers and long_factor {len(self.long_factor)}; "
                "both must have one for each rotated pair of columns."
            )
        if not all(value > 0 for value in (*self.short_factor, *self.long_factor, self.factor)):
            raise ValueError("LongRope: short_factor, long_factor and factor must be more than 0, as divisors.")

    @property
    def scale(self) -> float:
        """The scale of both tables."""
        if self.attention_factor is not None:
            return self.attention_factor
        original = self.original_max_position_embeddings
        return math.sqrt(1 + math.log(self.factor) / math.log(original)) if self.factor > 1 else 1.0


@dataclasses.dataclass(frozen=True)
class ProportionalRope:
    """Rotates only the first pairs of a head, at the frequencies that they would have if all pairs were rotated.

    ⌊partial_rotary_factor·R/2⌋ of the R/2 pairs are rotated, at frequencies divided by `factor`.

    Args:
        partial_rotary_factor: the fraction of the pairs that are rotated, from 0 to 1.
        factor: at least 1.

    Raises:
        ValueError: a field is out of its range.

    Example:
        >>> cos, sin = rope_table(jnp.arange(3)[None], 8, scaling=ProportionalRope(0.5))
        >>> (sin[0, 2] != 0).tolist()
        [True, True, False, False, True, True, False, False]
    """

    partial_rotary_factor: float = 1.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "factor")
        _check_at_least(self, 0, "partial_rotary_factor")
        if self.partial_rotary_factor > 1:
            raise ValueError(f"ProportionalRope: partial_rotary_factor={self.partial_rotary_factor} must be at most 1.")


RopeScaling = LinearRope | DynamicRope | Llama3Rope | YarnRope | LongRope | ProportionalRope


def rope_table(
    positions: Int[ArrayLike, "*batch T"], width: int, *, theta: float = 10000.0, scaling: RopeScaling | None = None
) -> tuple[Float[Array, "*batch T R"], Float[Array, "*batch T R"]]:
    """Cosines and sines of position·f_i, with f_i = theta^(−2i/R) for i < R/2, the second half repeating the first.

    Both layouts of `apply_rope` take these tables. Positions of shape (3, B, T) make the tables of `apply_mrope`.

    Args:
        positions: (..., T) integers below 2²⁴, which float32 holds exactly.
        width: R, how many columns of a head are rotated; a Python int, even.
        theta: the base, a Python number above 1.
        scaling: `LinearRope`, `DynamicRope`, `Llama3Rope`, `YarnRope` or `LongRope` for a context longer than in
            training; or a `ProportionalRope`.

    Returns:
        Two float32 tables (..., T, R), for `apply_rope` with a batch axis: positions (1, T) or (B, T).

    Example:
        >>> cos, sin = rope_table(jnp.arange(3)[None], 4)
        >>> cos.shape, float(cos[0, 0, 3]), float(sin[0, 0, 3])
        ((1, 3, 4), 1.0, 0.0)

    References:
        Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021 (arXiv:2104.09864).
    """
    checks.check_int(_OP, width=width)
    least = 4 if isinstance(scaling, DynamicRope) else 0  # dynamic: R − 2 is a divisor
    if width < least or width % 2:
        raise ValueError(f"{_OP}: width={width} must be even and at least {least}: columns are rotated in pairs.")
    checks.check_number(_OP, theta=theta)
    if not theta > 1:
        raise ValueError(f"{_OP}: theta={theta} must be more than 1; models have 10000.0 and more.")
    column = np.arange(width // 2)
    frequencies, scale = theta ** (-2 * column / max(width, 1)), 1.0
    if isinstance(scaling, LinearRope):
        frequencies = frequencies / scaling.factor
    elif isinstance(scaling, Llama3Rope):
        frequencies = _llama3_frequencies(frequencies, scaling)
    elif isinstance(scaling, YarnRope):
        kept = _yarn_kept_share(column, width, theta, scaling)
        frequencies, scale = frequencies * (kept + (1 - kept) / scaling.factor), scaling.scale
    elif isinstance(scaling, ProportionalRope):
        turns = column < int(scaling.partial_rotary_factor * width // 2)
        frequencies = np.where(turns, frequencies / scaling.factor, 0.0)
    elif isinstance(scaling, LongRope):
        scale = scaling.scale
    elif scaling is not None and not isinstance(scaling, DynamicRope):
        raise TypeError(
            f"{_OP}: scaling is a {type(scaling).__name__}, but must be None, LinearRope, DynamicRope, Llama3Rope, "
            "YarnRope, LongRope or ProportionalRope, such as LinearRope(factor=2.0)."
        )
    positions = checks.as_real(_OP, "positions", positions)
    if isinstance(scaling, LongRope):
        frequencies = _longrope_frequencies(positions, frequencies, scaling)
    frequencies = jnp.asarray(frequencies, jnp.float32)
    if isinstance(scaling, DynamicRope):
        frequencies *= _dynamic_ratios(positions, column, width, scaling)
    frequencies = jnp.concatenate([frequencies, frequencies])
    angles = positions.astype(jnp.float32)[..., None] * jnp.expand_dims(frequencies, range(positions.ndim))
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def _llama3_frequencies(frequencies: np.ndarray, scaling: Llama3Rope) -> np.ndarray:
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - scaling.low_freq_factor) / blend, 0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _yarn_kept_share(column: np.ndarray, width: int, theta: float, scaling: YarnRope) -> np.ndarray:
    def column_of(turns: float) -> float:
        """The column i that makes so many turns: original·theta^(−2i/R) = 2π·turns."""
        radians = 2 * math.pi * turns
        return width * math.log(scaling.original_max_position_embeddings / radians) / (2 * math.log(theta))

    first, last = column_of(scaling.beta_fast), column_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    # If the ends meet, the blend is 0.001 columns wide, as in the reference implementation.
    return 1 - np.clip((column - first) / (last - first or 0.001), 0, 1)


def _dynamic_ratios(
    positions: Int[Array, "*batch T"], column: np.ndarray, width: int, scaling: DynamicRope
) -> Float[Array, "half"]:
    """(theta'/theta)^(−2i/R) = growth^(−2i/(R−2))."""
    original = scaling.original_max_position_embeddings
    length = jnp.maximum(jnp.max(positions, initial=0) + 1, original).astype(jnp.float32)
    growth = scaling.factor * (length / original) - (scaling.factor - 1)
    return jnp.exp(-jnp.log(growth) * jnp.asarray(2 * column / (width - 2), jnp.float32))


def _longrope_frequencies(
    positions: Int[Array, "*batch T"], frequencies: np.ndarray, scaling: LongRope
) -> Float[Array, "half"]:
    if len(scaling.short_factor) != len(frequencies):
        raise ValueError(
            f"{_OP}: scaling has {len(scaling.short_factor)} factors, but must have width/2={len(frequencies)}: one "
            "for each pair of columns."
        )
    short, long = (
        jnp.asarray(frequencies / np.asarray(factors, np.float64), jnp.float32)
        for factors in (scaling.short_factor, scaling.long_factor)
    )
    is_long = jnp.max(positions, initial=0) >= scaling.original_max_position_embeddings
    return jnp.where(is_long, long, short)
