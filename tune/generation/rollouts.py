"""Sample completions with rewards, measure them, and put them into batches."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tune.datasets import GlobalBatch, Prompt, Prompts
from tune.distributed import World, current_world
from tune.errors import explained
from tune.generation.rollout import Episode, Reward, check_prompts, counts, global_batch, rollout, statistics
from tune.generation.sampler import Sampler
from tune.lookup import locate
from tune.tokenizers import Tokenizer
from tune.types import PositiveInt


class Rollouts:
    """Episodes of a `model`: `rollouts(prompts, step)` is a group of `samples` episodes for each of this process's
    prompts.

    An episode is a completion, or with an `environment` (a dotted path, see `Environment`) up to `max_turns` of them,
    and the numbers that `rewards` give it: (name, function, weight), as from `tune.config.instantiate_weighted`. A
    prompt of up to `max_prompt_len` tokens and a completion have up to `longest` tokens. With `pad_to_longest`, batches
    are padded to that, as compiled blocks need it; the turns of an environment have no common length.
    `micro_batch_size` is that of the batches to train on, which `batch` makes.
    """

    def __init__(
        self,
        model: nn.Module,
        sampler: Sampler,
        tokenizer: Tokenizer,
        rewards: Sequence[tuple[str, Callable[..., Any], float]],
        *,
        samples: PositiveInt,
        max_prompt_len: PositiveInt,
        micro_batch_size: PositiveInt = 8,
        environment: str | None = None,
        max_turns: PositiveInt = 1,
        pad_to_longest: bool = False,
        world: World | None = None,
    ):
        self.model, self.sampler, self.tokenizer, self.world = model, sampler, tokenizer, current_world(world)
        self.rewards = [Reward(*each) for each in rewards]
        with explained("environment"):
            self.environment: Any = locate(environment) if environment else None
        self.max_turns = max_turns
        self.samples, self.micro_batch_size = samples, micro_batch_size
        self.longest = max_prompt_len + sampler.max_new_tokens
        self.pad_to = self.longest if pad_to_longest and not environment else None

    def check(self, *datasets: Prompts | None) -> None:
        """Raise TuneError if a prompt of the `datasets` leaves no room for a completion, or is no conversation although
        there is an environment."""
        for dataset in filter(None, datasets):
            check_prompts(self.model, self.sampler, dataset.extremes(), self.environment)

    def __call__(
        self, prompts: Sequence[Prompt], step: int, samples: int | None = None, sampler: Sampler | None = None
    ) -> list[list[Episode]]:
        """Sample episodes for this process's share of `prompts`. All processes must call this."""
        return rollout(
            self.model, sampler or self.sampler, self.tokenizer, prompts, self.rewards, self.world,
            samples=samples or self.samples, step=step, environment=self.environment, max_turns=self.max_turns,
        )  # fmt: skip

    def batch(self, samples: Sequence[Any], step: int, groups: Sequence[Sequence[Episode]], seed: int) -> GlobalBatch:
        """Return the batch of a step: the `samples` (of `Episode.sample`) of all processes.

        `groups` are all groups of this process, also those without samples: errors name the rows of their prompts. All
        processes must call this.
        """
        rows = [group[0].prompt.index for group in groups]
        return global_batch(
            samples, self.micro_batch_size, self.world, seed=seed, step=step, rows=rows, pad_to=self.pad_to
        )

    def metrics(self, groups: Sequence[Sequence[Episode]]) -> dict[str, torch.Tensor]:
        """Return the means of rewards and lengths over all processes. All processes must call this."""
        return self.world.means(statistics(groups, self.rewards, self.environment))

    def counts(self, groups: Sequence[Sequence[Episode]]) -> dict[str, torch.Tensor]:
        """Return how many groups of all processes have equal rewards. Not a part of `metrics`, since it has no meaning
        where groups are not compared. All processes must call this."""
        return {name: self.world.sum(count) for name, count in counts(groups, self.environment).items()}

    def validate(self, dataset: Prompts) -> dict[str, float]:
        """Return the metrics of greedy answers to the prompts of `dataset`. All processes must call this."""
        groups = self(dataset, 0, 1, replace(self.sampler, temperature=0))  # greedy: the step does not matter
        return self.world.fetch(**{f"validation_{name}": value for name, value in self.metrics(groups).items()})
