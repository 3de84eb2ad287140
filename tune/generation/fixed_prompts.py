"""What a model answers as its training goes on."""

from collections.abc import Callable
from typing import Any

from torch import nn

from tune.datasets.prompts import open_prompts, placed_rows
from tune.distributed import World
from tune.generation.sampler import Sampler, answer
from tune.tokenizers import Tokenizer


class FixedPrompts:
    """The answers to the `prompts` of a file, a `.txt` with one in each line or rows as `tune generate` reads them,
    `every` so many optimizer steps and at the end. Without `prompts` nothing is ever due."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        world: World,
        tell: Callable[[str], None],
        *,
        prompts: str | None = None,
        every: int | None = None,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
    ):
        self.prompts = open_prompts(tokenizer, placed_rows(prompts, "evaluate.prompts")) if prompts else []
        self.tokenizer, self.world, self.tell, self.every = tokenizer, world, tell, every
        self.sampler = Sampler(
            max_new_tokens=max_new_tokens, temperature=temperature, stop_ids=tokenizer.stop_ids
        )  # of the same samples at each step: what changes is the model

    def are_due(self, step: int, is_end: float = False) -> bool:
        return bool(self.prompts and (is_end or step == 0 or (self.every and step % self.every == 0)))

    def __call__(self, model: nn.Module, step: int) -> list[dict[str, Any]]:
        """The answers, for samples.jsonl; on the first process only, but all of them call it."""
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
