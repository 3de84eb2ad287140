"""What is measured of a model as its training goes on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from tune import rehearsal
from tune.datasets import open_prompts, placed_rows
from tune.distributed import World
from tune.errors import TuneError
from tune.evaluation.general import GeneralData
from tune.evaluation.tasks import Tasks, metrics
from tune.generation import Sampler, answer
from tune.tokenizers import Tokenizer
from tune.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass
class Measurement:
    measure: Callable[[], dict[str, float]]
    every: int | None
    first: bool
    measured_at: int = -1


class Evaluator:
    """Calls what measures a model, each when it is due: `tasks` as `Tasks` has them, answers to the `prompts` of a
    file, `general` data as `GeneralData` has it, and what is added with `add`, such as a validation.

    `prompts` is a `.txt` with one in each line, or rows as `tune generate` reads them. Tasks and prompts run
    every `every` optimizer steps and at the end, prompts also before the first step. `run` is a `tune.run.Run`: it
    excludes the time, and writes the answers into samples.jsonl. General data are measured before the first step, with
    whatever else is due, and at the end; a `general_kl` above `general_limit` is a warning.

    Raises:
        TuneError: as `Tasks` does; or the file cannot be read.
    """

    def __init__(
        self,
        run: Any,
        model: nn.Module,
        tokenizer: Tokenizer,
        world: World,
        *,
        every: PositiveInt | None = None,
        tasks: list[str] | None = None,
        include_path: str | None = None,
        limit: PositiveFloat | None = None,
        num_fewshot: NonNegativeInt | None = None,
        apply_chat_template: bool = False,
        prompts: str | None = None,
        max_new_tokens: PositiveInt = 128,
        temperature: NonNegativeFloat = 0.0,
        general: str | None = None,
        general_limit: PositiveFloat = 0.3,
    ):
        how = {"limit": limit, "num_fewshot": num_fewshot, "apply_chat_template": apply_chat_template}
        try:
            self.tasks = Tasks(tasks or [], tokenizer, include_path, model=model, group="evaluate.", **how)  # type: ignore[arg-type]
        except TuneError as error:
            if (rehearsed := rehearsal.current()) is None:
                raise
            rehearsed.report(error)  # the prompts may be wrong too
            self.tasks = Tasks([], tokenizer)
        if rehearsal.planning():
            prompts = general = None
        self.prompts = open_prompts(tokenizer, placed_rows(prompts, "evaluate.prompts")) if prompts else []
        self.general = GeneralData(general, model, tokenizer, world, run.path / "general") if general else None
        self.general_limit = general_limit
        self.run, self.model, self.tokenizer, self.world = run, model, tokenizer, world
        self.sampler = Sampler(
            max_new_tokens=max_new_tokens, temperature=temperature, stop_ids=tokenizer.stop_ids
        )  # of the same samples at each step: what changes is the model
        self.step = 0  # that is measured
        self.added: list[Measurement] = []
        self.own: list[Measurement] = []
        if self.tasks:
            self.own.append(Measurement(self._of_tasks, every, first=False))
        if self.prompts:
            self.own.append(Measurement(self._answers, every, first=True))
        self.of_general = Measurement(self._of_general, every, first=True)

    def add(
        self, measure: Callable[[], dict[str, float]], every: PositiveInt | None = None, first: bool = False
    ) -> None:
        """Call `measure` for its metrics `every` so many optimizer steps, at the end, and with `first` before the first
        step. All processes call it."""
        self.added.append(Measurement(measure, every, first))

    def __call__(self, step: int) -> dict[str, float]:
        """The metrics that are due after a step; those of step 0, before the first one, are recorded too. All processes
        call it.

        At the end of the training it measures nothing: `tune.run.Run.finish` does, when the last checkpoint is saved.
        """
        if step == 0:
            if self.general:
                with self.run.pause():
                    self.general.keep_base()
            metrics = self._measure(step, [part for part in self._all() if part.first])
            if metrics:
                self.run.record(step, metrics)
            return metrics
        if rehearsal.current():
            return self._measure(step, self._all())
        if self.run.is_end(step):
            return {}
        due = [part for part in self._all() if part.every and step % part.every == 0]
        if due and self.general and self.of_general not in due:
            due.append(self.of_general)
        return self._measure(step, due)

    def at_end(self, step: int) -> dict[str, float]:
        """All metrics that were not measured after this step already. All processes call it."""
        return self._measure(step, [part for part in self._all() if part.measured_at != step])

    def _all(self) -> list[Measurement]:
        return [*self.added, *self.own, *([self.of_general] if self.general else [])]

    def _measure(self, step: int, due: list[Measurement]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        self.step = step
        if rehearsal.planning():  # of a step alone
            return metrics
        for part in due:
            with self.run.pause():
                metrics |= part.measure()
            part.measured_at = step
        return metrics

    def _of_tasks(self) -> dict[str, float]:
        """By `task/metric`."""
        if rehearsal.current():  # what is wrong with them was found when they were made
            return {}
        return metrics(self.tasks(self.model, self.world, bootstrap_iters=0), self.world)

    def _of_general(self) -> dict[str, float]:
        assert self.general
        metrics = self.general()
        if metrics["general_kl"] > self.general_limit and not rehearsal.current():  # which has stand-in values
            self.run.info(
                f"warning: step {self.step}: general_kl is {metrics['general_kl']:.3f}, above evaluate.general_limit="
                f"{self.general_limit:g}: the model predicts general data otherwise than its base. A lower "
                "optimizer.lr, fewer epochs, or an adapter change it less"
            )
        return metrics

    def _answers(self) -> dict[str, float]:
        asked = {each.index: each.tokens for each in self.prompts}
        found = answer(self.model, self.sampler, self.tokenizer, asked, self.world)
        text = " ".join(found[0][0].text.split())
        shown = text if len(text) <= 200 else f"{text[:197]}..."
        self.run.info(f"step {self.step}, the first of {len(found)} prompts: {shown}")
        samples = [
            {
                "step": self.step, "index": prompt.index,
                "prompt": prompt.messages[-1]["content"] if prompt.messages else prompt.row["prompt"],
                "text": completion.text, "finish": completion.finish, "tokens": completion.tokens,
            }
            for prompt in self.prompts if self.world.is_main for completion in found[prompt.index]
        ]  # fmt: skip
        self.run.append("samples.jsonl", samples)
        return {}
