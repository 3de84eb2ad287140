"""Growing texts get the same completions as from a sampler that reads them whole."""

from itertools import islice

import pytest
import torch
from generation.test_sampler import make_prompts
from generation.test_sampler import model as model

from tune.collators import Batch
from tune.errors import TuneError
from tune.generation import Continuation, Sampler
from tune.models.context import KeyValueCache


class Reads(list):
    """Records the number of tokens that each forward of a model reads."""

    def __init__(self, model):
        self.hook = model.embedding.register_forward_hook(lambda module, inputs, output: self.append(inputs[0].numel()))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_turns_of_a_conversation_match_a_sampler(model, temperature):
    """Windows have 16 tokens: turns start inside a window, cross its end and come after it."""
    continuation, sampler = Continuation(model), Sampler(max_new_tokens=6, temperature=temperature, seed=3)
    text, reads = [], Reads(model)
    for turn, message in enumerate(make_prompts([5, 3, 1, 30, 9])):
        text, before = text + message, len(text)
        if len(text) + 6 > model.max_generated:
            assert turn > 2
            break
        reads.clear()
        answer = list(continuation(sampler, text, step=turn))
        # The last token of an answer is read only with the next message.
        assert sum(reads) == len(text) - before + 5 + (turn > 0)
        assert answer == sampler(model, [text], step=turn)[0][0].tokens
        text = text + answer
    reads.hook.remove()


@pytest.mark.slow
def test_texts_that_do_not_extend_the_cache(model):
    """Texts repeat, shrink, change at the start, middle or end, or follow an abandoned answer."""
    continuation, sampler = Continuation(model), Sampler(max_new_tokens=8, temperature=0.9)
    (text,) = make_prompts([21])
    changed = [7, *text[1:]], [*text[:10], 7, *text[11:]], [*text[:20], 7]
    longer = (text * 5)[: model.max_generated - 8]
    texts = [text, text, text[:9], text, changed[0], text, *changed[1:], longer]
    for step, prompt in enumerate(texts):
        assert list(continuation(sampler, prompt, step=step)) == sampler(model, [prompt], step=step)[0][0].tokens
        list(islice(continuation(sampler, text), 3))


def test_cache_grows(model):
    continuation, sampler = Continuation(model), Sampler(max_new_tokens=8, temperature=0)
    continuation.capacity = 20
    continuation.cache = model.new_cache(1, 20)
    for text in make_prompts([10, 40]):
        assert list(continuation(sampler, text)) == sampler(model, [text])[0][0].tokens
    assert continuation.capacity == min(1024, model.max_generated)


def test_generation_continues_after_an_interruption(model):
    continuation, sampler = Continuation(model), Sampler(max_new_tokens=12, temperature=0)
    (text,) = make_prompts([10])
    expected = sampler(model, [text])[0][0].tokens

    def interrupt(module, inputs, output):
        raise KeyboardInterrupt

    answer = continuation(sampler, text)
    assert list(islice(answer, 4)) == expected[:4]
    hook = model.blocks[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(answer)
    hook.remove()
    assert list(continuation(sampler, text + expected[:4]))[:8] == expected[4:]


def test_stops_and_limits(model):
    (text,) = make_prompts([4])
    free = list(Continuation(model)(Sampler(max_new_tokens=9, temperature=0), text))
    stopping = Sampler(max_new_tokens=9, temperature=0, stop_ids=[free[3]])
    assert list(Continuation(model)(stopping, text)) == free[: free.index(free[3]) + 1]
    with pytest.raises(TuneError, match=r"prompt 0 has 4 tokens .* Lower one by 4"):
        list(Continuation(model)(Sampler(max_new_tokens=model.max_generated), text))
    with pytest.raises(TuneError, match="prompt 0 is empty"):
        list(Continuation(model)(stopping, []))


@torch.no_grad()
def test_device_other_than_the_cpu(model):
    device = torch.device("meta")
    moved = type(model)(model.config).to(device)
    cache = moved.new_cache(rows=1, capacity=40)
    cache.start([0], Batch.of([[5] * 7]), device)
    moved(Batch.of([[5] * 7]).to(device), cache=cache)
    tokens = torch.zeros(1, 9, dtype=torch.long, device=device)
    positions = torch.arange(7, 16, device=device)[None]
    cache.extend(positions, 16)
    assert moved(tokens, positions=positions, cache=cache).shape == (1, 1, model.config.vocab_size)


def test_window_of_8_tokens():
    """Tokens are read together up to the end of the window; the ninth token evicts the first."""
    cache = KeyValueCache([8, 30], rows=1, capacity=30)
    assert [cache.together(start) for start in (1, 7, 8, 20)] == [7, 1, 1, 1]
    assert cache.keeps_all(8) and not cache.keeps_all(9)
    assert not KeyValueCache([None, 30], rows=1, capacity=30).keeps_all(1)  # a state keeps no tokens
