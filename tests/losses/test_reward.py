"""Scores of documents and the loss of reward models."""

import pytest
import torch
from torch.nn.functional import logsigmoid

from tune.collators import Sample, collate
from tune.losses import BradleyTerry, LastTokenScores

PAD = 7
LENGTHS = (5, 1, 8)


def batch(rows, pad_to):
    """Documents of random tokens; the second is only the pad token, the third ends with two of them."""
    draw = torch.Generator().manual_seed(0)
    tokens = [torch.randint(PAD, (length,), generator=draw).numpy() for length in LENGTHS]
    tokens[1][:] = tokens[2][-2:] = PAD
    samples = [Sample(document, document) for document in tokens]
    return collate([[samples[index] for index in row] for row in rows], pad_to)


@pytest.mark.parametrize(("rows", "pad_to"), [([[0, 1, 2]], None), ([[0, 1], [2]], 10)])
@pytest.mark.parametrize("pad_id", [None, PAD])
def test_score_is_taken_at_the_last_token_before_padding(rows, pad_to, pad_id):
    inputs = batch(rows, pad_to)
    hidden, weight = torch.randn(*inputs.tokens.shape, 4), torch.randn(1, 4)
    ends = [index for index, length in enumerate(inputs.documents.lengths) if length in LENGTHS]
    scores = LastTokenScores(pad_id)(hidden, weight, inputs)[ends]
    starts = inputs.documents.boundaries[ends]
    last = starts + torch.tensor([4, 0, 7] if pad_id is None else [4, 0, 5])
    torch.testing.assert_close(scores, (hidden.flatten(0, 1)[last] @ weight.T)[:, 0])


def test_scores_are_fp32():
    inputs = batch([[0, 1, 2]], None)
    hidden, weight = torch.randn(1, 14, 4).bfloat16(), torch.randn(1, 4).bfloat16()
    scores = LastTokenScores()(hidden, weight, inputs)
    torch.testing.assert_close(scores, (hidden[0, [4, 5, 13]].float() @ weight.float().T)[:, 0], rtol=1e-6, atol=1e-6)


def test_bradley_terry():
    chosen, rejected, margin = torch.randn(3, 6)
    expected = -logsigmoid(chosen - rejected - margin) + 0.01 * (chosen + rejected) ** 2
    torch.testing.assert_close(BradleyTerry(center=0.01)(chosen, rejected, margin), expected)
    torch.testing.assert_close(BradleyTerry()(chosen, rejected, margin), -logsigmoid(chosen - rejected - margin))
