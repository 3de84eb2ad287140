"""Run evaluations during training."""

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
from tune.evaluation.validation import evaluate
from tune.generation import Sampler, answer
from tune.tokenizers import Tokenizer
from tune.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass
class Measurement:
    measure: Callable[[], dict[str, float] | None]
    every: int | None
    first: bool
    measured_at: int = -1


class Evaluator:
    """Run measurements every `every` optimizer steps and at the end: the `loss_fn` on the validation data of `data` (a
    `tune.datasets.DataLoader`), `tasks` (see `Tasks`), answers to `prompts`, and measurements added with `add`.

    With `first`, validation and tasks also run before the first step; prompts always do. `prompts` is a `.txt` file
    with one prompt per line, or a file of rows as for `tune generate`. `general` data (see `GeneralData`) is measured
    before the first step, together with any other measurement, and at the end; a `general_kl` above `general_limit`
    prints a warning. `run` is a `tune.run.Run`: it excludes the time, and writes the answers to samples.jsonl. Without
    a `loss_fn`, add a validation of your own.

    Raises:
        TuneError: as `Tasks` does; or the file cannot be read.
    """

    def __init__(
        self,
        run: Any,
        model: nn.Module,
        tokenizer: Tokenizer,
        data: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        *,
        every: PositiveInt | None = None,
        first: bool = False,
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
        self.run, self.model, self.tokenizer, self.loss_fn, self.data = run, model, tokenizer, loss_fn, data
        self.world: World = run.world
        self.every, self.first = every, first
        how = {"limit": limit, "num_fewshot": num_fewshot, "apply_chat_template": apply_chat_template}
        if rehearsal.planning():  # a plan measures only the step; files of tasks may have code
            tasks = include_path = prompts = general = None
        try:
            self.tasks = Tasks(tasks or [], tokenizer, include_path, model=model, group="evaluate.", **how)  # type: ignore[arg-type]
        except TuneError as error:
            if (rehearsed := rehearsal.current()) is None:
                raise
            rehearsed.report(error)  # the prompts may be wrong too
            self.tasks = Tasks([], tokenizer)
        if self.tasks:  # for checkpointer.keep_best
            run.higher_is_better = self.tasks.higher_is_better
        self.prompts = open_prompts(tokenizer, placed_rows(prompts, "evaluate.prompts")) if prompts else []
        self.general = None
        if general:
            before = run.continues()
            self.general = GeneralData(general, model, tokenizer, self.world, run.path / "general", before)
            try:
                self.general.require_base()
            except TuneError as error:
                if (rehearsed := rehearsal.current()) is None:
                    raise
                rehearsed.report(error)
        self.general_limit = general_limit
        self.sampler = Sampler(
            max_new_tokens=max_new_tokens, temperature=temperature, stop_ids=tokenizer.stop_ids
        )  # the same draws at each step, so that only the model changes
        self.step = 0  # the step that is being measured
        self.metrics: dict[str, float] = {}  # of this step, by the measurements before the current one
        self.added: list[Measurement] = []
        self.own: list[Measurement] = []
        if loss_fn and self.validation:
            self.add(self._loss)
        if self.tasks:
            self.own.append(Measurement(self._of_tasks, every, first))
        if self.prompts:
            self.own.append(Measurement(self._answers, every, first=True))
        self.of_general = Measurement(self._of_general, every, first=True)

    @property
    def validation(self) -> Any:
        """The validation data, or None."""
        return None if self.data is None else self.data.dataset.validation

    def add(
        self,
        measure: Callable[[], dict[str, float] | None],
        every: PositiveInt | None = None,
        first: bool | None = None,
    ) -> None:
        """Call `measure` for metrics every `every` optimizer steps and at the end; with `first`, also before the first
        step. None takes the evaluator's own `every` and `first`. `measure` may read the attribute `metrics`, the
        results of the validation and of measurements added before, and return None. All processes must call this."""
        self.added.append(Measurement(measure, every or self.every, self.first if first is None else first))

    def __call__(self, step: int) -> dict[str, float]:
        """Return the metrics that are due after a step. Metrics of step 0, before the first step, are also recorded.
        All processes must call this.

        After the last step nothing is measured: `tune.run.Run.finish` does that once the last checkpoint is saved.
        After an interrupted step the continued run does it before its first step.
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
        return self.due(step)

    def due(self, step: int) -> dict[str, float]:
        """Return the metrics that are due after a step, also if it was the last one. All processes must call this."""
        due = [part for part in self._all() if part.every and step % part.every == 0]
        if due and self.general and self.of_general not in due:
            due.append(self.of_general)
        return self._measure(step, due)

    def at_end(self, step: int) -> dict[str, float]:
        """Return all metrics that have not been measured after this step yet. All processes must call this."""
        return self._measure(step, [part for part in self._all() if part.measured_at != step])

    def _all(self) -> list[Measurement]:
        return [*self.added, *self.own, *([self.of_general] if self.general else [])]

    def _measure(self, step: int, due: list[Measurement]) -> dict[str, float]:
        self.step, self.metrics = step, {}
        if rehearsal.planning():  # a plan measures only the step
            return self.metrics
        for part in due:
            with self.run.pause():
                self.metrics |= part.measure() or {}
            part.measured_at = step
        return self.metrics

    def _loss(self) -> dict[str, float]:
        return evaluate(self.model, self.data.validation_batches(), self.loss_fn, self.world)  # type: ignore[arg-type]

    def _of_tasks(self) -> dict[str, float]:
        """Return metrics by `task/metric`."""
        if rehearsal.current():  # tasks were checked when they were loaded
            return {}
        return metrics(self.tasks(self.model, self.world, bootstrap_iters=0), self.world)

    def _of_general(self) -> dict[str, float]:
        assert self.general
        metrics = self.general()
        if metrics["general_kl"] > self.general_limit and not rehearsal.current():  # which has stand-in values
            self.run.info(
                f"warning: step {self.step}: general_kl is {metrics['general_kl']:.3g}, above evaluate.general_limit="
                f"{self.general_limit:g}: on general data the model's predictions moved away from its base. A lower "
                "optimizer.lr, fewer epochs or an adapter changes it less"
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
