"""Training: a step, optimizers, rows, and the loop around them.

`rows` and `waiting` are modules of small functions: the order of rows, and work during the compilation of programs.

`meshes` and `processes` have the devices and processes of a run: they parse the text of a mesh, and make the `Layout`
that the names of its axes stand for.
"""

from liger_jax.training.checkpoints import Checkpoints as Checkpoints
from liger_jax.training.compiling import compiler_options as compiler_options
from liger_jax.training.eight_bit import ScaleByAdam8bitState as ScaleByAdam8bitState
from liger_jax.training.eight_bit import adamw_8bit as adamw_8bit
from liger_jax.training.eight_bit import scale_by_adam_8bit as scale_by_adam_8bit
from liger_jax.training.errors import CheckpointError as CheckpointError
from liger_jax.training.errors import DamagedError as DamagedError
from liger_jax.training.errors import DiskError as DiskError
from liger_jax.training.errors import FolderError as FolderError
from liger_jax.training.errors import ForeignStepError as ForeignStepError
from liger_jax.training.errors import LockedError as LockedError
from liger_jax.training.errors import NotFiniteError as NotFiniteError
from liger_jax.training.errors import OutOfHostMemoryError as OutOfHostMemoryError
from liger_jax.training.errors import OutOfMemoryError as OutOfMemoryError
from liger_jax.training.errors import TrainingError as TrainingError
from liger_jax.training.evaluation import loss_and_accuracy as loss_and_accuracy
from liger_jax.training.evaluation import score_sums as score_sums
from liger_jax.training.evaluation import scoring as scoring
from liger_jax.training.loop import Loop as Loop
from liger_jax.training.optimizer import adamw as adamw
from liger_jax.training.optimizer import constant_schedule_with_warmup as constant_schedule_with_warmup
from liger_jax.training.optimizer import cosine_schedule_with_warmup as cosine_schedule_with_warmup
from liger_jax.training.optimizer import linear_schedule_with_warmup as linear_schedule_with_warmup
from liger_jax.training.optimizer import optimizer_named as optimizer_named
from liger_jax.training.optimizer import sgd as sgd
from liger_jax.training.packing import pack as pack
from liger_jax.training.packing import pack_completions as pack_completions
from liger_jax.training.packing import pack_pairs as pack_pairs
from liger_jax.training.packing import pad as pad
from liger_jax.training.packing import share_of_padding as share_of_padding
from liger_jax.training.rounding import HeldState as HeldState
from liger_jax.training.rounding import StochasticRoundingState as StochasticRoundingState
from liger_jax.training.rounding import held_in as held_in
from liger_jax.training.rounding import stochastic_rounding as stochastic_rounding
from liger_jax.training.step import language_model_loss as language_model_loss
from liger_jax.training.step import make_step as make_step
from liger_jax.training.step import model_arguments as model_arguments
from liger_jax.training.step import scored_tokens as scored_tokens
