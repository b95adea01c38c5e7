"""Data as rows of tokens: files and datasets are read, documents encoded, and their pieces laid into rows.

It knows formats of files and of their rows, tokenizers, and the files that keep a run's tokens. It knows no model, no
loss, no mesh and no device; of a run it reads `options.RowOptions`.
"""
