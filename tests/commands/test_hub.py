"""What is told of the hub where no network is."""

import logging

import pytest

from liger_jax.commands import main

huggingface_hub = pytest.importorskip("huggingface_hub")


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def test_tries_to_reach_a_hub_that_is_not_there_are_one_warning(tmp_path, monkeypatch, capsys):
    logger, records = logging.getLogger("huggingface_hub.utils._http"), Records()

    def snapshot_download(*args, **options):  # by what huggingface_hub says at each try
        for number in range(1, 6):
            logger.warning(f"'[Errno -2] no name' thrown while requesting HEAD https://hub/{number}")
            logger.warning(f"Retrying in 1s [Retry {number}/5].")
        logger.warning("another warning")
        raise huggingface_hub.errors.LocalEntryNotFoundError("the hub cannot be reached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    logger.addHandler(records)
    try:
        assert main(["finetune", "--model=org/name", f"--data={tmp_path}", f"--out={tmp_path / 'out'}"]) == 2
        first, other = records.texts
        assert first == (
            "'[Errno -2] no name' thrown while requesting HEAD https://hub/1. It is tried again for some seconds; "
            "further tries are not reported."
        )
        assert other == "another warning" and "the hub cannot be reached" in capsys.readouterr().err
        assert main(["finetune", "--model=org/name", f"--data={tmp_path}", f"--out={tmp_path / 'out'}"]) == 2
        assert len(records.texts) == 4  # each command tells it anew
    finally:
        logger.removeHandler(records)
