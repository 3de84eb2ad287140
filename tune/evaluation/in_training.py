"""What is asked of a model as its training goes on."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from tune.datasets import open_prompts, placed_rows
from tune.distributed import World
from tune.evaluation.tasks import Tasks, metrics
from tune.generation import Sampler, answer
from tune.tokenizers import Tokenizer


class InTraining:
    """`tasks` as `Tasks` has them, and answers to the `prompts` of a file: a `.txt` with one in each line, or rows as
    `tune generate` reads them. Due `every` so many optimizer steps and at the end, prompts also before the first step;
    without either, never.

    Raises:
        TuneError: as `Tasks` does; or the file cannot be read.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: nn.Module,
        world: World,
        tell: Callable[[str], None],
        *,
        every: int | None = None,
        tasks: Sequence[str] = (),
        include_path: str | None = None,
        limit: float | None = None,
        num_fewshot: int | None = None,
        apply_chat_template: bool = False,
        prompts: str | None = None,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
    ):
        how = {"limit": limit, "num_fewshot": num_fewshot, "apply_chat_template": apply_chat_template}
        self.tasks = Tasks(tasks, tokenizer, include_path, model=model, group="evaluate.", **how)  # type: ignore[arg-type]
        self.prompts = open_prompts(tokenizer, placed_rows(prompts, "evaluate.prompts")) if prompts else []
        self.tokenizer, self.world, self.tell, self.every = tokenizer, world, tell, every
        self.sampler = Sampler(
            max_new_tokens=max_new_tokens, temperature=temperature, stop_ids=tokenizer.stop_ids
        )  # of the same samples at each step: what changes is the model

    def are_due(self, step: int, is_end: float = False) -> bool:
        if step == 0:
            return bool(self.prompts)
        return bool((self.prompts or self.tasks) and (is_end or (self.every and step % self.every == 0)))

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """Those of the tasks, by `task/metric`. All processes call it."""
        return metrics(self.tasks(model, self.world, bootstrap_iters=0), self.world) if self.tasks else {}

    def samples(self, model: nn.Module, step: int) -> list[dict[str, Any]]:
        """The answers, for samples.jsonl; on the first process only, but all of them call it."""
        if not self.prompts:
            return []
        asked = {each.index: each.tokens for each in self.prompts}
        found = answer(model, self.sampler, self.tokenizer, asked, self.world)
        text = " ".join(found[0][0].text.split())
        self.tell(f"step {step}, the first of {len(found)} prompts: {text if len(text) <= 200 else text[:197] + '...'}")
        return [
            {
                "step": step, "index": prompt.index,
                "prompt": prompt.messages[-1]["content"] if prompt.messages else prompt.row["prompt"],
                "text": completion.text, "finish": completion.finish, "tokens": completion.tokens,
            }
            for prompt in self.prompts if self.world.is_main for completion in found[prompt.index]
        ]  # fmt: skip
