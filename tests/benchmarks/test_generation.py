"""The benchmark of generation: which tokens end rows, and what the rows must read until then."""

import numpy as np

from benchmarks.generation import Case, ends_of, least_bytes, lengths_of


def test_a_share_of_the_rows_ends_and_their_bytes_are_those_of_their_own_tokens(rng):
    new = rng.permutation(8 * 10).reshape(8, 10)  # no token comes twice
    stops = ends_of(new, 0.5)
    lengths = lengths_of(new, stops)
    assert len(stops) == 4 and np.sum(np.isin(new, stops).any(axis=1)) == 4
    for row, length in zip(new, lengths, strict=True):
        assert row[length - 1] in stops or length == 10
        assert not set(row[: length - 1]) & set(stops)
    assert ends_of(new, 0.0) == []

    case = Case("llama-3.2-1b", 8, 5, 10, sampled=False, ended=0.5)
    config, weights = case.architecture.config, 2 * case.architecture.num_parameters
    token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    read = sum(5 + step for length in lengths for step in range(1, length))
    assert least_bytes(case, lengths) == weights * (lengths.max() - 1) + token * read
