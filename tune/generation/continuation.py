"""Sample token by token with a persistent cache."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tune.collators import Batch
from tune.distributed import PackedWeights
from tune.generation.decoding import Decoding
from tune.generation.sampler import Completion, GenerativeModel, Sampler, uniforms

CHUNK = 512  # tokens that are appended to the cache at a time


class Continuation:
    """Complete one text after another, token by token, with the same result as a `Sampler`. If a text begins like the
    previous one, such as the next turn of a conversation, only the rest is read."""

    def __init__(self, model: GenerativeModel):
        self.model, self.capacity = model, 0
        self.known: list[int] = []  # the text in the cache
        self.weights = PackedWeights(model)

    @torch.no_grad()
    def __call__(self, sampler: Sampler, prompt: Sequence[int], step: int = 0) -> Iterator[int]:
        """Yield the tokens of `sampler(model, [prompt], step=step)` as they are sampled. The caller may stop early."""
        sampler.check(self.model, [prompt], [0])
        completion, draws = Completion(), uniforms(sampler.seed, step, 0, 0)
        if (length := len(prompt) + sampler.max_new_tokens) > self.capacity:
            room = max(2 * length, 2 * CHUNK)  # twice the need, so that a growing conversation rarely needs a new cache
            self.capacity = min(room, self.model.max_generated or room)
            self.cache, self.known = self.model.new_cache(1, self.capacity), []
        decoding = Decoding(self.model, self.cache, 1, self.capacity, sampler.choose)
        with self.weights:
            logits = self._read([*prompt])
        sampler.extend([completion], [next(draws)], logits)
        yield completion.tokens[-1]
        while not sampler.is_complete(completion):
            text, self.known = [*prompt, *completion.tokens], []  # see `_read`
            with self.weights:
                chosen = decoding(text[-1:], [len(text) - 1], [[next(draws)]])
            self.known = text
            sampler.add([completion], chosen)
            yield completion.tokens[-1]

    def _read(self, text: list[int]) -> Tensor:
        """Return the logits after `text`, `[1, vocab]`."""
        device, known = next(self.model.parameters()).device, self.known
        pairs = zip(known, text[:-1], strict=False)
        start = next((at for at, (old, new) in enumerate(pairs) if old != new), min(len(known), len(text) - 1))
        if start < len(known) and not self.cache.keeps_all(len(known)):
            start = 0
        self.known = []  # an interruption would leave the cache in an unknown state
        if start == 0:
            batch = Batch.of([text])
            self.cache.start([0], batch, device)
            logits = self.model(batch.to(device), cache=self.cache)
        while 0 < start < len(text):
            length = min(CHUNK, self.cache.together(start), len(text) - start)
            positions = torch.arange(start, start + length, device=device)[None]
            self.cache.extend(positions, start + length)
            tokens = torch.tensor([text[start : start + length]], device=device)
            logits = self.model(tokens, positions=positions, cache=self.cache)
            start += length
        self.known = text
        return logits[:, 0]
