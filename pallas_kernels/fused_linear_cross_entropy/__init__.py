"""Softmax cross-entropy of a linear layer's output, without ever holding the logits."""
