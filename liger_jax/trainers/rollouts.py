"""A step of GRPO on the host: completions are sampled and rewarded, and packed into rows for the update."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from liger_jax.data.prompt_rows import Line, PromptRows
from liger_jax.data.tokenizer import Tokenizer
from liger_jax.models.generation import generate as generation
from liger_jax.models.generation.checks import why_rows_stay
from liger_jax.ops.labels import IGNORE_INDEX
from liger_jax.trainers import adapters, rollout_programs
from liger_jax.trainers.completions_file import CompletionsFile
from liger_jax.trainers.grpo_options import GrpoOptions
from liger_jax.trainers.options import Settings
from liger_jax.trainers.rewards import Rewards, Scores, tell
from liger_jax.training import pack_completions, processes
from liger_jax.training.errors import NotFiniteAtStartError, NotFiniteError
from liger_jax.training.meshes import NO_MESH
from liger_jax.training.row_sizes import Size
from liger_jax.training.rows import ARGUMENTS, INPUTS, Rows
from liger_jax.training.waiting import telling

OLD = "old_log_probs"  # in a batch of several updates, (batch, length)
_EQUAL_STEPS = 5  # consecutive steps without a difference, after which a run says so
SAMPLED = "sampling_log_probs"  # in a batch that is corrected for the sampler, (batch, length)


class Completion(NamedTuple):
    """A completion that the model has sampled for a prompt."""

    tokens: np.ndarray  # (tokens,) int32, with the one that ends it
    text: str  # the text, without special tokens
    is_cut: bool  # whether it was cut off, without a token that ends it
    # (tokens,) float32, the tokens' log-probabilities by the sampler; None if nobody asks for them.
    log_probs: np.ndarray | None = None


class Rollouts:
    """The steps of a run, each with its own completions."""

    def __init__(
        self,
        settings: Settings[GrpoOptions],
        data: PromptRows,
        tokenizer: Tokenizer,
        place: Callable[[Any], Any] = lambda batch: batch,
        sizes: Sequence[Size] = (),
    ):
        self._data, self._tokenizer, self._place = data, tokenizer, place
        self._method, self._recipe, self._length = settings.method, settings.recipe, settings.rows.length
        whole = Size(self._length, self._recipe.rows_at_once, self._recipe.num_micro_batches)
        self._sizes = list(sizes) or [whole]  # of a step's rows; the last has a row for each completion
        self._drops, self._noted = bool(settings.adapters.lora_dropout), settings.folder.samples
        self._rewards: Rewards | None = None  # of several processes only the first one has them
        self._file = CompletionsFile(Path(settings.folder.out)) if self._noted and processes.is_first() else None
        names, weights, metrics = processes.of_first(self._tried)
        self._names, self._weights, self._metrics = names, np.array(weights, np.float64), tuple(metrics)
        self._score: Any = None  # compiled with the first step
        self._is_compiled = self._has_sampled = False
        self._equal_steps = 0  # consecutive steps in which no group's rewards differ

    def _tried(self) -> tuple[list[str], list[float], list[str]]:
        """Imports and tries the rewards. Returns their names and weights, and the names of what they log."""
        method, lines = self._method, self._data.lines
        with jax.set_mesh(NO_MESH):  # a reward may compute with JAX, and other processes do not call it
            self._rewards = rewards = Rewards(method.reward, lines, method.reward_timeout, method.functions)
            with telling("trying the rewards on two made-up completions"):
                tried = rewards.tried(lines)
        if tried.extras and self._file is None:
            print(f"rewards log columns ({', '.join(tried.extras)}), which --samples writes into a file")
        return [each.name for each in rewards.functions], rewards.weights.tolist(), list(tried.metrics)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of each reward's figures, and of what rewards log."""
        names = tuple(f"rewards/{each}/{name}" for each in self._names for name in ("mean", "std"))
        return names + self._metrics

    def goes_on(self, log: dict[str, Any]) -> None:
        """Says so if the rewards' code has changed since the steps that are done."""
        before, now = log.get("reward_code", {}), {} if self._rewards is None else self._rewards.code()
        if log["steps"] and (changed := [name for name in now if name in before and before[name] != now[name]]):
            print(
                f"{' and '.join(changed)} changed since step {len(log['steps'])} was saved: from here on completions "
                "are scored by the new code"
            )
        log["reward_code"] = now

    @property
    def examples(self) -> list[tuple[Any, int]]:
        """For each size of a step's rows a batch without tokens, on the run's devices, and its micro-batches.

        `denominator` is the loss's, and `num_tokens` the number of tokens that count. A batch of several updates has
        the log-probabilities by the policy that has sampled, and one that is corrected for the sampler has the
        sampler's own.
        """
        return [(self._place(self._empty(size)), size.micro_batches) for size in self._sizes]

    def _empty(self, size: Size) -> dict[str, Any]:
        shape = size.num_rows, size.length
        batch: dict[str, Any] = {name: np.zeros(shape, np.int32) for name in INPUTS}
        batch |= {"labels": np.full(shape, IGNORE_INDEX, np.int32), "advantages": np.zeros(shape, np.float32)}
        batch |= {OLD: np.zeros(shape, np.float32)} if self._method.updates > 1 else {}
        batch |= {SAMPLED: np.zeros(shape, np.float32)} if self._method.importance_sampling else {}
        batch = adapters.numbered(batch, np.zeros(shape), 0) if self._drops else batch
        return batch | {"denominator": np.float32(1), "num_tokens": np.float32(1)}

    def step(self, graphs: tuple[Any, Any], update: Any, state: Any, rows: Rows, frozen: Any) -> tuple[Any, Any]:
        """Samples, rewards and updates.

        `graphs`: the structure of the model that is trained, and of the one that samples with its parameters.

        Returns the state, and the loss with figures by TRL's names, which are means over the updates.
        """
        (graph, sampling), number = graphs, int(rows["number"])
        lines = self._data.lines_of(number)
        with self._announced():
            completions = self._sampled(nnx.merge(sampling, state[0], frozen), rows)
        scores = self._scores(number, lines, completions)
        rewards, figures = self._rewarded(scores)
        self._look_at_equals(number, scores.numbers, rewards)
        if self._file is not None:
            self._file.add(number + 1, self._records(lines, completions, rewards, scores.extras))
        batch = self._packed(lines, completions, self._advantages(rewards))
        if self._method.updates > 1:
            batch[OLD] = self._old_log_probs(graph, state[0], frozen, batch)
        updates, seen, batch = [], np.count_nonzero(batch["segment_ids"]), self._place(batch)
        for i in range(self._method.updates):
            if self._drops:
                step = np.uint32((number * self._method.updates + i) % 2**32)
                batch = {**batch, **self._place({adapters.STEP: step})}
            state, result = update(state, batch, frozen)
            updates.append(result)
        loss, others = jax.tree.map(lambda *x: sum(map(float, x)) / len(x), *updates)
        if np.isfinite(float(updates[0][0])) and not np.isfinite(
            loss
        ):  # an update is the cause, also within the first step
            raise NotFiniteError(f"The loss is {loss} at step {int(rows['number']) + 1}, so training stops.")
        return state, (loss, {**others, **figures, **_lengths(completions), "num_tokens": seen})

    @contextlib.contextmanager
    def _announced(self) -> Iterator[None]:
        """A context for sampling, whose programs may be compiled in the first step."""
        if self._has_sampled:
            yield
            return
        tell(f"{'' if self._is_compiled else 'sampling is compiled, and '}the first completions are sampled …")
        start, self._has_sampled = time.perf_counter(), True
        yield
        tell(f"sampling took {time.perf_counter() - start:.1f} s")

    def _old_log_probs(self, graph: Any, params: Any, frozen: Any, batch: Rows) -> np.ndarray:
        """Log-probabilities (batch, length) by the sampling policy, in as many micro-batches as the update has."""
        micro_batches, temperature = self._recipe.num_micro_batches, self._method.temperature
        of_micro_batches = lambda batch: {
            name: batch[name].reshape(micro_batches, -1, self._length) for name in ARGUMENTS
        }
        if self._score is None:

            def score(params, frozen, rows):
                of_batch = lambda batch: nnx.merge(graph, params, frozen).log_probs(**batch, temperature=temperature)
                return jax.lax.map(lambda batch: of_batch(batch).log_probs, rows)

            self._score = jax.jit(score)
            others = [size for size in self._sizes if size.num_rows != len(batch["input_ids"])]
            for size in others:  # so that all are compiled in the first step
                self._score(params, frozen, of_micro_batches(self._empty(size)))
        scored = self._score(params, frozen, of_micro_batches(batch))
        return processes.whole(scored).reshape(-1, self._length)

    def lowered(self, model: Any) -> list[Any]:
        """The sampler's programs for a model of types, lowered: they must be compiled, and kept, before the first step
        asks for them.
        """
        self._is_compiled = True
        prompts, options = self._asked(model, {**self._data.batches()(0), "number": np.int32(0)})
        return generation.lowered(model, prompts, **options)

    def _asked(self, model: Any, rows: Rows) -> tuple[Any, dict[str, Any]]:
        """A step's prompts on the devices, and the options of `generate`."""
        method = self._method
        of_each = (rows[name][:: method.group] for name in ("input_ids", "attention_mask"))
        seeds = np.uint32(self._recipe.seed), np.uint32(rows["number"])
        prompts, mask, key = rollout_programs.sampler_inputs(*of_each, *seeds)
        return prompts, dict(
            attention_mask=mask,
            max_new_tokens=method.completion_length,
            temperature=method.temperature,
            top_p=method.top_p,
            top_k=method.top_k,
            eos_token_id=tuple(stop for stop in self._tokenizer.stops if stop < model.config.vocab_size),
            key=key,
            num_return_sequences=method.group,
            return_log_probs=method.importance_sampling is not None,
            compact=why_rows_stay(model, prompts, method.completion_length) is None,
        )

    def _sampled(self, model: Any, rows: Rows) -> list[Completion]:
        """A group of completions for each prompt, one prompt after the other."""
        number, (prompts, options) = int(rows["number"]), self._asked(model, rows)
        stops, output = options["eos_token_id"], model.generate(prompts, **options)
        tokens, *others = map(processes.whole, output if options["return_log_probs"] else (output,))
        new = tokens[:, prompts.shape[1] :]
        if (new < 0).any():
            error = NotFiniteError if number else NotFiniteAtStartError
            raise error(f"The model's logits are NaN at step {number + 1}, so that nothing can be sampled.")
        each_log_probs = others[0] if others else [None] * len(new)
        return [self._completion(row, own, stops) for row, own in zip(new, each_log_probs, strict=True)]

    def _completion(self, row: np.ndarray, log_probs: np.ndarray | None, stops: Sequence[int]) -> Completion:
        ends = np.flatnonzero(np.isin(row, stops))
        last = int(ends[0]) if ends.size else len(row)
        text = self._tokenizer.text(row[:last].tolist(), special=False)
        tokens = row[: last + 1].astype(np.int32)
        return Completion(tokens, text, not ends.size, None if log_probs is None else log_probs[: len(tokens)])

    def _scores(self, number: int, lines: Sequence[Line], completions: Sequence[Completion]) -> Scores:
        """The reward functions' scores of a step's completions. Columns that they log stay in the first process."""
        of_each, extras = [line for line in lines for _ in range(self._method.group)], dict[str, list[Any]]()

        def scored() -> Any:
            assert self._rewards is not None
            texts, ids = [each.text for each in completions], [each.tokens.tolist() for each in completions]
            with jax.set_mesh(NO_MESH):
                scores = self._rewards.of(f"in step {number + 1}", of_each, texts, ids)
            extras.update(scores.extras)
            return scores.numbers.tolist(), {name: float(mean) for name, mean in scores.metrics.items()}

        numbers, metrics = processes.of_first(scored)
        return Scores(np.array(numbers, np.float64), metrics, extras)

    def _rewarded(self, scores: Scores) -> tuple[np.ndarray, dict[str, Any]]:
        """Rewards (prompts, group), the weighted sums over the functions, NaN where none applies; and their figures."""
        numbers = scores.numbers
        total = np.nansum(self._weights[:, None] * numbers, axis=0)
        total[np.isnan(numbers).all(axis=0)] = np.nan
        total, figures = total.reshape(-1, self._method.group), dict[str, Any](scores.metrics)
        for name, own in zip(self._names, numbers, strict=True):
            figures |= {f"rewards/{name}/mean": _mean(own), f"rewards/{name}/std": _std(own)}
        spreads = np.array([_std(group) for group in total])
        same = np.mean([_are_equal(group) for group in total])
        return total, figures | {"reward": _mean(total), "reward_std": _mean(spreads), "frac_reward_zero_std": same}

    def _look_at_equals(self, number: int, numbers: np.ndarray, rewards: np.ndarray) -> None:
        """Says so where nothing can be learned from rewards: in the run's first step, and where they stay equal."""
        if number == 0:
            for name, own in zip(self._names, numbers, strict=True):
                if np.isnan(own).all():
                    tell(
                        f"the reward {name} answers all {len(own)} completions of the first step with None, so "
                        "that it says nothing of any. Return a number for each completion that it applies to"
                    )
                elif _are_equal(own):
                    tell(
                        f"the reward {name} gives all {len(own)} completions of the first step {_mean(own):g}: "
                        "either the task is too hard, or too easy, for the model, or the function compares a text with "
                        "a list. Prompts, completions and the fields of the data are lists with a value for each "
                        "completion: zip(completions, answer)"
                    )
        self._equal_steps = self._equal_steps + 1 if all(map(_are_equal, rewards)) else 0
        if self._equal_steps and self._equal_steps % _EQUAL_STEPS == 0:
            tell(
                f"no group of completions had rewards that differ in the last {self._equal_steps} steps, so nothing "
                "was learned. Reward partial success, take prompts that the model answers well now and then, or pass "
                "a higher --temperature or a larger --group"
            )

    def _records(
        self,
        lines: Sequence[Line],
        completions: Sequence[Completion],
        rewards: np.ndarray,
        extras: dict[str, list[Any]],
    ) -> list[dict[str, Any]]:
        """The records of a step's first completions, with the columns that rewards log."""
        records = []
        for number, each in enumerate(completions[: self._noted]):
            line = lines[number // self._method.group]
            asked = dict(line=line.where, prompt=self._tokenizer.text(line.tokens.tolist()))
            reward = float(rewards.flat[number])
            given = dict(completion=each.text, is_cut=each.is_cut, reward=None if np.isnan(reward) else reward)
            own, taken = asked | given, {"step", *asked, *given}
            records.append(
                own | {f"log_extra/{c}" if c in taken else c: values[number] for c, values in extras.items()}
            )
        return records

    def _advantages(self, rewards: np.ndarray) -> np.ndarray:
        """(completions,), 0 where no reward applies."""
        return np.asarray(rollout_programs.advantages(rewards.astype(np.float32), self._method.advantages)).reshape(-1)

    def _packed(
        self, lines: Sequence[Line], completions: Sequence[Completion], advantages: np.ndarray
    ) -> dict[str, Any]:
        """The batch of the update."""
        method, recipe = self._method, self._recipe
        sequences, labels = self._sequences(lines, completions)
        packed, places = pack_completions(
            [[each] for each in sequences], self._length, labels=[[each] for each in labels]
        )
        size = next(size for size in self._sizes if size.num_rows >= len(packed["input_ids"]))
        batch, own = self._empty(size), dict(packed) | self._numbers(packed, places, completions, advantages)
        # The update takes row i for micro-batch i mod `micro_batches`, and passes over micro-batches without tokens.
        rows = np.arange(len(packed["input_ids"]))
        to = rows % size.rows * size.micro_batches + rows // size.rows
        for name, values in own.items():
            batch[name][to] = values
        if num_tokens := sum(int(np.count_nonzero(each != IGNORE_INDEX)) for each in labels):
            types = method.loss_type, method.loss_options()["max_length"], num_segments(recipe.batch, self._length)
            batch["denominator"] = np.float32(
                rollout_programs.denominator(batch["labels"], batch["segment_ids"], *types)
            )
            batch["num_tokens"] = np.float32(num_tokens)
        return batch

    def _sequences(
        self, lines: Sequence[Line], completions: Sequence[Completion]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Each prompt with its completion, and labels for the completion alone."""
        sequences, labels = [], []
        for number, (tokens, _, is_cut, _) in enumerate(completions):
            prompt = lines[number // self._method.group].tokens
            counted = np.full_like(tokens, IGNORE_INDEX) if is_cut and self._method.mask_truncated else tokens
            sequences.append(np.concatenate([prompt, tokens]))
            labels.append(np.concatenate([np.full_like(prompt, IGNORE_INDEX), counted]))
        return sequences, labels

    def _numbers(
        self, packed: Rows, places: np.ndarray, completions: Sequence[Completion], advantages: np.ndarray
    ) -> dict[str, np.ndarray]:
        """The other columns of packed rows: advantages, and perhaps the sampler's log-probabilities and pieces."""
        dtypes: dict[str, Any] = {"advantages": np.float32}
        dtypes |= {SAMPLED: np.float32} if self._method.importance_sampling else {}
        dtypes |= {adapters.PIECES: np.uint32} if self._drops else {}
        columns = {name: np.zeros(packed["input_ids"].shape, dtype) for name, dtype in dtypes.items()}
        of_each = zip(places, advantages, completions, strict=True)
        for number, ((row, segment), advantage, (tokens, _, _, log_probs)) in enumerate(of_each):
            at = np.flatnonzero(packed["segment_ids"][row] == segment + 1)
            columns["advantages"][row][at] = advantage
            if self._drops:
                columns[adapters.PIECES][row][at] = number
            if log_probs is not None:  # stored at the position before the token, as the policy's are
                columns[SAMPLED][row][at[-len(tokens) :] - 1] = log_probs
        return columns


def num_segments(batch: int, length: int) -> int:
    """The most completions in a row."""
    return max(1, min(batch, length // 2))


def _mean(numbers: np.ndarray) -> float:
    """The mean of the numbers that are not NaN; NaN if there are none."""
    there = numbers[~np.isnan(numbers)]
    return float(there.mean()) if there.size else np.nan


def _std(numbers: np.ndarray) -> float:
    """The standard deviation, with n − 1, of the numbers that are not NaN; NaN if there are fewer than two."""
    there = numbers[~np.isnan(numbers)]
    return float(there.std(ddof=1)) if there.size > 1 else np.nan


def _are_equal(numbers: np.ndarray) -> bool:
    """Whether the numbers that are not NaN are all equal."""
    there = numbers[~np.isnan(numbers)]
    return there.size == 0 or bool(there.max() == there.min())


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
