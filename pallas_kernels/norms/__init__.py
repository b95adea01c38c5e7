"""One pass over the rows of matrices: what every normalisation's forward and backward is.

A `RowPass` is the mathematics, written for any part of a row's columns: stages whose terms are summed along each row,
then outputs element by element. `xla`, `triton` and `mosaic_tpu` each run one, in tiles of their own.
"""
