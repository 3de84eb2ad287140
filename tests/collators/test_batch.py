from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from tune.collators import Batch, Pictures, Sample, collate, shift_labels
from tune.errors import TuneError


def sample(*tokens: int) -> Sample:
    return Sample(np.array(tokens, dtype=np.int32), np.array([*tokens[1:], -100], dtype=np.int32))


def test_rows_are_joined_without_padding():
    batch = collate([[sample(5, 6, 7)], [sample(8, 9), sample(4)]])
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 4]]
    assert batch.labels.tolist() == [[6, 7, -100, 9, -100, -100]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert batch.documents.ids.tolist() == [[0, 0, 0, 1, 1, 2]]
    assert batch.documents.boundaries.tolist() == [0, 3, 5, 6]
    assert batch.documents.num_supervised.tolist() == [2, 1, 0]
    assert (batch.documents.lengths, batch.documents.longest) == ((3, 2, 1), 4)
    assert batch.supervised.tolist() == [0, 1, 3]
    assert (batch.num_tokens, batch.num_supervised) == (6, 3)


def test_rows_are_padded_at_the_end():
    batch = collate([[sample(5, 6, 7)], [sample(8, 9), sample(4)]], pad_to=5)
    assert batch.tokens.tolist() == [[5, 6, 7, 0, 0], [8, 9, 4, 0, 0]]
    assert batch.labels.tolist() == [[6, 7, -100, -100, -100], [9, -100, -100, -100, -100]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 0, 1]]
    assert batch.documents.ids.tolist() == [[0, 0, 0, 1, 1], [2, 2, 3, 4, 4]]
    assert batch.documents.lengths == (3, 2, 2, 1, 2)
    assert (batch.num_tokens, batch.num_supervised) == (6, 3)


def test_row_without_documents_is_all_padding():
    for batch in (collate([[]]), collate([[]], pad_to=1)):
        assert (batch.tokens.tolist(), batch.labels.tolist()) == ([[0]], [[-100]])
        assert (batch.num_tokens, batch.num_supervised) == (0, 0)
    assert collate([[sample(5, 6)], []]).tokens.tolist() == [[5, 6]]


def test_tensors_move_together():
    pictures = Pictures({"pixel_values": torch.zeros(1, 3, 4, 4)}, 1)
    batch = replace(collate([[sample(5, 6, 7)]]), pictures=pictures)
    tensors = (batch.tokens, batch.labels, batch.positions, batch.documents.ids)
    assert all(tensor.dtype == torch.int64 for tensor in tensors)
    moved = batch.to("meta")
    assert all(tensor.is_meta for tensor in (moved.tokens, moved.labels, moved.positions, moved.documents.boundaries))
    assert moved.pictures.values["pixel_values"].is_meta and moved.pictures.count == 1
    assert moved.num_tokens == 3


def test_columns_per_token_and_per_document_are_collated():
    def with_columns(advantage, kind, *tokens):
        plain = sample(*tokens)
        return replace(plain, columns={"advantage": np.full(len(tokens), advantage, dtype=np.float32), "kind": kind})

    exact = 0.5 + 2**-20  # a precision that half floats do not have
    rows = [[with_columns(exact, 3, 5, 6)], [with_columns(-1, 4, 7), with_columns(2, 5, 8)]]
    batch = collate(rows, pad_to=3)
    assert batch.columns["advantage"].tolist() == [[exact, exact, 0], [-1, 2, 0]]
    assert batch.columns["kind"].tolist() == [3, 0, 4, 5, 0]  # 0 for padding
    assert batch.columns["kind"].dtype == torch.int64
    joined = collate([*rows, []])
    assert joined.columns["advantage"].tolist() == [[exact, exact, -1, 2]]
    assert joined.to("meta").columns["kind"].is_meta


def test_first_answer_of_a_group_is_paired_with_each_other():
    """Padding between two groups is not an answer."""
    answers = [replace(sample(5, 6), columns={"answer": number}) for number in (0, 1, 2, 0, 1)]
    batch = collate([answers[:3], answers[3:]], pad_to=7)
    assert batch.pairs.tolist() == [[0, 0, 4], [1, 2, 5]]


def test_unshifted_hugging_face_labels_are_shifted():
    """The transformers loss of unshifted labels equals the loss of our shifted labels."""
    tokens = torch.tensor([[5, 6, 7, 8], [9, 4, 3, 0]])
    labels = torch.tensor([[-100, 6, 7, 8], [9, 4, 3, -100]])
    batch = Batch.of(tokens, labels, shifted=False)
    assert batch.labels.tolist() == [[6, 7, 8, -100], [4, 3, -100, -100]]
    logits = torch.randn(2, 4, 11, generator=torch.Generator().manual_seed(0))
    theirs = ForCausalLMLoss(logits, labels, vocab_size=11)
    ours = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(shift_labels(labels), batch.labels)
    assert labels.tolist()[0] == [-100, 6, 7, 8]  # unchanged
    shifted = Batch.of(tokens, batch.labels)
    assert torch.equal(shifted.labels, batch.labels)


def test_shifted_labels_do_not_cross_documents():
    documents = [[0, 0, 1, 1, 1], [2, 2, 2, 2, 3]]
    tokens = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9]]
    batch = Batch.of(tokens, tokens, documents, shifted=False)
    assert batch.labels.tolist() == [[6, -100, 8, 9, -100], [6, 7, 8, -100, -100]]
    assert batch.documents.num_supervised.tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize(
    ("inputs", "facts"),
    [
        ({"tokens": [[1.0, 2.0]]}, ("tokens", "float64")),
        ({"tokens": [[True, False]]}, ("tokens", "bool")),
        ({"tokens": [1, 2, 3]}, ("tokens", "[3]")),
        ({"tokens": np.zeros((1, 0), int)}, ("tokens", "[1, 0]")),
        ({"tokens": [[1, 2], [3]]}, ("tokens",)),
        ({"tokens": torch.ones(1, 3, dtype=torch.long, device="meta")}, ("tokens", "meta")),
        ({"labels": [[1, 2]]}, ("labels", "[1, 2]", "[1, 3]")),
        ({"labels": [[1.0, 2.0, 3.0]]}, ("labels", "float64")),
        ({"labels": [[1, -1, -100]]}, ("labels", "-1")),
        ({"documents": [[0, 0]]}, ("documents", "[1, 2]", "[1, 3]")),
        ({"samples": [1, 2]}, ("samples", "2")),
        ({"columns": {"reward": [1.0, 2.0]}}, ("columns.reward", "[2]")),
    ],
)
def test_invalid_inputs_are_refused(inputs, facts):
    with pytest.raises(TuneError) as error:
        Batch.of(**{"tokens": [[1, 2, 3]], **inputs})
    assert all(fact in str(error.value) for fact in facts)


def test_a_column_that_is_missing_is_named():
    batch = Batch.of(torch.ones(1, 4, dtype=torch.long), columns={"weight": torch.ones(1)})
    assert "noise" not in batch.columns and batch.columns.get("noise") is None
    with pytest.raises(TuneError, match=r"'noise'.* weight\..*dataset\.extra_columns=\[noise\]"):
        batch.to("cpu").columns["noise"]
