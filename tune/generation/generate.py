"""Greedy decoding with a key-value cache."""

from collections.abc import Collection

import torch

from tune.models import Decoder, KeyValueCache


@torch.inference_mode()
def generate(
    model: Decoder, prompts: list[list[int]], *, max_new_tokens: int, stop_ids: Collection[int] = ()
) -> list[list[int]]:
    """Greedy continuation of each prompt (token ids), all in one batch, up to and including a token of `stop_ids`."""
    device = model.embedding.weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = max(len(prompt) for prompt in prompts)
    cache = KeyValueCache(len(model.blocks), capacity=longest + max_new_tokens)
    # Padding is on the left: recurrent layers reset after it. In the cache it is written to the slot of the first new
    # token, which overwrites it before any position attends to it.
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    positions = torch.arange(longest, device=device) - (longest - lengths)[:, None]
    positions = torch.where(positions < 0, lengths[:, None], positions)
    new = model(tokens, positions=positions, cache=cache)[:, -1].argmax(dim=-1)
    outputs: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    for step in range(max_new_tokens):
        for row in sorted(running):
            outputs[row].append(int(new[row]))
            if int(new[row]) in stop_ids:
                running.remove(row)
        if not running or step == max_new_tokens - 1:
            break
        new = model(new[:, None], positions=(lengths + step)[:, None], cache=cache)[:, -1].argmax(dim=-1)
    return outputs
