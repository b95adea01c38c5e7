"""Hugging Face's checkpoints and config.json, read and written."""
