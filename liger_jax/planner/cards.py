"""The memory that is free on this machine's NVIDIA cards, and the share of it that JAX's allocator is given.

The driver is asked, and not JAX, which reads the share when it starts.
"""

import contextlib
import dataclasses
import importlib.util
import math
import os
import subprocess
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from liger_jax.planner.devices import GIB, allocatable, visible_bytes

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
# The other settings by which a user decides what JAX takes; the first is the fraction's new name.
_OTHERS = ("XLA_CLIENT_MEM_FRACTION", "TF_FORCE_UNIFIED_MEMORY")
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_QUERY = ("uuid", "memory.total", "memory.free", "mig.mode.current", "name")
_SECONDS = 20  # for the driver's answer; without persistence mode it starts first
_LEAST = 0.01  # of a card, where others hold all of it
_MUCH = GIB  # what others hold of a card, from which it is said


@dataclasses.dataclass(frozen=True)
class Card:
    """A card as the driver describes it."""

    uuid: str
    name: str
    total: int  # bytes
    free: int
    is_split: bool = False  # into instances, of which JAX sees one

    def fraction(self, count: int = 1) -> float:
        """The share that JAX's allocator may take of what CUDA counts, where `count` cards exchange gradients."""
        visible = visible_bytes(self.name, self.total)
        return max(_LEAST, math.floor(1000 * allocatable(min(self.free, visible), visible, count) / visible) / 1000)


def read() -> list[Card]:
    """The cards in the driver's order; none where it does not say."""
    try:
        return _by_library() if importlib.util.find_spec("pynvml") else _by_command()
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def visible(cards: Sequence[Card], environment: Mapping[str, str], local_rank: int | None = None) -> list[Card]:
    """The cards that CUDA shows to a process; none where it cannot be known which.

    `local_rank`: the index on its machine of a process that JAX gives one card.
    """
    named, shown = environment.get("CUDA_VISIBLE_DEVICES"), list(cards)
    # CUDA's own order is by speed, and the driver's by the bus.
    in_order = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({card.name for card in cards}) == 1
    if named is not None:
        shown = []
        for name in map(str.strip, named.split(",")):
            if name.isdecimal():
                found = [cards[int(name)]] if in_order and int(name) < len(cards) else []
            else:
                found = [card for card in cards if name and card.uuid.startswith(name)]
            if len(found) != 1:
                return []
            shown += found
    elif local_rank is not None and not in_order:
        return []
    own = shown if local_rank is None or len(shown) == 1 else shown[local_rank : local_rank + 1]
    return [] if any(card.is_split for card in own) else own


def take(environment: MutableMapping[str, str] = os.environ, are_several: bool = False, one_each: bool = False) -> str:
    """Lets JAX have what is free on the cards, before it starts.

    Nothing changes where the user has said what JAX takes, and where JAX has no cards. `are_several`: whether the run
    has several processes. `one_each`: whether JAX gives each process of a machine one card.

    Returns a line where other programs hold much of a card; else an empty one.
    """
    if is_decided(environment) or not are_used(environment):
        return ""
    ranks = [environment[name] for name in ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK") if name in environment]
    local_rank = int(ranks[0]) if one_each and ranks and ranks[0].isdecimal() else None
    cards = visible(read(), environment, local_rank)
    if not cards:
        return ""
    count = max(len(cards), 2 if are_several else 1)
    least = min(cards, key=lambda card: card.fraction(count))
    environment[FRACTION] = f"{least.fraction(count):.3f}"
    if (held := visible_bytes(least.name, least.total) - least.free) < _MUCH:
        return ""
    which = "the card" if len(cards) == 1 else f"card {cards.index(least)} of {len(cards)}"
    return f"other programs hold {held / GIB:.1f} GiB of {which}, and this one takes {least.fraction(count):.0%} of it"


def is_decided(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment says what JAX takes of a card, or that it takes memory as it needs it."""
    if environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0"):
        return True
    if environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() not in ("", "default", "bfc"):
        return True
    return any(environment.get(name) for name in (FRACTION, *_OTHERS))


def unclaimed(device: Any, count: int) -> str:
    """A sentence for a program whose JAX has started with its own share of the cards; empty where it has enough.

    `device`: one of them. `count`: how many the run takes.
    """
    stats = device.memory_stats() or {} if device.platform == "gpu" else {}
    limit = stats.get("bytes_limit", 0)
    if not limit or is_decided() or not (cards := visible(read(), os.environ)):
        return ""
    # Before JAX started, its own memory was free; it has its context already.
    held = stats.get("pool_bytes", limit)
    before = [dataclasses.replace(card, free=card.free + held) for card in cards]
    least = min(before, key=lambda card: card.fraction(count))
    could = least.fraction(count) * visible_bytes(least.name, least.total)
    if could < 1.03 * limit:
        return ""
    return (
        f"JAX has {limit / GIB:.1f} GiB of a card and could have {could / GIB:.1f}: set {FRACTION}="
        f"{least.fraction(count):.2f} in the environment before JAX starts"
    )


def are_used(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether JAX looks for cards when it starts."""
    platforms = environment.get("JAX_PLATFORMS", "").lower()
    if platforms and not any(name in platforms.split(",") for name in ("cuda", "gpu")):
        return False
    return any(importlib.util.find_spec(name) for name in _PLUGINS)


def _by_library() -> list[Card]:
    import pynvml  # pyright: ignore[reportMissingImports]  # of nvidia-ml-py

    def card(index: int) -> Card:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = (
            text.decode() if isinstance(text, bytes) else text
            for text in (pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle))
        )
        memory, is_split = pynvml.nvmlDeviceGetMemoryInfo(handle), False
        with contextlib.suppress(pynvml.NVMLError):  # most cards cannot be split
            is_split = bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
        return Card(uuid, name, int(memory.total), int(memory.free), is_split)

    try:
        pynvml.nvmlInit()
        try:
            return [card(index) for index in range(pynvml.nvmlDeviceGetCount())]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise OSError(str(error)) from error


def _by_command() -> list[Card]:
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    cards = []
    for line in done.stdout.splitlines():
        uuid, total, free, split, name = (field.strip() for field in line.split(",", 4))
        cards.append(Card(uuid, name, int(total) * 2**20, int(free) * 2**20, split == "Enabled"))
    return cards
