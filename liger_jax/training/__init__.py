"""Training: a step with optax, optimizers, and documents packed into rows."""

from liger_jax.training.optimizer import StochasticRoundingState as StochasticRoundingState
from liger_jax.training.optimizer import stochastic_rounding as stochastic_rounding
from liger_jax.training.packing import pack as pack
from liger_jax.training.packing import share_of_padding as share_of_padding
from liger_jax.training.step import language_model_loss as language_model_loss
from liger_jax.training.step import make_step as make_step
from liger_jax.training.step import model_arguments as model_arguments
from liger_jax.training.step import scored_tokens as scored_tokens
