"""Few rows in which each pair of levels that go together stands in one."""

import random
import re
from collections.abc import Mapping, Sequence

import numpy as np


def pairs(factors: Mapping[str, Sequence[str]], apart: Sequence[tuple[str, str]]) -> np.ndarray:
    """(levels, levels) bool: whether two levels of different factors go together.

    Args:
        factors: the levels by the factors' names.
        apart: pairs of regular expressions of levels that do not go together.
    """
    levels = [level for each in factors.values() for level in each]
    factor = np.array([i for i, each in enumerate(factors.values()) for _ in each])
    found = factor[:, None] != factor
    for one, other in apart:
        both = [np.array([re.search(pattern, level) is not None for level in levels]) for pattern in (one, other)]
        found &= ~(np.outer(*both) | np.outer(*reversed(both)))
    return found


def rows(factors: Mapping[str, Sequence[str]], apart: Sequence[tuple[str, str]], tries: int = 8) -> list[list[str]]:
    """Rows with a level of each factor, which are found greedily, and are the same in each process.

    A row begins with a level that lacks most pairs, and factors with many levels come first: these decide how many rows
    there are.

    Args:
        factors: the levels by the factors' names; of each factor one level at least goes together with all others.
        apart: as in `pairs`.
        tries: rows of which the one with the most new pairs is taken.
    """
    levels = [level for each in factors.values() for level in each]
    ends = np.cumsum([len(each) for each in factors.values()])
    numbers = [np.arange(end - len(each), end) for end, each in zip(ends, factors.values(), strict=True)]
    fits, draw = pairs(factors, apart), random.Random(0)
    left, found = fits.copy(), []
    while left.any():
        best, most, lacking = [], 0, left.sum(axis=1)
        for _ in range(tries):
            row = [draw.choice(np.flatnonzero(lacking == lacking.max()).tolist())]
            for some in sorted(draw.sample(numbers, len(numbers)), key=len, reverse=True):
                if set(some).isdisjoint(row):
                    there = [x for x in draw.sample(list(some), len(some)) if fits[x, row].all()]
                    row.append(int(max(there, key=lambda x: (left[x, row].sum(), lacking[x]))))
            if (count := left[np.ix_(row, row)].sum()) > most:
                best, most = sorted(row), count
        left[np.ix_(best, best)] = False
        found.append([levels[i] for i in best])
    return found
