"""Normalisations: one engine for passes over rows, one file of formulas for each norm.

Begin with `row_pass`. A norm's file (`rms_norm`, `layer_norm`, …) says what is computed of a row; `run_xla`,
`run_triton`, `run_mosaic_gpu` and `run_mosaic_tpu` compute it, in tiles from the `tiles_…` file beside each.
`backends` joins a norm and a runner.
"""
