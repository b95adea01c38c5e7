"""Which devices a test's mesh is on, and how the workers of a run share the cards."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import jax

# Of a card's memory, what the workers' arrays may take together if all of them peak at once. Few tests take more than a
# hundredth of a card, so that each worker may have more than its equal share.
SHARED = 1.5
ALONE = 0.75  # JAX's own default


def share_cards() -> None:
    """Before JAX looks for GPUs: each worker begins at another card, sees them all, and takes memory as it needs it.

    What the user has set stays as it is.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    cards = visible_cards()
    if len(cards) > 1:
        first = worker % len(cards)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(cards[first:] + cards[:first])
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if workers > 1 and "XLA_CLIENT_MEM_FRACTION" not in os.environ:  # the other's new name; JAX takes one of both
        share = min(ALONE, SHARED * max(len(cards), 1) / workers)
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{share:.3f}")


def visible_cards() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [card for card in named.split(",") if card]
    return [str(i) for i, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


@contextlib.contextmanager
def several(kernel: str = "xla") -> Iterator[list]:
    """Four devices for a mesh, or two: the platform's where it has several, else the CPU's simulated ones.

    Arrays are then made there by default, so that one device's results and the mesh's come from the same hardware. A
    compiled Pallas kernel runs on its platform alone: on one card it gets a mesh of that card.
    """
    found = jax.devices()
    if len(found) == 1 and kernel == "xla":
        found = jax.devices("cpu")
    found = found[: 4 if len(found) >= 4 else 2]
    on_them = contextlib.nullcontext() if found[0] == jax.devices()[0] else jax.default_device(found[0])
    with on_them:
        yield found


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """What a program holds beside its arguments and results, without the workspace of a library's products.

    cuBLAS is given 32 MiB on Hopper, bytes in the program's text, however small the products are.
    """
    workspaces = re.findall(r"\bs8\[([0-9]+)\]", compiled.as_text() or "")
    return compiled.memory_analysis().temp_size_in_bytes - max(map(int, workspaces), default=0)
