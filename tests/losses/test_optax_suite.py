"""Optax's own tests of the losses whose names we have, run on ours."""

import importlib

import pytest

from liger_jax import losses

pytestmark = pytest.mark.parity


def run_on_ours(test_class, name):
    """A class of optax's tests, of a module that calls the loss as an attribute of `module`."""

    class OnOurs(test_class):
        def setUp(self):
            super().setUp()
            module = importlib.import_module(test_class.__module__)
            of = getattr(module, "_classification", None) or module._regression
            patch = pytest.MonkeyPatch()
            patch.setattr(of, name, getattr(losses, name))
            self.addCleanup(patch.undo)

    OnOurs.__name__ = OnOurs.__qualname__ = f"Test{test_class.__name__.removesuffix('Test')}"
    return OnOurs


classification = pytest.importorskip("optax.losses._classification_test")
regression = pytest.importorskip("optax.losses._regression_test")
TestIntegerLabels = run_on_ours(
    classification.SoftmaxCrossEntropyWithIntegerLabelsTest, "softmax_cross_entropy_with_integer_labels"
)
TestKLDivergence = run_on_ours(classification.KLDivergenceTest, "kl_divergence")
TestCosineDistance = run_on_ours(regression.CosineDistanceTest, "cosine_distance")
