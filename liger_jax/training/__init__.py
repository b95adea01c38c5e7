"""Training: a step with optax, optimizers, and documents packed into rows."""

from liger_jax.training.optimizer import adamw as adamw
from liger_jax.training.optimizer import constant_schedule as constant_schedule
from liger_jax.training.optimizer import cosine_schedule as cosine_schedule
from liger_jax.training.optimizer import held_in as held_in
from liger_jax.training.optimizer import linear_schedule as linear_schedule
from liger_jax.training.optimizer import sgd as sgd
from liger_jax.training.packing import pack as pack
from liger_jax.training.packing import share_of_padding as share_of_padding
from liger_jax.training.rounding import StochasticRoundingState as StochasticRoundingState
from liger_jax.training.rounding import stochastic_rounding as stochastic_rounding
from liger_jax.training.step import language_model_loss as language_model_loss
from liger_jax.training.step import make_step as make_step
from liger_jax.training.step import model_arguments as model_arguments
from liger_jax.training.step import scored_tokens as scored_tokens
