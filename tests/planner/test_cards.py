"""What JAX is given of a card: what is free on it, unless the user has said something else."""

import dataclasses
import subprocess
import sys
import types

import pytest

from liger_jax.commands import main
from liger_jax.planner import cards
from liger_jax.planner.cards import FRACTION, Card
from liger_jax.planner.devices import GIB, RESERVE, target

H100 = ("NVIDIA H100 80GB HBM3", 81559 * 2**20)
EMPTY = Card("GPU-a", *H100, int(79.1 * GIB))
BUSY = Card("GPU-b", *H100, int(60 * GIB))
SMALL = Card("GPU-c", "NVIDIA T4 of another kind", 16 * GIB, 15 * GIB)


@pytest.fixture
def found(monkeypatch):
    """A function that makes the driver's answer, and returns what `take` says and sets."""
    monkeypatch.setattr(cards, "_PLUGINS", ("json",))

    def found(shown, environment=None, **options):
        monkeypatch.setattr(cards, "read", lambda: list(shown))
        environment = dict(environment or {})
        return cards.take(environment, **options), environment.get(FRACTION)

    return found


def test_an_empty_card_is_taken_but_for_what_the_planner_leaves_outside(found):
    line, fraction = found([EMPTY])
    assert line == "" and float(fraction) == target("h100").fraction
    planned = target("h100").capacity_bytes
    assert (1 - RESERVE) * float(fraction) * target("h100").visible_bytes == pytest.approx(planned, rel=2e-3)
    assert float(found([EMPTY, EMPTY])[1]) == target("h100:2").fraction < float(fraction)  # NCCL's memory


def test_on_a_card_that_others_use_what_is_free_is_taken_and_of_several_the_least(found):
    line, fraction = found([EMPTY, BUSY])
    assert 60 - 0.7 - 1 - 0.8 - 0.1 < float(fraction) * 79.1 <= 60 - 0.7 - 1 - 0.79
    assert line.startswith("other programs hold 19.1 GiB of card 1 of 2, and this one takes 7")
    full = Card("GPU-d", *H100, 0)
    assert found([full])[1] == "0.010" and "hold 79.1 GiB of the card" in found([full])[0]


@pytest.mark.parametrize(
    "name, value",
    [
        (FRACTION, "0.5"),
        ("XLA_CLIENT_MEM_FRACTION", "0.5"),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform"),
        ("JAX_PLATFORMS", "cpu"),
    ],
)
def test_what_the_user_has_set_stays(found, name, value):
    assert found([EMPTY], {name: value})[1] == (value if name == FRACTION else None)


def test_only_the_cards_that_cuda_shows_count(found):
    only = lambda named, shown=(EMPTY, BUSY), **more: found(shown, {"CUDA_VISIBLE_DEVICES": named, **more})[1]
    assert only("0") == only("GPU-a") == found([EMPTY])[1] != only("1") == found([BUSY])[1]
    assert only("0,1") == found([EMPTY, BUSY])[1]
    assert [only(named) for named in ("", "2", "MIG-1", "GPU-")] == [None] * 4  # nothing, or nobody knows which
    mixed = (SMALL, EMPTY)  # CUDA counts the fastest first, and the driver does not
    assert only("0", mixed) is None and only("0", mixed, CUDA_DEVICE_ORDER="PCI_BUS_ID") == found([SMALL])[1]
    several = dict(are_several=True)
    of_rank = lambda rank: found([EMPTY, BUSY], {"SLURM_LOCALID": rank}, **several, one_each=True)[1]
    assert of_rank("0") > of_rank("1") == found([EMPTY, BUSY])[1] == found([BUSY], **several)[1] < found([BUSY])[1]
    split = dataclasses.replace(EMPTY, is_split=True)  # its instances have less, and JAX sees one
    assert found([split]) == found([EMPTY, split]) == ("", None)
    assert only("0", (EMPTY, split)) == only("0")


def test_the_driver_is_asked_by_its_library_or_its_command_and_may_not_answer(monkeypatch):
    text = "GPU-a, 81559, 60000, Disabled, NVIDIA H100 80GB HBM3\n"
    done = lambda out: lambda *args, **options: subprocess.CompletedProcess(args, 0, stdout=out)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(subprocess, "run", done(text))
    (card,) = cards.read()
    assert card == Card("GPU-a", *H100, 60000 * 2**20)
    monkeypatch.setattr(subprocess, "run", done(text.replace("Disabled", "Enabled")))
    assert cards.read() == [dataclasses.replace(card, is_split=True)]
    monkeypatch.setattr(subprocess, "run", done("GPU-a, [N/A], [N/A], [N/A], NVIDIA GB10\n"))
    assert cards.read() == []
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: (_ for _ in ()).throw(FileNotFoundError()))
    assert cards.read() == []
    nvml = types.SimpleNamespace(
        __spec__=object(),
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: b"GPU-a",
        nvmlDeviceGetName=lambda handle: H100[0],
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(total=H100[1], free=60000 * 2**20),
        nvmlDeviceGetMigMode=lambda handle: [1, 1],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert cards.read() == [dataclasses.replace(card, is_split=True)]
    nvml.nvmlDeviceGetMigMode = lambda handle: (_ for _ in ()).throw(RuntimeError("Not Supported"))
    assert cards.read() == [card]
    nvml.nvmlInit = lambda: (_ for _ in ()).throw(RuntimeError("no driver"))
    assert cards.read() == []


def test_a_program_whose_jax_has_started_hears_what_to_set(monkeypatch):
    for name in (FRACTION, "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    limit = int(0.75 * 79.1 * GIB)

    def told(others, pool=limit, platform="gpu"):
        """What is said where other programs hold so many GiB, and JAX's allocator this pool of its limit."""
        monkeypatch.setattr(cards, "read", lambda: [Card("GPU-a", *H100, int((79.1 - 0.6 - others) * GIB) - pool)])
        stats = dict(bytes_limit=limit, pool_bytes=pool)
        return cards.unclaimed(types.SimpleNamespace(platform=platform, memory_stats=lambda: stats), 1)

    assert told(0).startswith("JAX has 59.3 GiB of a card and could have 77.") and told(0) == told(0, pool=0)
    assert f"set {FRACTION}=0.97 in the environment before JAX starts" in told(0)
    assert told(18) == told(18, pool=0) == told(0, platform="tpu") == ""  # 75 % is what there is
    monkeypatch.setenv(FRACTION, "0.75")
    assert told(0) == ""


def test_a_command_takes_the_card_only_where_it_owns_its_process_and_uses_devices(monkeypatch, capsys):
    taken = []
    monkeypatch.setattr(cards, "take", lambda **options: taken.append(options) or "a card is in use")
    run = lambda *argv: monkeypatch.setattr(sys, "argv", ["liger-jax", *argv]) or main()
    run("generate", "--model", "nowhere")
    assert (
        taken == [dict(are_several=False, one_each=False)]
        and "liger-jax generate: a card is in use\n" in capsys.readouterr().err
    )
    run("plan", "--model", "qwen2-0.5b", "--device", "t4")
    main(["generate", "--model", "nowhere"])
    assert len(taken) == 1
