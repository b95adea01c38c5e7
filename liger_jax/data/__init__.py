"""Data as rows of tokens: files and datasets are read, documents encoded, and their pieces laid into rows.

It knows formats of files and of their rows, tokenizers, and the files that keep a run's tokens. It knows no model, no
loss, no mesh and no device; of a run it reads `options.RowOptions`. `public` has the functions for your own loops.
"""

from liger_jax.data.public import ChatTemplate as ChatTemplate
from liger_jax.data.public import Tokens as Tokens
from liger_jax.data.public import num_scored as num_scored
from liger_jax.data.public import prompt as prompt
from liger_jax.data.public import read as read
from liger_jax.data.public import rows as rows
from liger_jax.data.public import text as text
from liger_jax.data.public import tokens as tokens
