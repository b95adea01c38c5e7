"""The rows of a run: which are held out, which are in each step, and how many steps there are.

Rows are a model's arguments as `pack` and `pad` make them: arrays of (rows, length), by name.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from liger_jax.ops.labels import IGNORE_INDEX
from liger_jax.training import digests

LENGTH = 2048  # tokens in a row, by default
INPUTS = ("input_ids", "segment_ids", "positions")  # the arguments by which a model reads packed rows
ARGUMENTS = (*INPUTS, "labels")  # and those by which it is scored, too
MASKS = ("segment_ids", "token_mask", "attention_mask")  # those that are 0 at padding
Rows = Mapping[str, Any]  # arrays, or objects that are indexed like arrays, such as rows in files
Mixture = Sequence[tuple[int, float]]
Item = TypeVar("Item")


def hold_out(items: Sequence[Item], share: float, seed: int) -> tuple[list[Item], list[Item]]:
    """Holds out random items, such as documents, from training.

    Args:
        items: all of them.
        share: the fraction to hold out, in [0, 1); at least one item if it is not 0.
        seed: seed of the draw.

    Returns:
        The items to train on and the held-out items, both in their original order.

    Raises:
        ValueError: there is only one item, which cannot be in both.

    Example:
        >>> hold_out("abcd", 0.25, seed=0)
        (['a', 'b', 'd'], ['c'])
    """
    if not share:
        return list(items), []
    if len(items) < 2:
        raise ValueError(f"hold_out: share={share} of {len(items)} items leaves no item to train on. Pass share=0.")
    number = min(max(1, round(share * len(items))), len(items) - 1)
    held_out = set(np.random.default_rng(seed).permutation(len(items))[:number].tolist())
    train = [item for i, item in enumerate(items) if i not in held_out]
    return train, [items[i] for i in sorted(held_out)]


def num_rows(rows: Rows) -> int:
    """Counts rows."""
    return len(rows["input_ids"])


def num_tokens(batch: Any) -> int:
    """Counts tokens without padding. If nothing marks padding, the tokens of a row are those up to its last label."""
    if not isinstance(batch, Mapping):
        return batch.size
    name = next((name for name in MASKS if name in batch), "labels")
    count = _num_up_to_labels if name == "labels" else lambda mask, xp: xp.count_nonzero(mask)
    values = batch[name]
    if isinstance(values, jax.Array) and not values.is_fully_addressable:  # other processes have a shard of it
        return int(jax.jit(count, static_argnums=1)(values, jnp))
    return int(count(np.asarray(values), np))


def _num_up_to_labels(labels, xp):
    has_label = labels >= 0
    ends = has_label.shape[1] - xp.argmax(has_label[:, ::-1], axis=1)
    return xp.sum(xp.where(xp.any(has_label, axis=1), ends, 0))


def num_steps(number: int, batch: int, epochs: float) -> int:
    """Counts the steps of a run.

    Args:
        number: rows to train on.
        batch: rows in a step.
        epochs: how often each row is trained on.

    Returns:
        The number of steps, at least 1. No step has rows of two epochs.

    Example:
        >>> num_steps(10, 8, 1.0), num_steps(10, 8, 2.5), num_steps(3, 8, 1.0)
        (2, 5, 1)
    """
    whole, rest = divmod(_row_visits(number, epochs), number)
    return whole * math.ceil(number / batch) + math.ceil(rest / batch)


def batches(
    rows: Rows,
    batch: int,
    seed: int,
    epochs: float | None = None,
    mixture: Mixture | None = None,
    own: np.ndarray | None = None,
) -> Callable[[int], Rows]:
    """Makes a function that returns the rows of a step by its number, independently of earlier calls.

    An epoch has each row once, or as often as the mixture says. Its last step has the remaining rows, which may be
    fewer than `batch`.

    Args:
        rows: a model's arguments.
        batch: the largest number of rows in a step.
        seed: seed of the rows' order, which is new in each epoch.
        epochs: how often each row is trained on. A fraction of an epoch has the first rows of its order. `None` for an
            unlimited number of epochs.
        mixture: (number of rows, weight) of consecutive groups of rows: an epoch has the rows of a group as many times
            as its weight. For a fractional weight, each epoch has different rows, until all have been used. `None` for
            each row once.
        own: the indices in a batch of the rows that this process reads; the rows of other processes are zeros here.
            `None` for all.

    Returns:
        A function of the step, from 0. After the last step (see `num_steps`) there are no rows.

    Example:
        >>> batch_of = batches({"input_ids": np.arange(3)[:, None]}, batch=2, seed=0, epochs=1.0)
        >>> sorted(np.concatenate([batch_of(step)["input_ids"][:, 0] for step in (0, 1)]).tolist())
        [0, 1, 2]
    """
    number = num_rows(rows) if mixture is None else 0
    chosen_of = drawn(number, batch, seed, epochs, mixture)

    def rows_of(step: int) -> Rows:
        chosen = chosen_of(step)
        if own is None:
            return {name: values[chosen] for name, values in rows.items()}
        places = own[own < len(chosen)]
        arrays = {name: np.zeros((len(chosen), *x.shape[1:]), x.dtype) for name, x in rows.items()}
        for name, values in rows.items():
            arrays[name][places] = values[chosen[places]]
        return arrays

    return rows_of


def drawn(
    number: int, batch: int, seed: int, epochs: float | None = None, mixture: Mixture | None = None
) -> Callable[[int], np.ndarray]:
    """Which rows each step of `batches` has.

    Args:
        number: how many rows there are; a mixture says it itself.
        batch: the most rows in a step.
        seed: seed of the rows' order.
        epochs: how often each row is trained on, or `None`.
        mixture: (rows, weight) of consecutive groups of rows, or `None`.

    Returns:
        A function of the step, from 0: the numbers of its rows, as many as there are.

    Example:
        >>> chosen_of = drawn(3, batch=2, seed=0, epochs=1.0)
        >>> sorted(chosen_of(0).tolist() + chosen_of(1).tolist())
        [0, 1, 2]
    """
    number = number if mixture is None else num_mixed(mixture)
    steps_in_epoch = math.ceil(number / batch)

    @functools.lru_cache(2)
    def order_of(epoch: int) -> np.ndarray:
        order = np.random.default_rng([seed, epoch]).permutation(number)
        if epochs is not None:
            order = order[: max(0, _row_visits(number, epochs) - epoch * number)]
        return order if mixture is None else _mixed(mixture, seed, epoch)[order]

    def chosen_of(step: int) -> np.ndarray:
        epoch, step_in_epoch = divmod(step, steps_in_epoch)
        return order_of(epoch)[step_in_epoch * batch : (step_in_epoch + 1) * batch]

    return chosen_of


def num_mixed(mixture: Mixture) -> int:
    """Counts the rows of an epoch."""
    return sum(_visits(number, weight) for number, weight in mixture)


def batched(rows: Rows, size: int) -> Iterator[Rows]:
    """Cuts rows into batches of equal size. The last one is filled up with rows of padding, which are not counted.

    Args:
        rows: a model's arguments.
        size: rows in a batch.

    Yields:
        The batches in order. If the rows have no array that marks padding, a `token_mask` is added, which is 0 in the
        added rows.

    Example:
        >>> rows = {"input_ids": np.ones((3, 2), np.int32), "labels": np.ones((3, 2), np.int32)}
        >>> [batch["labels"].tolist() for batch in batched(rows, 2)]
        [[[1, 1], [1, 1]], [[1, 1], [-100, -100]]]
    """
    if "input_ids" in rows and not any(name in rows for name in MASKS):
        rows = {**rows, "token_mask": np.ones(np.shape(rows["input_ids"]), np.int32)}
    for begin in range(0, num_rows(rows), size):
        batch = {name: values[begin : begin + size] for name, values in rows.items()}
        missing = size - num_rows(batch)
        empty = {name: IGNORE_INDEX if name == "labels" else 0 for name in batch}
        more = lambda x, missing=missing: ((0, missing), *[(0, 0)] * (x.ndim - 1))
        yield {name: np.pad(x, more(x), constant_values=empty[name]) for name, x in batch.items()}


def fingerprint(*some: Rows) -> str:
    """A text that identifies these rows.

    Args:
        some: rows to train on, and perhaps held-out rows.

    Returns:
        A phrase with the number of rows and a hash of their contents.

    Example:
        >>> fingerprint({"input_ids": np.ones((3, 2), np.int32)})
        '3 rows, as tokenizer and chat template make them: 52472924f15b'
    """
    buffers: list[Any] = []
    for rows in some:
        for name, values in rows.items():
            buffers += [f"{name} {values.shape} {values.dtype}".encode(), np.ascontiguousarray(values)]
    number = sum(map(num_rows, some))
    return f"{number} rows, as tokenizer and chat template make them: {digests.of_bytes(*buffers)[:12]}"


def _visits(number: int, weight: float) -> int:
    """The number of rows of a group in an epoch."""
    return max(1, round(number * weight)) if number else 0


def _mixed(mixture: Mixture, seed: int, epoch: int) -> np.ndarray:
    """The rows of an epoch, in the order of the groups."""
    indices, first = [], 0
    for group, (number, weight) in enumerate(mixture):
        if number:
            whole, rest = divmod(_visits(number, weight), number)
            turn = np.random.default_rng([seed, 1, group]).permutation(number)
            more = turn[(epoch * rest + np.arange(rest)) % number]
            indices.append(first + np.concatenate([np.tile(np.arange(number), whole), more]))
        first += number
    return np.concatenate(indices)


def _row_visits(number: int, epochs: float) -> int:
    """The total number of rows in the steps of a run."""
    return max(1, round(epochs * number))
