"""What a run is made of: which differences of its model are seen, and how they are told."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from liger_jax.training import CheckpointError, identity

FILE = "model.safetensors"


@pytest.fixture
def weights(tmp_path):
    rng = np.random.default_rng(0)
    names = {"a": (300, 300), "b": (7,), "c": (200, 100)}
    save_file({name: rng.normal(size=shape).astype(np.float32) for name, shape in names.items()}, tmp_path / FILE)
    return tmp_path


@pytest.mark.parametrize("name", "abc")
def test_each_tensor_that_is_negated_changes_the_digest(weights, name):
    before = identity.of_weights(weights, [FILE])
    assert before == identity.of_weights(weights, [FILE])
    tensors = load_file(weights / FILE)
    save_file(tensors | {name: -tensors[name]}, weights / FILE)
    assert identity.of_weights(weights, [FILE]) != before


def test_a_bit_between_the_blocks_is_seen_by_whoever_reads_all(weights):
    sampled, whole = identity.of_weights(weights, [FILE]), identity.of_whole_weights(weights, [FILE])
    content = bytearray((weights / FILE).read_bytes())
    content[60_000] ^= 1
    (weights / FILE).write_bytes(content)
    assert identity.of_weights(weights, [FILE]) == sampled
    assert identity.of_whole_weights(weights, [FILE]) != whole


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x02" + b"\0" * 7 + b"[]", b"\x05" + b"\0" * 7 + b'{"a":'])
def test_files_that_are_no_weights_have_digests(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    assert identity.of_weights(tmp_path, [FILE, "missing"]).keys() == {FILE}


def test_the_first_differences_are_named_in_a_bounded_message(tmp_path):
    old = {f"n{i}": "x" * 10**4 for i in range(1000)} | {"same": 1}
    with pytest.raises(CheckpointError, match=r"holds another run: n0='x+…x+' is gone, .*, 996 more differ") as error:
        identity.check_same(tmp_path, old, {"same": 1})
    assert len(str(error.value)) < 1500


def test_numbers_that_may_grow_do_not_shrink(tmp_path):
    check = lambda old, new: identity.check_same(tmp_path, {"steps": old}, {"steps": new}, growing=["steps"])
    for old, new in ((2, 3), (2, None), (None, 2), (2, 2)):
        check(old, new)
    with pytest.raises(CheckpointError, match="steps=3 became 2"):
        check(3, 2)


def test_weights_that_were_read_whole_once_are_compared_only_with_such(tmp_path):
    read = {f"all of {FILE}": "abc"}
    identity.check_same(tmp_path, {}, read)
    identity.check_same(tmp_path, read, {})
    with pytest.raises(CheckpointError, match=r"all of model\.safetensors='abc' became 'abd'"):
        identity.check_same(tmp_path, read, {f"all of {FILE}": "abd"})
