"""The package's jaxtyping annotations are checked in tests, where beartype is there to do it."""

import importlib.util

import jaxtyping

CHECKED = importlib.util.find_spec("beartype") is not None


def check() -> None:
    """Before liger_jax is imported."""
    if CHECKED:
        jaxtyping.install_import_hook("liger_jax", "beartype.beartype")
