"""Kernels: arrays in, arrays out. One folder per op, the same file names in each; see CONTRIBUTING.md."""
