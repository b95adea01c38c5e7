"""How the workers of a run share the cards, and where a test's mesh is."""

import os

import jax
import pytest

from tests import _devices


@pytest.mark.parametrize("worker, order", [("gw0", "3,5"), ("gw1", "5,3"), ("gw2", "3,5")])
def test_workers_begin_at_different_cards_and_have_equal_shares_of_the_memory(worker, order, monkeypatch):
    environment = dict(CUDA_VISIBLE_DEVICES="3,5", PYTEST_XDIST_WORKER=worker, PYTEST_XDIST_WORKER_COUNT="8")
    monkeypatch.setattr(os, "environ", environment)
    _devices.share_cards()
    assert environment["CUDA_VISIBLE_DEVICES"] == order
    assert float(environment["XLA_PYTHON_CLIENT_MEM_FRACTION"]) == pytest.approx(1.5 * 2 / 8, abs=1e-3)
    assert environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


@pytest.mark.parametrize("name", ["XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"])
def test_a_share_that_the_user_gave_stays(name, monkeypatch):
    environment = {name: "0.3", "CUDA_VISIBLE_DEVICES": "0", "PYTEST_XDIST_WORKER_COUNT": "8"}
    monkeypatch.setattr(os, "environ", environment)
    _devices.share_cards()
    assert [value for name, value in environment.items() if "FRACTION" in name] == ["0.3"]


def test_a_mesh_has_several_devices_everywhere_and_arrays_are_made_on_the_first(devices):
    assert len(devices) in (2, 4) and len({device.platform for device in devices}) == 1
    assert jax.numpy.ones(1).devices() == {devices[0]}
