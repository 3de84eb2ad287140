import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tune.collators import Sample
from tune.datasets import Dataset

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def byte_tokenizer(path: Path, special: list[str], template: str) -> Path:
    """Save a checkpoint folder whose tokenizer has one token per byte and puts <s> before plain texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    bos = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").write_text(template)
    return path


@pytest.fixture(scope="session")
def byte_checkpoint() -> Callable[[Path, list[str], str], Path]:
    return byte_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder with one token per byte and a ChatML template."""
    return byte_tokenizer(tmp_path / "checkpoint", ["<s>", "</s>", "<|im_start|>", "<|im_end|>"], CHATML)


def sample(length: int, supervised: int, token: int = 1) -> Sample:
    """A sample that repeats one token; its last `supervised` targets are learned."""
    labels = [-100] * (length - 1 - supervised) + [token] * supervised + [-100]
    return Sample([token] * length, labels)


def dataset(lengths: list[int], capacity: int = 64, packed: bool = False) -> Dataset:
    """Return a dataset whose sample i has lengths[i] tokens, all equal to i; all but the first are learned."""
    samples = (sample(length, length - 1, token) for token, length in enumerate(lengths))
    return Dataset.from_samples(samples, capacity, packed)


def world(rank: int = 0, size: int = 1) -> SimpleNamespace:
    return SimpleNamespace(data_rank=rank, data_size=size, device=torch.device("cpu"))


@pytest.fixture
def make() -> SimpleNamespace:
    return SimpleNamespace(sample=sample, dataset=dataset, world=world)
