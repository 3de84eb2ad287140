"""A reward model as a reward."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from tune.checkpointers import load_model, open_checkpoint, require_same_vocabulary
from tune.collators import Batch
from tune.distributed import DTYPES
from tune.generation.rollout import Episode
from tune.losses import score
from tune.models import Decoder
from tune.tokenizers import Tokenizer
from tune.types import PositiveInt


class RewardModel:
    """The scores of a reward model (`reward_finetune`'s, or transformers' `...ForSequenceClassification` of one label),
    which each process holds whole (of tensor-parallel ones the first). It must have the policy's tokenizer: it scores
    the ids that were sampled.

        reward={_component_: tune.generation.RewardModel, path: ./reward_model}

    Raises:
        TuneError: the folder is no reward model, or its tokenizer is another one.
    """

    def __init__(self, path: str, dtype: Literal["bf16", "fp32"] = "fp32", micro_batch_size: PositiveInt = 8):
        self.path, self.dtype, self.micro_batch_size = path, dtype, micro_batch_size
        self.model: Decoder | None = None
        open_checkpoint(path, "score", "reward.path")[1].require_complete()

    @torch.inference_mode()
    def scores(self, episodes: Sequence[Episode], tokenizer: Tokenizer, device: torch.device) -> list[float]:
        """One for each of the episodes."""
        if self.model is None:
            self.model = load_model(self.path, str(device), DTYPES[self.dtype], head="score")
            require_same_vocabulary("reward.path", self.path, self.model, tokenizer)
        found: list[float] = []
        for start in range(0, len(episodes), self.micro_batch_size):
            some = episodes[start : start + self.micro_batch_size]
            texts = [[*each.prompt.tokens, *each.tokens, *_behind(each, tokenizer)] for each in some]
            documents = np.repeat(np.arange(len(texts)), list(map(len, texts)))
            batch = Batch.of(np.concatenate(texts)[None], documents=documents[None])
            found += score(self.model, batch.to(device)).tolist()
        return found


def _behind(episode: Episode, tokenizer: Tokenizer) -> list[int]:
    """What the chat template writes behind the end of an answer: reward models score the last token of all."""
    if episode.finish != "stop" or episode.prompt.messages is None:
        return []
    said = [*episode.prompt.messages, {"role": "assistant", "content": episode.text}]
    text = tokenizer.apply_chat_template(said, tools=episode.prompt.tools)
    stop = tokenizer.decode(episode.tokens[-1:])
    return tokenizer.encode(text[text.rfind(stop) + len(stop) :]) if stop in text else []
