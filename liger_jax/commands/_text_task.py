"""What `liger-jax finetune` trains for: that each token is predicted from those before it."""

from liger_jax.commands._task import Task
from liger_jax.training import loss_and_accuracy, score_sums, scored_tokens
from liger_jax.training.evaluation import mean_scores

TASK = Task(
    loss=lambda settings, data: loss_and_accuracy,
    normalizer=lambda settings, data: scored_tokens,
    sums=lambda graph, settings, data: score_sums(graph),
    scores=mean_scores,
    figures=("token_accuracy",),
    scored=("eval_loss", "eval_perplexity", "eval_token_accuracy"),
    shown=("loss", "token_accuracy", "tokens_per_second", "memory_gib"),
)
