"""Run tasks of lm-evaluation-harness; they are found and checked before weights are read."""

import logging
import math
import os
import random
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from torch import nn

from tune.datasets import checked_messages, conversation
from tune.distributed import World
from tune.errors import TuneError
from tune.lookup import did_you_mean, needs
from tune.models import without_bars
from tune.tokenizers import Message, Tokenizer
from tune.types import NonNegativeInt, PositiveFloat, PositiveInt


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Restore Python's and NumPy's global generators, which lm-evaluation-harness seeds."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


class Tasks:
    """Tasks of lm-evaluation-harness with their data. `names` are the library's own names (`*` is allowed), names from
    YAML files in the folder `include_path`, or paths of such files. Call with a model to evaluate it.

    `limit` keeps only the first rows of each task (a number, or a share below 1); `num_fewshot` puts examples before
    each row. `model` is the model to evaluate, possibly on the meta device, to check that it supports the tasks.
    `group` is the prefix of settings in errors.

    Raises:
        TuneError: the library is not installed, a name is unknown, a task or its data cannot be used, or a task needs
            generation that the `model` does not support.
    """

    @_random_states_kept()
    def __init__(
        self,
        names: Sequence[str],
        tokenizer: Tokenizer,
        include_path: str | None = None,
        *,
        limit: PositiveFloat | None = None,
        num_fewshot: NonNegativeInt | None = None,
        apply_chat_template: bool = False,
        batch_size: PositiveInt | None = None,
        max_length: PositiveInt | None = None,
        model: nn.Module | None = None,
        group: str = "",
    ):
        self.settings = {"limit": limit, "num_fewshot": num_fewshot, "apply_chat_template": apply_chat_template}
        self.tokenizer, self.model, self.sizes, self.tasks = tokenizer, model, (batch_size, max_length), list[Any]()
        self.group = group
        if not names:
            return
        if apply_chat_template:
            tokenizer.require_chat_template()
        with needs("eval", f"{group}tasks"):
            from lm_eval.tasks import TaskManager
        logging.getLogger("lm_eval").setLevel(os.environ.get("LMEVAL_LOG_LEVEL", "ERROR"))
        if include_path is not None and not Path(include_path).is_dir():
            raise TuneError(f"{group}include_path: {include_path} is not a folder; set the folder of your task files")
        self.manager = TaskManager(include_path=include_path, include_defaults=False)
        named = {name for name in names if not Path(name).is_file()}
        if not named <= {*self.manager.all_tasks}:  # indexing the library's thousands of files takes seconds
            self.manager = TaskManager(include_path=include_path)
        for name in names:
            if not (found := self.manager.match_tasks([name])) and not Path(name).is_file():
                hint = did_you_mean(name, self.manager.all_tasks)
                raise TuneError(f"{group}tasks: unknown task {name!r}.{hint} `lm-eval ls tasks` lists all tasks")
            self.tasks += [task for each in found or [name] for task in self._load(each)]

    @property
    @_random_states_kept()
    def higher_is_better(self) -> dict[str, bool | None]:
        """By `task/metric` or `task/metric,filter`, also for groups: whether higher is better, or None if the task does
        not say. A task whose metrics are decided by its code also has the key `task/`."""
        from lm_eval.api.registry import METRIC_REGISTRY
        from lm_eval.api.task import ConfigurableTask

        found: dict[str, bool | None] = {}
        for each in self.tasks:
            groups = [each, *each.get_all_groups()] if hasattr(each, "get_all_groups") else []
            for task in each.get_all_tasks() if groups else [each]:
                names = [task.task_name, *(group.name for group in groups if task in group.get_all_tasks())]
                says = task.higher_is_better()
                is_known = type(task).process_results is ConfigurableTask.process_results
                if not (is_known and {*task._metric_fn_list.values()} <= {*METRIC_REGISTRY.values()}):
                    found |= {f"{name}/": None for name in names}
                filters = [("," + each.name) * (each.name != "none") for each in task._filters]
                found |= {f"{name}/{key}{each}": says[key] for name in names for key in says for each in filters}
        return found

    def __len__(self) -> int:
        return len(self.tasks)

    @_random_states_kept()
    def __call__(
        self,
        model: nn.Module,
        world: World,
        source: str = "",
        log_samples: bool = False,
        bootstrap_iters: int = 100_000,
    ) -> dict[str, Any]:
        """Return the results as lm-evaluation-harness writes them, with `samples` if `log_samples`. Only rank 0 gets
        them, but all processes must call this. `source` is the name of the model. Standard errors without a formula
        use `bootstrap_iters` draws; 0 leaves them out."""
        from lm_eval import simple_evaluate
        from lm_eval.loggers import EvaluationTracker

        from tune.evaluation.harness import HarnessModel

        tokenizer, tracker = self.tokenizer, EvaluationTracker()
        harness = HarnessModel(model, tokenizer, world, *self.sizes)
        with mock.patch("lm_eval.evaluator.get_git_commit_hash", _commit):
            results = simple_evaluate(
                harness, model_args={"pretrained": source}, tasks=[*self.tasks], task_manager=self.manager,
                evaluation_tracker=tracker, batch_size=harness.batch_size, device=str(world.device),
                log_samples=log_samples, bootstrap_iters=bootstrap_iters if world.is_main else 0,
                torch_random_seed=None, **self.settings,
            )  # fmt: skip
        if not world.is_main:
            return {}
        tracker.general_config_tracker.log_end_time()
        results |= {"eot_token_id": tokenizer.eos_id, "max_length": harness.max_length}
        for name, index in {"pad": tokenizer.pad_id, "eos": tokenizer.eos_id, "bos": tokenizer.bos_id}.items():
            results[f"tokenizer_{name}_token"] = [tokenizer.special_tokens.get(f"{name}_token"), str(index)]
        return results | asdict(tracker.general_config_tracker)

    def _load(self, name: str) -> list[Any]:
        from tune.evaluation.harness import require_generation, sampling

        try:
            loaded = self.manager.load([name])
            for task in loaded["tasks"].values():
                if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
                    raise TuneError("the task runs model-written code or has images: use lm-eval itself")
                if self.settings["num_fewshot"] and task.get_config("num_fewshot") != 0:  # as simple_evaluate does
                    task.set_config("num_fewshot", self.settings["num_fewshot"])
                task.set_fewshot_seed(0)
                with without_bars():
                    task.build_all_requests(limit=1)  # checks the templates against the data
                for request in task.instances:
                    if request.request_type == "generate_until":
                        _, given = sampling(request.args[1])
                        if self.model is not None:
                            require_generation(self.model, given["max_new_tokens"], self.sizes[1])
        except Exception as error:  # task files, their code and their data can raise anything
            reason = next(iter(str(error).splitlines()), "")
            if isinstance(error, ConnectionError) or "offline" in reason.lower():
                reason += ". Its data is on the Hugging Face hub: run it once with network access, or write your own "
                reason += f"task with local files ({self.group}include_path)"
            kind = "" if isinstance(error, TuneError) else f"{type(error).__name__}: "
            raise TuneError(f"{self.group}tasks: {name} cannot be used: {kind}{reason}") from error
        return [loaded["groups"][name]] if name in loaded.get("groups", ()) else [*loaded["tasks"].values()]


