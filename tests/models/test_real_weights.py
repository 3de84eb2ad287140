"""SmolLM2-135M-Instruct, downloaded by `make model`, gives the logits and tokens of transformers."""

from pathlib import Path

import pytest
import torch

from tune.checkpointers import load_model
from tune.generation import Sampler
from tune.tokenizers import Tokenizer

FOLDER = Path(__file__).parents[2] / ".demo" / "smollm2-135m"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (FOLDER / "config.json").exists(), reason="the model is missing; run make model"),
]


@pytest.fixture(scope="module")
def pair():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER).eval(), load_model(str(FOLDER))


@pytest.fixture(scope="module")
def prompt():
    tokenizer = Tokenizer(str(FOLDER))
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    return tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=True))


def test_logits_match_transformers(pair, prompt):
    theirs, ours = pair
    tokens = torch.tensor([prompt * 4])
    with torch.no_grad():
        assert (theirs(tokens).logits - ours(tokens)).abs().max() <= 2e-4


def test_greedy_generation_matches_transformers(pair, prompt):
    theirs, ours = pair
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=None)
    ((completion,),) = Sampler(max_new_tokens=32, temperature=0)(ours, [prompt])
    assert completion.tokens == expected[0, len(prompt) :].tolist()


def test_model_answers_correctly(pair, prompt):
    tokenizer = Tokenizer(str(FOLDER))
    ((answer,),) = Sampler(max_new_tokens=32, temperature=0, stop_ids=tokenizer.stop_ids)(pair[1], [prompt])
    assert tokenizer.decode(answer.tokens) == "The capital of France is Paris.<|im_end|>"
