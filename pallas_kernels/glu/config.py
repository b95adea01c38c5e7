"""Tile size of the gated units' kernels."""

BLOCK_SIZE = 2048  # elements a program: 16 bytes a load for each of 8 warps' threads
NUM_WARPS = 8
