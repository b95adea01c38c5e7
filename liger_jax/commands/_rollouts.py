"""A step of GRPO on the host: completions are sampled and rewarded, and packed into rows for the update."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from liger_jax import losses
from liger_jax.commands import _rewards
from liger_jax.commands._completions_file import CompletionsFile
from liger_jax.commands._grpo_settings import GrpoSettings
from liger_jax.commands._prompt_rows import Line, PromptRows
from liger_jax.commands._tokenizer import Tokenizer
from liger_jax.models.core.generation_checks import why_rows_stay
from liger_jax.ops.labels import IGNORE_INDEX
from liger_jax.training import pack_completions
from liger_jax.training.errors import NotFiniteError
from liger_jax.training.rows import ARGUMENTS, INPUTS, Rows

OLD = "old_log_probs"  # in a batch of several updates, (batch, length)
SAMPLED = "sampling_log_probs"  # in a batch that is corrected for the sampler, (batch, length)


class Completion(NamedTuple):
    """What the model has added to a prompt.

    Attributes:
        tokens: (tokens,) int32, with the one that ends it.
        text: the text, without special tokens.
        is_cut: no token has ended it.
        log_probs: (tokens,) float32, the tokens' log-probabilities by the sampler; None if nobody asks for them.
    """

    tokens: np.ndarray
    text: str
    is_cut: bool
    log_probs: np.ndarray | None = None


class Rollouts:
    """The steps of a run, each with completions of its own.

    Args:
        settings: the run.
        data: its prompts.
        tokenizer: their tokenizer.
        place: puts a batch on the run's devices.

    Raises:
        UserError: a reward function is not there, or needs a field that a line does not have; or the file for
            completions is of no run.
    """

    def __init__(
        self,
        settings: GrpoSettings,
        data: PromptRows,
        tokenizer: Tokenizer,
        place: Callable[[Any], Any] = lambda batch: batch,
    ):
        self._settings, self._data, self._tokenizer, self._place = settings, data, tokenizer, place
        self._rewards = _rewards.found(settings.reward)
        for reward in self._rewards:
            for line in data.lines:
                reward.check(line.where, line.fields)
        self._file = CompletionsFile(Path(settings.out)) if settings.samples else None
        self._score: Any = None  # compiled with the first step

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of each reward's figures."""
        return tuple(f"rewards/{reward.name}/{name}" for reward in self._rewards for name in ("mean", "std"))

    @property
    def example(self) -> dict[str, Any]:
        """A batch without tokens, on the run's devices. It has a row for each completion, of which packing leaves some.

        `denominator` is the loss's, and `num_tokens` the number of tokens that count. A batch of several updates has
        the log-probabilities by the policy that has sampled, and one that is corrected for the sampler has the
        sampler's own.
        """
        return self._place(self._empty())

    def _empty(self) -> dict[str, Any]:
        shape = self._settings.batch, self._settings.length
        batch: dict[str, Any] = {name: np.zeros(shape, np.int32) for name in INPUTS}
        batch |= {"labels": np.full(shape, IGNORE_INDEX, np.int32), "advantages": np.zeros(shape, np.float32)}
        batch |= {OLD: np.zeros(shape, np.float32)} if self._settings.updates > 1 else {}
        batch |= {SAMPLED: np.zeros(shape, np.float32)} if self._settings.importance_sampling else {}
        return batch | {"denominator": np.float32(1), "num_tokens": np.float32(1)}

    def step(self, graph: Any, update: Any, state: Any, rows: Rows, frozen: Any) -> tuple[Any, Any]:
        """Samples, rewards and updates.

        Args:
            graph: the model's structure.
            update: the compiled step.
            state: parameters and the optimizer's state.
            rows: the prompts, each as often as its group is large, and the step's `number`.
            frozen: the variables that are not trained.

        Returns:
            The state, and the loss with figures by TRL's names, which are means over the updates.

        Raises:
            NotFiniteError: the model's logits are NaN.
            UserError: a reward function fails.
        """
        lines = self._data.lines_of(int(rows["number"]))
        completions = self._sampled(nnx.merge(graph, state[0], frozen), rows)
        rewards, figures = self._rewarded(lines, completions)
        if self._file is not None:
            self._file.add(int(rows["number"]) + 1, self._records(lines, completions, rewards))
        batch = self._packed(lines, completions, self._advantages(rewards))
        if self._settings.updates > 1:
            batch[OLD] = self._old_log_probs(graph, state[0], frozen, batch)
        told, seen, batch = [], np.count_nonzero(batch["segment_ids"]), self._place(batch)
        for _ in range(self._settings.updates):
            state, found = update(state, batch, frozen)
            told.append(found)
        loss, others = jax.tree.map(lambda *x: sum(map(float, x)) / len(x), *told)
        return state, (loss, {**others, **figures, **_lengths(completions), "num_tokens": seen})

    def _old_log_probs(self, graph: Any, params: Any, frozen: Any, batch: Rows) -> jax.Array:
        """Log-probabilities (batch, length) by the policy that has sampled, in as many parts as the update has."""
        parts, temperature = self._settings.num_parts, self._settings.temperature
        if self._score is None:

            def score(params, frozen, rows):
                of_part = lambda part: nnx.merge(graph, params, frozen).log_probs(**part, temperature=temperature)
                return jax.lax.map(lambda part: of_part(part).log_probs, rows)

            self._score = jax.jit(score)
        rows = {name: batch[name].reshape(parts, -1, self._settings.length) for name in ARGUMENTS}
        return self._score(params, frozen, rows).reshape(-1, self._settings.length)

    def _sampled(self, model: Any, rows: Rows) -> list[Completion]:
        """A group of completions for each prompt, one prompt after the other."""
        settings, number = self._settings, int(rows["number"])
        stops = tuple(stop for stop in self._tokenizer.stops if stop < model.config.vocab_size)
        prompts = jnp.asarray(rows["input_ids"][:: settings.group])
        found = model.generate(
            prompts,
            attention_mask=jnp.asarray(rows["attention_mask"][:: settings.group]),
            max_new_tokens=settings.completion_length,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            eos_token_id=stops,
            key=jax.random.fold_in(jax.random.key(settings.seed), number),
            num_return_sequences=settings.group,
            return_log_probs=settings.importance_sampling is not None,
            compact=why_rows_stay(model, prompts, settings.completion_length) is None,
        )
        tokens, log_probs = map(np.asarray, found) if settings.importance_sampling else (np.asarray(found), None)
        new = tokens[:, prompts.shape[1] :]
        if (new < 0).any():
            raise NotFiniteError(f"The model's logits are NaN at step {number + 1}, so that nothing can be sampled.")
        each_log_probs = [None] * len(new) if log_probs is None else log_probs
        return [self._completion(row, own, stops) for row, own in zip(new, each_log_probs, strict=True)]

    def _completion(self, row: np.ndarray, log_probs: np.ndarray | None, stops: Sequence[int]) -> Completion:
        ends = np.flatnonzero(np.isin(row, stops))
        last = int(ends[0]) if ends.size else len(row)
        text = self._tokenizer.text(row[:last].tolist(), special=False)
        tokens = row[: last + 1].astype(np.int32)
        return Completion(tokens, text, not ends.size, None if log_probs is None else log_probs[: len(tokens)])

    def _rewarded(self, lines: Sequence[Line], completions: Sequence[Completion]) -> tuple[np.ndarray, dict[str, Any]]:
        """Rewards (prompts, group), the weighted sums over the functions; and their figures."""
        group, figures, total = self._settings.group, {}, np.zeros((len(lines), self._settings.group))
        texts = [completion.text for completion in completions]
        for reward in self._rewards:
            of_lines = (
                reward.of(line.where, texts[i * group : (i + 1) * group], line.fields) for i, line in enumerate(lines)
            )
            found = np.array(list(of_lines))
            total += reward.weight * found
            figures |= {f"rewards/{reward.name}/mean": found.mean(), f"rewards/{reward.name}/std": found.std(ddof=1)}
        spread = total.std(axis=1, ddof=1)
        same = np.mean(total.max(axis=1) == total.min(axis=1))
        return total, figures | {
            "reward": total.mean(), "reward_std": spread.mean(), "frac_reward_zero_std": same
        }  # fmt: skip

    def _records(
        self, lines: Sequence[Line], completions: Sequence[Completion], rewards: np.ndarray
    ) -> list[dict[str, Any]]:
        """What is noted of a step's first completions."""
        found = []
        for number, each in enumerate(completions[: self._settings.samples]):
            line = lines[number // self._settings.group]
            asked = dict(line=line.where, prompt=self._tokenizer.text(line.tokens.tolist()))
            given = dict(completion=each.text, is_cut=each.is_cut, reward=float(rewards.flat[number]))
            found.append(asked | given)
        return found

    def _advantages(self, rewards: np.ndarray) -> np.ndarray:
        """(completions,)."""
        method, values = self._settings.advantages, jnp.asarray(rewards, jnp.float32)
        if method.startswith("reinforce"):
            found = losses.reinforce_advantages(values, group_baseline=method == "reinforce_baseline")
        else:
            found = losses.group_advantages(values, method)
        return np.asarray(found).reshape(-1)

    def _packed(
        self, lines: Sequence[Line], completions: Sequence[Completion], advantages: np.ndarray
    ) -> dict[str, Any]:
        """The batch of the update."""
        settings = self._settings
        sequences, labels = self._sequences(lines, completions)
        packed, places = pack_completions(
            [[each] for each in sequences], settings.length, labels=[[each] for each in labels]
        )
        batch, own = self._empty(), dict(packed) | self._numbers(packed, places, completions, advantages)
        # The update takes row i for part i mod `micro_batches`, and passes over parts without tokens.
        rows, size = np.arange(len(packed["input_ids"])), settings.batch // settings.num_parts
        to = rows % size * settings.num_parts + rows // size
        for name, values in own.items():
            batch[name][to] = values
        if num_tokens := sum(int(np.count_nonzero(each != IGNORE_INDEX)) for each in labels):
            mask = jnp.asarray(losses.shifted_labels(batch["labels"], batch["segment_ids"]) != IGNORE_INDEX)
            options = dict(segment_ids=batch["segment_ids"], num_segments=num_segments(settings))
            types = settings.loss_type, settings.loss_options()["max_length"]
            batch["denominator"] = np.float32(losses.policy_weights(mask, *types, **options)[1])
            batch["num_tokens"] = np.float32(num_tokens)
        return batch

    def _sequences(
        self, lines: Sequence[Line], completions: Sequence[Completion]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Each completion behind its prompt, and its labels, which the prompt has none of."""
        sequences, labels = [], []
        for number, (tokens, _, is_cut, _) in enumerate(completions):
            prompt = lines[number // self._settings.group].tokens
            counted = np.full_like(tokens, IGNORE_INDEX) if is_cut and self._settings.mask_truncated else tokens
            sequences.append(np.concatenate([prompt, tokens]))
            labels.append(np.concatenate([np.full_like(prompt, IGNORE_INDEX), counted]))
        return sequences, labels

    def _numbers(
        self, packed: Rows, places: np.ndarray, completions: Sequence[Completion], advantages: np.ndarray
    ) -> dict[str, np.ndarray]:
        """What packed rows have beside tokens: advantages, and perhaps the sampler's log-probabilities."""
        names = ("advantages", SAMPLED) if self._settings.importance_sampling else ("advantages",)
        found = {name: np.zeros(packed["input_ids"].shape, np.float32) for name in names}
        for (row, segment), advantage, (tokens, _, _, log_probs) in zip(places, advantages, completions, strict=True):
            at = np.flatnonzero(packed["segment_ids"][row] == segment + 1)
            found["advantages"][row][at] = advantage
            if log_probs is not None:  # a token's stands where the one before it is, as the policy's does
                found[SAMPLED][row][at[-len(tokens) :] - 1] = log_probs
        return found


def num_segments(settings: GrpoSettings) -> int:
    """The most completions in a row.

    Args:
        settings: the run.

    Returns:
        Their number: each has a token of its own, and one of its prompt.
    """
    return max(1, min(settings.batch, settings.length // 2))


def _lengths(completions: Sequence[Completion]) -> dict[str, float]:
    sizes, is_cut = (
        np.array(x) for x in ([len(each.tokens) for each in completions], [each.is_cut for each in completions])
    )
    return {
        "completions/mean_length": sizes.mean(),
        "completions/min_length": sizes.min(),
        "completions/max_length": sizes.max(),
        "completions/clipped_ratio": is_cut.mean(),
        "completions/mean_terminated_length": sizes[~is_cut].mean() if not is_cut.all() else 0.0,
    }