def _commit() -> str | None:
    """Return the commit that lm-evaluation-harness records, without printing errors outside a repository."""
    try:
        done = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True, errors="replace")
    except OSError:
        return None
    return done.stdout.strip() or None


def metrics(results: dict[str, Any], world: World) -> dict[str, float]:
    """Return the values of `results` by `task/metric` on all processes. All processes must call this."""
    found = {
        f"{task}/{name.removesuffix(',none')}": float(value)
        for task, values in results.get("results", {}).items()
        for name, value in values.items()
        if "," in name and "_stderr," not in name and isinstance(value, int | float)
    }
    return world.broadcast(found)


def require_numbers(found: Mapping[str, float]) -> None:
    """Raise TuneError if one of the metrics `found` is NaN or infinite."""
    if broken := [f"{name} is {value}" for name, value in found.items() if not math.isfinite(value)]:
        raise TuneError(
            f"{', '.join(broken)}. Weights or activations are not finite, or the metric is undefined for these "
            "answers: use an earlier checkpoint, dtype fp32 or more data"
        )


def exact_match(row: dict[str, Any], completion: str) -> float:
    """Return 1 if the `completion` equals the answer in the row except for surrounding blanks, else 0. The answer is
    the row's `answer`, `completion` or `output` (text, number or messages), or the last message of its conversation.

    A table makes the integers of a column fractions if it lacks one: 4.0 also equals `4`, and NaN is no answer."""
    return float(completion.strip() in _answers(row))


def _answers(row: dict[str, Any]) -> list[str]:
    """Return the answer of a row in any format of `tune.datasets`, as texts that are equally right.

    Raises TuneError if there is none.
    """
    for name in ("answer", "completion", "output"):
        value = row.get(name)
        if isinstance(value, str) and value:
            return [value.strip()]
        if isinstance(value, int | float | Decimal):
            if math.isnan(value):
                continue
            is_whole = not isinstance(value, bool) and value == value // 1
            return [str(value), str(int(value))] if is_whole else [str(value)]
        if value:
            return [_last_answer(checked_messages(value, name)).strip()]
    for name in ("messages", "conversations", "prompt"):
        if row.get(name) and not (name == "prompt" and isinstance(row[name], str)):
            return [_last_answer(conversation(row, name)).strip()]
    raise TuneError(
        f"exact_match: the row has no right answer. Its columns are {', '.join(row)}: name the one with the answer, "
        "'dataset.columns={output: its_name}'"
    )


def _last_answer(messages: list[Message]) -> str:
    if not messages or messages[-1]["role"] != "assistant" or not isinstance(messages[-1].get("content"), str):
        raise TuneError("exact_match: the row has no answer, completion or output, and no messages ending in an answer")
    return messages[-1]["content"]
