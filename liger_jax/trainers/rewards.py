"""The reward functions of a run, tried before it and called as TRL calls them."""

import asyncio
import concurrent.futures
import contextlib
import copy
import inspect
import sys
import types
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from liger_jax.data.prompt_rows import Line
from liger_jax.trainers import reward_answers
from liger_jax.trainers.reward_answers import Notes, read, shown
from liger_jax.trainers.reward_functions import NO_COLUMNS, Reward, file_of, found, place_of, problem_of
from liger_jax.trainers.users_code import OutOfTimeError, current_folder, folder_kept, limited
from liger_jax.training import digests
from liger_jax.user_errors import UserError, users_words

_MADE_UP = ("The answer is 42.", "I do not know.")


class Scores(NamedTuple):
    """The scores that the functions give some completions."""

    numbers: np.ndarray  # (functions, completions) float64, without weights; NaN where a function has answered `None`
    metrics: dict[str, float]  # the means of the values given to `log_metric`, by name
    extras: dict[str, list[Any]]  # the values given to `log_extra`, by column: a JSON value for each completion


class Rewards:
    """The reward functions of a run.

    A call has lists over the whole batch, as TRL's: `prompts` and `completions`, which are texts, or lists of messages
    where a prompt is one; `completion_ids`; and each field of the lines. A function gets copies of those that it names.
    """

    def __init__(
        self,
        given: Sequence[str],
        lines: Sequence[Line],
        seconds: float = 1800.0,
        functions: Mapping[str, Callable[..., Any]] = types.MappingProxyType({}),
    ):
        self._home, self._seconds, self._printed = current_folder(), seconds, set[str]()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._modules_before = set(sys.modules)
        self.functions = [found(text, self._home, seconds, self._tell, functions) for text in given]
        names = [reward.name for reward in self.functions]
        for name in names:
            if names.count(name) > 1:
                raise UserError(
                    f"--reward names two functions {name!r}, whose figures would have the same name. Rename one."
                )
        for reward in self.functions:
            reward.check(lines)
        counts: dict[str, int] = {}
        for line in lines:
            for name in line.fields:
                counts[name] = counts.get(name, 0) + 1
        self._columns = [name for name, count in counts.items() if count == len(lines) and name not in NO_COLUMNS]
        if any(reward.takes_all for reward in self.functions):
            for name, count in counts.items():
                if count < len(lines) and name not in NO_COLUMNS:
                    where = next(line.where for line in lines if name not in line.fields)
                    self._tell(
                        f"rewards that take all fields do not get {name!r}, which {where} lacks. Write it into each "
                        "line, with null where there is no value."
                    )

    @property
    def weights(self) -> np.ndarray:
        """(functions,) float64."""
        return np.array([reward.weight for reward in self.functions])

    def tried(self, lines: Sequence[Line]) -> Scores:
        """Calls the functions with two completions that no model has written."""
        asked = [lines[0], lines[-1]]
        ids = [line.tokens[:4].tolist() for line in asked]
        return self.of("on two made-up completions, on which it is tried before the run,", asked, _MADE_UP, ids)

    def of(
        self, when: str, lines: Sequence[Line], texts: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> Scores:
        """Scores completions."""
        answers: list[Any] = []
        notes = [Notes() for _ in self.functions]
        try:
            for reward, note in zip(self.functions, notes, strict=True):
                arguments = self._arguments(reward, note, lines, texts, completion_ids)
                with self._users_code([reward], when, lines):
                    answer = reward.function(**arguments)
                    answers.append(answer if inspect.isawaitable(answer) else read(answer, len(lines)))
        except BaseException:
            for answer in filter(inspect.iscoroutine, answers):
                answer.close()  # which would warn that nobody has awaited it
            raise
        waiting = [i for i, answer in enumerate(answers) if inspect.isawaitable(answer)]
        if waiting:
            with self._users_code([self.functions[i] for i in waiting], when, lines, later=1.0):
                awaited = self._awaited({i: answers[i] for i in waiting}, when, lines)
            answers = [awaited.get(i, answer) for i, answer in enumerate(answers)]
        places, numbers, metrics, extras = [line.where for line in lines], [], {}, {}
        for reward, note, answer in zip(self.functions, notes, answers, strict=True):
            name = reward.name
            with self._users_code([reward], when, lines):
                numbers.append(reward_answers.numbers(name, reward.weight, answer, when, places))
                metrics |= {f"{name}/{each}" if each in metrics else each: x for each, x in note.means(name)}
                for each, values in note.columns(name, len(lines)):
                    extras[f"{name}/{each}" if each in extras else each] = values
        return Scores(np.array(numbers, np.float64), metrics, extras)

    def code(self) -> dict[str, str]:
        """Digests of the functions' files, and of the modules of the current folder that they have imported."""
        if self._home is None:
            return {}
        by_file, home = {}, Path(self._home).resolve()
        names = {reward.module for reward in self.functions} | (set(sys.modules) - self._modules_before)
        for name in sorted(names):
            file = getattr(sys.modules.get(name), "__file__", None)
            if file is None or name.partition(".")[0] in (*sys.stdlib_module_names, "liger_jax"):
                continue
            path = Path(file).resolve()
            if path.is_relative_to(home) and "site-packages" not in path.parts:
                with contextlib.suppress(OSError):
                    by_file[path.relative_to(home).as_posix()] = digests.of_file(path)[:12]
        return by_file

    def _arguments(self, reward: Reward, note: Notes, lines: Any, texts: Any, completion_ids: Any) -> dict[str, Any]:
        """The arguments of a function's call. They are copies, which the function may change."""
        makers: dict[str, Callable[[], Any]] = {
            "prompts": lambda: [copy.deepcopy(asked(line)) for line in lines],
            "completions": lambda: [_completion(line, text) for line, text in zip(lines, texts, strict=True)],
            "completion_ids": lambda: [[int(each) for each in ids] for ids in completion_ids],
            "log_extra": lambda: note.log_extra,
            "log_metric": lambda: note.log_metric,
        }
        for name in self._columns:
            makers[name] = lambda name=name: [copy.deepcopy(line.fields[name]) for line in lines]
        return {name: make() for name, make in makers.items() if reward.takes_all or name in reward.named}

    def _awaited(self, answers: Mapping[int, Awaitable[Any]], when: str, lines: Sequence[Line]) -> dict[int, Any]:
        """The results of async functions, run concurrently. The event loop stays, since their clients belong to it."""

        async def one(i: int) -> Any:
            with self._failures([self.functions[i]], when, lines, (asyncio.CancelledError, GeneratorExit)):
                limit = asyncio.timeout(self._seconds)
                try:
                    async with limit:
                        return read(await answers[i], len(lines))
                except TimeoutError:
                    if limit.expired():
                        raise OutOfTimeError from None
                    raise

        async def all_of_them() -> list[Any]:
            tasks = [asyncio.ensure_future(one(i)) for i in answers]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=1.0)

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            weakref.finalize(self, self._loop.close)
        run = self._loop.run_until_complete
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return dict(zip(answers, run(all_of_them()), strict=True))
        pool = concurrent.futures.ThreadPoolExecutor(1, "rewards")  # a notebook's own loop runs in this thread
        try:
            return dict(zip(answers, pool.submit(run, all_of_them()).result(), strict=True))
        finally:
            pool.shutdown(wait=False)

    @contextlib.contextmanager
    def _users_code(
        self, rewards: Sequence[Reward], when: str, lines: Sequence[Line], later: float = 0.0
    ) -> Iterator[None]:
        """A context for the rewards' code, interrupted `later` seconds after its timeout; errors are `UserError`s."""
        names = " and ".join(reward.name for reward in rewards)

        def last() -> None:
            print(f"liger-jax grpo: {self._too_long(names, when)} It catches every interruption.", file=sys.stderr)

        def moved(folder: str) -> None:
            self._tell(
                f"the reward {names} has left the current folder for {folder}; the run goes back to {self._home}"
            )

        in_time = limited(self._seconds + later, last)
        with self._failures(rewards, when, lines), folder_kept(self._home, moved), users_words(), in_time:
            yield

    @contextlib.contextmanager
    def _failures(
        self, rewards: Sequence[Reward], when: str, lines: Sequence[Line], passed: tuple[type[BaseException], ...] = ()
    ) -> Iterator[None]:
        """A context whose errors become `UserError`s, except those of the types in `passed`."""
        names = " and ".join(reward.name for reward in rewards)
        try:
            yield
        except (UserError, KeyboardInterrupt, *passed):
            raise
        except OutOfTimeError:
            raise UserError(self._too_long(names, when)) from None
        except SystemExit as error:
            place = place_of(error, file_of(rewards[0].function))
            raise UserError(
                f"The reward {names} has called sys.exit({shown(error.code)}) {when}{place}. It must return numbers."
            ) from error
        except BaseException as error:  # whatever the user's code may raise
            place = place_of(error, file_of(rewards[0].function))
            message = f"The reward {names} has failed {when} with {problem_of(error)}{place}. Correct it."
            if isinstance(error, TypeError | AttributeError | KeyError | IndexError):
                message += f" {_hint(lines)}"
            raise UserError(message) from error

    def _too_long(self, names: str, when: str) -> str:
        return (
            f"The reward {names} has not returned {when} within --reward-timeout={self._seconds:g} seconds. Correct "
            "it, or pass a longer timeout."
        )

    def _tell(self, line: str) -> None:
        if line not in self._printed:
            self._printed.add(line)
            tell(line)


def asked(line: Line) -> Any:
    """The prompt of a line as it is in the data: a text, or a list of messages."""
    prompt = line.fields.get("prompt")
    return prompt if isinstance(prompt, str | list) else line.fields.get("messages", "")


def tell(line: str) -> None:
    """Prints a line, past a progress bar."""
    from tqdm import tqdm

    tqdm.write(line)


def _completion(line: Line, text: str) -> Any:
    return text if isinstance(asked(line), str) else [{"role": "assistant", "content": text}]


def _hint(lines: Sequence[Line]) -> str:
    """A hint for a function that expects other arguments than it gets."""
    message = "A field of the data is a list with a value for each completion"
    if not all(isinstance(asked(line), str) for line in lines):
        message += ', and a completion is a list of messages: its text is completion[0]["content"]'
    return f"{message}."
