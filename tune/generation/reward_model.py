"""A reward model as a reward."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from tune.collators import IGNORE, Sample, collate
from tune.distributed import World
from tune.generation.rollout import Episode
from tune.losses import score
from tune.models import Decoder
from tune.peft import open_model
from tune.tokenizers import PROBE, Tokenizer
from tune.types import PositiveInt


class RewardModel:
    """Score episodes with a reward model (from `reward_finetune`, or transformers' `...ForSequenceClassification` with
    one label), sharded like the policy. It must have the policy's tokenizer, since it scores the sampled ids.

        reward={_component_: tune.generation.RewardModel, path: ./reward_model}

    Raises:
        TuneError: the folder is not a reward model, or has another tokenizer.
    """

    is_sharded = True

    def __init__(self, path: str, dtype: Literal["bf16", "fp32"] = "fp32", micro_batch_size: PositiveInt = 8):
        self.path, self.dtype, self.micro_batch_size = path, dtype, micro_batch_size
        self.model: Decoder | None = None
        self.opened = open_model(path, head="score", setting="reward.path")

    @torch.no_grad()
    def scores(self, episodes: Sequence[Episode], tokenizer: Tokenizer, world: World) -> list[float]:
        """Return one score per episode. All processes must call this.

        Equal texts are scored once: their scores would differ by rounding with their place in a batch, and a group of
        equal completions would not be recognized.
        """
        if self.model is None:
            self.opened.require_same_vocabulary(tokenizer)
            self.model = self.opened.shard(world, self.dtype)
        of_episodes = [tuple(_scored(episode, tokenizer)) for episode in episodes]
        texts = [*dict.fromkeys(of_episodes)]
        batches = -(-len(texts) // self.micro_batch_size)
        found: list[float] = []
        for start in range(0, max(world.all_gather(batches)) * self.micro_batch_size, self.micro_batch_size):
            # Processes without texts left take part in the forwards of the others.
            some = texts[start : start + self.micro_batch_size] or [(0,)]
            samples = [Sample(np.array(each), np.full(len(each), IGNORE)) for each in some]
            found += score(self.model, collate([samples]).to(world.device)).tolist()
        scores = dict(zip(texts, found[: len(texts)], strict=True))
        return [scores[text] for text in of_episodes]


def _scored(episode: Episode, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of prompt and answer, ended as the chat template ends a conversation (with or without an end
    token, and with the text after it): reward models are trained on such conversations and score their last token."""
    ids = [*episode.prompt.tokens, *episode.tokens]
    if episode.finish == "length" or episode.prompt.messages is None:
        return ids
    said = [*episode.prompt.messages, {"role": "assistant", "content": PROBE}]
    _, answer, end = tokenizer.apply_chat_template(said, tools=episode.prompt.tools).rpartition(PROBE)
    if not answer:
        return ids
    return (ids[:-1] if ids[-1] in tokenizer.stop_ids else ids) + tokenizer.encode(end)
