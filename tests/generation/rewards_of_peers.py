"""Run in each of two tensor-parallel processes whose samples, rewards and environments differ.
Prints the episodes of the processes or the error that they raise."""

import random
import sys

import torch.distributed as dist

from tune import distributed
from tune.datasets import Prompt
from tune.errors import TuneError
from tune.generation import Completion, Reward, rollout
from tune.tokenizers import Tokenizer

QUESTION = [{"role": "user", "content": "the cat"}]


class Dice:
    def start(self, row):
        self.rolls = random.SystemRandom()

    def step(self, message):
        return self.rolls.random(), [{"role": "user", "content": f"{self.rolls.randrange(10**6)}"}], False


def by_chance(row, completion):
    return random.SystemRandom().random()


def fails_differently(row, completion):
    raise ValueError(f"process {dist.get_rank()}")


def main(folder):
    world, tokenizer = distributed.init("cpu", tp=2), Tokenizer(folder)

    def sampler(model, prompts, *, samples=1, step=0, indices=None):
        tokens = tokenizer.encode(("dog", "cat")[world.rank] + "<|im_end|>")  # like two engines may
        return [[Completion(tokens, [-0.5] * len(tokens), "stop")] * samples for _ in prompts]

    sampler.room = lambda model: 999
    text = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    prompts = [Prompt(0, tokenizer.encode(text), {}, QUESTION, position=0)]
    for reward, environment in ((by_chance, None), (by_chance, Dice), (fails_differently, None)):
        try:
            (group,) = rollout(
                None, sampler, tokenizer, prompts, [Reward("own", reward)], world,
                samples=3, step=0, environment=environment, max_turns=3,
            )  # fmt: skip
            mine = str([(episode.reward, episode.rewards, episode.tokens) for episode in group])
        except TuneError as error:
            mine = str(error)
        first, second = world.from_all_ranks(mine)
        assert first == second
        if world.is_main:
            print(first)
    world.finish()


if __name__ == "__main__":
    main(sys.argv[1])
