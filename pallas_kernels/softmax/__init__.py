"""Softmax, and sparsemax (Martins and Astudillo, 2016)."""
