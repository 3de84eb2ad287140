"""Datasets in your own training loop: torch's DataLoader, transformers models, no World."""

import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

import tune.datasets
from tune.checkpointers import load_model
from tune.collators import Sample, collate, collate_inputs
from tune.datasets import DataLoader, Dataset, load, tokenize_conversation
from tune.errors import TuneError
from tune.losses import LinearCrossEntropy
from tune.tokenizers import Tokenizer


@pytest.fixture(scope="module")
def dataset(checkpoint, chats):
    return load(Tokenizer(str(checkpoint)), str(chats), max_seq_len=128)


@pytest.fixture(scope="module")
def theirs(checkpoint):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()


@torch.no_grad()
def losses_of(theirs, dataset):
    """The transformers loss over each pair of samples, computed one text at a time."""
    sums = []
    for sample in dataset.samples:
        labels = torch.tensor([-100, *sample.labels[:-1]])
        count = int((labels != -100).sum())
        ids = torch.tensor(sample.tokens).long()
        sums.append((float(theirs(input_ids=ids[None], labels=labels[None].long()).loss) * count, count))
    pairs = zip(sums[::2], sums[1::2], strict=True)
    return [(one + other) / (count + others) for (one, count), (other, others) in pairs]


def test_dataset_is_map_style(dataset):
    assert isinstance(dataset[0], Sample)
    assert [sample.tokens.tolist() for sample in dataset] == [dataset[i].tokens.tolist() for i in range(len(dataset))]
    assert dataset[-1].index == dataset[len(dataset) - 1].index == len(dataset) - 1
    for index in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError):
            dataset[index]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_torch_dataloader_gives_batches(workers, dataset, checkpoint, theirs):
    model, loss_fn = load_model(str(checkpoint)), LinearCrossEntropy()
    loader = TorchLoader(dataset, batch_size=2, collate_fn=collate, num_workers=workers)
    with torch.no_grad():
        losses = [float(model(batch, loss_fn) / batch.num_supervised) for batch in loader]
    assert losses == pytest.approx(losses_of(theirs, dataset), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_torch_dataloader_gives_transformers_inputs(workers, dataset, theirs):
    loader = TorchLoader(dataset, batch_size=2, collate_fn=collate_inputs, num_workers=workers)
    with torch.no_grad():
        losses = [float(theirs(**inputs).loss) for inputs in loader]
    assert losses == pytest.approx(losses_of(theirs, dataset), abs=1e-5)


@pytest.mark.slow
def test_packed_rows_as_transformers_inputs(checkpoint, chats, dataset, theirs):
    packed = load(Tokenizer(str(checkpoint)), str(chats), max_seq_len=128, packed=True)
    inputs = collate_inputs([packed[index] for index in range(len(packed))])
    assert inputs["input_ids"].shape == (1, sum(dataset.row_tokens)) and "attention_mask" not in inputs
    count = int((inputs["labels"] != -100).sum())
    apart = collate_inputs(list(dataset))
    assert count == int((apart["labels"] != -100).sum())
    with torch.no_grad():
        assert float(theirs(**inputs).loss) == pytest.approx(float(theirs(**apart).loss), abs=1e-5)


def test_piece_of_a_text_predicts_the_token_after_it():
    inputs = collate_inputs([Sample(torch.tensor([5, 6]).numpy(), torch.tensor([6, 7]).numpy())])
    assert inputs["input_ids"].tolist() == [[5, 6, 7]] and inputs["labels"].tolist() == [[-100, 6, 7]]


def test_dataset_can_be_pickled(dataset):
    sent = pickle.loads(pickle.dumps(dataset))
    assert (sent[3].tokens == dataset[3].tokens).all() and len(sent) == len(dataset)


def test_loader_works_without_a_world(dataset):
    loader = DataLoader(dataset, global_batch_size=4, micro_batch_size=2)
    assert sorted(row for _, batch in loader for row in batch.rows) == list(range(len(dataset)))
    assert not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1


def test_batch_size_passed_as_world_is_refused(dataset):
    with pytest.raises(TuneError, match=r"global_batch_size=8"):
        DataLoader(dataset, 8, 2)


def test_grouped_rows_are_lists(make):
    samples = [replace(make.sample(4, 2), columns={"group": index // 2}) for index in range(6)]
    assert [len(Dataset.from_samples(samples, 16)[index]) for index in range(3)] == [2, 2, 2]


@pytest.mark.slow
def test_datasets_do_not_import_distributed_modules():
    assert tune.datasets.Sample is Sample and tune.datasets.collate is collate
    lines = "import sys, tune.datasets; print([each for each in sys.modules if 'fsdp' in each or 'pipelin' in each])"
    done = subprocess.run([sys.executable, "-c", lines], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


MESSAGES = [
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "sat on the mat"},
    {"role": "user", "content": "and then"},
    {"role": "assistant", "content": "it ran"},
]


def test_conversation_mask_matches_transformers(folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    reference = theirs.apply_chat_template(MESSAGES, return_assistant_tokens_mask=True, return_dict=True)
    sample = tokenize_conversation(Tokenizer(str(folder)), MESSAGES)
    assert sample.tokens.tolist() == reference["input_ids"]
    assert [label != -100 for label in sample.labels[:-1]] == [bool(bit) for bit in reference["assistant_masks"][1:]]
    learned = sample.labels[:-1] != -100
    assert sample.labels[-1] == -100 and (sample.labels[:-1] == sample.tokens[1:])[learned].all()


def test_train_on_selects_the_learned_roles(folder):
    tokenizer = Tokenizer(str(folder))

    def learned(train_on):
        labels = tokenize_conversation(tokenizer, MESSAGES, train_on=train_on).labels
        return tokenizer.decode([label for label in labels.tolist() if label != -100])

    assert learned(["user"]) == learned(("user",)) == "the cat<|im_end|>and then<|im_end|>"
    assert learned("last") == "it ran<|im_end|>"


@pytest.mark.parametrize(
    "wrong",
    [
        {"train_on": "user"},
        {"train_on": "assistent"},
        {"train_on": ["usr"]},
        {"too_long": "trunc"},
        {"on_bad_row": "ignore"},
        {"take": 0},
        {"max_seq_len": "long"},
        {"validation_fraction": 1.5},
        {"columns": ["prompt"]},
        {"streaming": "yes"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_arguments_are_validated_like_settings(wrong, folder, chats):
    ((name, value),) = wrong.items()
    with pytest.raises(TuneError, match=rf"^{name}: ") as error:
        load(Tokenizer(str(folder)), str(chats), **{"max_seq_len": 128, **wrong})
    assert str(value[0] if isinstance(value, list) else value) in str(error.value)


def test_load_accepts_path_objects(folder, chats):
    assert len(load(Tokenizer(folder), chats, max_seq_len=512)) == 48


def test_transformers_tokenizer_is_refused_with_advice(folder, chats):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    with pytest.raises(TuneError, match=r"Tokenizer\.of"):
        load(theirs, str(chats), max_seq_len=128)
    assert len(load(Tokenizer.of(theirs), str(chats), max_seq_len=512)) == 48
