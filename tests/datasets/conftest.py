import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tune.datasets import Dataset, Sample

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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder whose tokenizer has one token per byte, puts <s> before plain texts, and speaks ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    path = tmp_path / "checkpoint"
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").write_text(CHATML)
    return path


def sample(length: int, supervised: int, token: int = 1) -> Sample:
    """A sample of one token throughout whose last `supervised` targets are learned."""
    labels = [-100] * (length - 1 - supervised) + [token] * supervised + [-100]
    return Sample([token] * length, labels)


def dataset(lengths: list[int], capacity: int = 64, packed: bool = False) -> Dataset:
    """Sample i has lengths[i] tokens, all of them i; all but the first are learned."""
    samples = (sample(length, length - 1, token) for token, length in enumerate(lengths))
    return Dataset.from_samples(samples, capacity, packed)


def world(rank: int = 0, size: int = 1) -> SimpleNamespace:
    return SimpleNamespace(data_rank=rank, data_size=size)


@pytest.fixture
def make() -> SimpleNamespace:
    return SimpleNamespace(sample=sample, dataset=dataset, world=world)
