"""Softmax cross-entropy over logits that exist."""
