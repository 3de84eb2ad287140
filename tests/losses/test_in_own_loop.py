"""Losses in your own training loop: `nn.Linear` as head and plain tensors, no Batch and no World."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from tune.collators import Batch, Sample, shift_labels
from tune.errors import TuneError
from tune.losses import (
    CPO,
    DPO,
    GSPO,
    IPO,
    KTO,
    ORPO,
    AnswerLogProbs,
    BradleyTerry,
    ClippedPolicy,
    ForwardKL,
    JensenShannon,
    LastTokenScores,
    LinearCrossEntropy,
    LogProbs,
    MostProbable,
    PolicyGradient,
    ReverseKL,
    SimPO,
    Teacher,
    TopK,
    gae,
    kl_estimate,
    per_document,
)
from tune.losses.chunks import VocabularyShard
from tune.optimizers import cosine, linear
from tune.peft import LoRA

VOCABULARY, DIM = 37, 8


class Bigrams(nn.Module):
    def __init__(self, seed=0, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, DIM, dtype=dtype)
        self.up = nn.Linear(DIM, DIM, dtype=dtype)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens):
        return torch.tanh(self.up(self.embedding(tokens)))


@pytest.fixture
def tokens():
    return torch.randint(VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def labels(tokens):
    """Already shifted; the rows begin with a prompt and end with padding."""
    labels = shift_labels(tokens)
    for row, (start, end) in enumerate([(0, 8), (3, 8), (2, 5), (7, 8)]):
        labels[row, :start] = labels[row, end:] = -100
    return labels


def gradients(loss, model):
    return torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)


def refused(*facts):
    """Expect a TuneError whose message contains all `facts`."""
    return pytest.raises(TuneError, match="".join(f"(?=.*{fact})" for fact in facts))


# Heads: hidden states, a weight, labels.


def test_cross_entropy_matches_torch(tokens, labels):
    model = Bigrams()
    loss = LinearCrossEntropy()(model(tokens), model.head.weight, labels)
    expected = F.cross_entropy(model.head(model(tokens)).flatten(0, 1), labels.flatten(), reduction="sum")
    assert_close(loss, expected)
    for ours, theirs in zip(gradients(loss, model), gradients(expected, model), strict=True):
        assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_your_own_training_loop_learns_like_with_torch(tokens, labels):
    def train(loss_of):
        model = Bigrams()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        losses = []
        for _ in range(5):
            loss = loss_of(model) / (labels != -100).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    loss_fn = LinearCrossEntropy(chunk_tokens=5)
    ours = train(lambda model: loss_fn(model(tokens), model.head.weight, labels))
    assert ours[-1] < ours[0] - 0.3
    assert ours == pytest.approx(
        train(lambda model: F.cross_entropy(model.head(model(tokens)).mT, labels, reduction="sum")), rel=1e-5
    )


@pytest.mark.parametrize("head", [LinearCrossEntropy(), LogProbs(), ForwardKL(cross_entropy=0.5), MostProbable(3)])
def test_labels_can_replace_a_batch(head, tokens, labels):
    model, teacher = Bigrams(), Bigrams(1)
    options = {"teacher": Teacher(teacher(tokens), teacher.head.weight)} if isinstance(head, ForwardKL) else {}
    operands = model(tokens), model.head.weight
    whole = head(*operands, Batch.of(tokens, labels), **options)
    for targets in (labels, labels.int()):
        assert_close(head(*operands, targets, **options), whole, rtol=0, atol=0)
    # Flattened tokens, as in other libraries.
    flat = operands[0].flatten(0, 1), operands[1], labels.flatten()
    if not options:
        assert_close(head(*flat), whole, rtol=0, atol=0)


def test_unshifted_hugging_face_labels(tokens):
    model = Bigrams()
    theirs = F.cross_entropy(model.head(model(tokens))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    for labels in (Batch.of(tokens, tokens, shifted=False), shift_labels(tokens)):
        assert_close(LinearCrossEntropy()(model(tokens), model.head.weight, labels), theirs)


@pytest.mark.parametrize("trained", ["head", "both"])
def test_bf16_hidden_states_and_an_fp32_head_are_computed_in_fp32(tokens, labels, trained):
    model = Bigrams(dtype=torch.bfloat16)
    hidden = model(tokens).detach().requires_grad_(trained == "both")
    assert hidden.dtype == torch.bfloat16 and model.head.weight.dtype == torch.float32
    logits = hidden.float() @ model.head.weight.T
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    log_probs = -F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")[labels.flatten() != -100]
    ours = LinearCrossEntropy(7)(hidden, model.head.weight, labels)
    of_tokens = LogProbs(7)(hidden, model.head.weight, labels).log_probs
    assert_close(ours, expected)
    assert_close(of_tokens, log_probs)
    operands = [model.head.weight] + [hidden] * (trained == "both")
    for loss, reference in ((ours, expected), (of_tokens.square().sum(), log_probs.square().sum())):
        for one, other in zip(
            torch.autograd.grad(loss, operands, retain_graph=True),
            torch.autograd.grad(reference, operands, retain_graph=True),
            strict=True,
        ):
            assert one.dtype == other.dtype
            assert_close(one.float(), other.float(), rtol=1e-2 if one.dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_autocast(tokens, labels):
    """Under torch.autocast, hidden states are in bf16 and the head's weight is in fp32."""
    model = Bigrams()
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.up(model.embedding(tokens))
        ours = LinearCrossEntropy()(hidden, model.head.weight, labels)
    expected = F.cross_entropy((hidden.float() @ model.head.weight.T).mT, labels, reduction="sum")
    assert hidden.dtype == torch.bfloat16
    assert_close(ours, expected)
    for one, other in zip(
        torch.autograd.grad(ours, model.head.weight), torch.autograd.grad(expected, model.head.weight), strict=True
    ):
        assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_teacher_in_another_type(tokens, labels):
    student, teacher = Bigrams(dtype=torch.bfloat16), Bigrams(1, dtype=torch.bfloat16)
    with torch.no_grad():
        target = Teacher(teacher(tokens), teacher.head.weight)
    loss = ForwardKL()(student(tokens), student.head.weight, labels, teacher=target)
    one, other = (
        (network(tokens).float() @ network.head.weight.T)[labels != -100].log_softmax(-1)
        for network in (student, teacher)
    )
    assert_close(loss, F.kl_div(one, other, reduction="sum", log_target=True))


def test_default_dtype_does_not_round_the_loss(tokens, labels):
    model = Bigrams()
    expected = F.cross_entropy(model.head(model(tokens)).mT, labels, reduction="sum")
    torch.set_default_dtype(torch.bfloat16)
    try:
        loss = LinearCrossEntropy()(model(tokens), model.head.weight, labels)
        log_probs = LogProbs()(model(tokens), model.head.weight, labels).log_probs
    finally:
        torch.set_default_dtype(torch.float32)
    assert loss.dtype == log_probs.dtype == torch.float32
    assert_close(loss, expected)
    assert_close(-log_probs.sum(), expected)


@pytest.mark.parametrize("divergence", [ForwardKL(2.0), ReverseKL(2.0), JensenShannon(2.0)])
def test_distillation_from_stored_predictions(divergence, tokens, labels):
    """Storing all ids of the teacher gives the divergence from the whole teacher."""
    student, teacher = Bigrams(), Bigrams(1)
    operands = student(tokens), student.head.weight, labels
    stored = MostProbable(VOCABULARY - 1, 2.0)(teacher(tokens), teacher.head.weight, labels)
    column = torch.zeros(*labels.shape, stored.shape[1])
    column[labels != -100] = stored
    whole = divergence(*operands, teacher=Teacher(teacher(tokens), teacher.head.weight))
    assert_close(divergence(*operands, teacher=TopK.stored(column, labels)), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", [LinearCrossEntropy(), LogProbs(), ForwardKL(cross_entropy=0.5), ReverseKL()])
@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (lambda hidden, weight, labels: (hidden[:, :-1], weight, labels), (r"\[4, 9\]", r"\[4, 8, 8\]")),
        (lambda hidden, weight, labels: (hidden, weight, labels[:, 1:]), (r"\[4, 8\]", r"\[4, 9, 8\]")),
        (lambda hidden, weight, labels: (hidden, weight, labels[:2]), (r"\[2, 9\]", r"\[4, 9, 8\]")),
        (lambda hidden, weight, labels: (hidden, weight, labels.flatten()), (r"\[36\]", r"\[4, 9, 8\]")),
        (lambda hidden, weight, labels: (hidden, weight.T, labels), ("weight", r"\[8, 37\]")),
        (lambda hidden, weight, labels: (hidden, weight, labels.float()), ("labels", "float32")),
        (lambda hidden, weight, labels: (hidden, weight, labels.tolist()), ("labels", "list")),
    ],
)
def test_mismatched_shapes_and_types_are_refused(change, facts, head, tokens, labels):
    model = Bigrams()
    hidden, weight, labels = change(model(tokens), model.head.weight, labels)
    teacher = {"teacher": Teacher(model(tokens), model.head.weight)} if isinstance(head, ForwardKL | ReverseKL) else {}
    with refused(*facts):
        head(hidden, weight, labels, **teacher)


@pytest.mark.parametrize("head", [LinearCrossEntropy(), LogProbs()])
@pytest.mark.parametrize("wrong", [5000, VOCABULARY, -1, -101])
def test_labels_that_are_not_ids_are_refused(wrong, head, tokens, labels):
    model = Bigrams()
    labels[1, 4] = wrong
    with refused(str(wrong), str(VOCABULARY)):
        head(model(tokens), model.head.weight, labels)
    if wrong >= 0:
        with refused(str(wrong), str(VOCABULARY)):
            head(model(tokens), model.head.weight, Batch.of(tokens, labels))
    with refused("mask"):
        head(model(tokens), model.head.weight, labels != -100)


def test_labels_beyond_the_common_vocabulary_are_refused(tokens, labels):
    model = Bigrams()
    teacher = Teacher(model(tokens), model.head.weight[:30])
    labels[labels >= 30] = 3
    loss_fn = ForwardKL(cross_entropy=0.5)
    assert loss_fn(model(tokens), model.head.weight, labels, teacher=teacher).isfinite()
    labels[1, 4] = 33
    with refused("33", "30"):
        loss_fn(model(tokens), model.head.weight, labels, teacher=teacher)


def test_unchecked_labels_beyond_the_vocabulary_give_nan():
    """On a GPU, a check would wait for the device."""
    logits = torch.randn(3, 5)
    values = VocabularyShard(torch.empty(5, 2)).at(torch.tensor([[4], [5], [-1]]), logits)
    assert values[0] == logits[0, 4] and values[1:].isnan().all()


def test_teacher_of_other_tokens_is_refused(tokens, labels):
    model = Bigrams()
    operands = model(tokens), model.head.weight, labels
    with refused("teacher.hidden", r"\[4, 9\]", r"\[4, 8, 8\]"):
        ForwardKL()(*operands, teacher=Teacher(model(tokens[:, :-1]), model.head.weight))
    with refused("teacher", "3", str((labels != -100).sum().item())):
        ForwardKL()(*operands, teacher=TopK(torch.zeros(3, 2, dtype=torch.long), torch.zeros(3, 3)))
    count = (labels != -100).sum().item()
    with refused("teacher.ids", str(VOCABULARY)):
        ForwardKL()(*operands, teacher=TopK(torch.full((count, 1), VOCABULARY), torch.zeros(count, 2)))
    with refused("k", str(VOCABULARY + 1), str(VOCABULARY)):
        MostProbable(VOCABULARY + 1)(*operands)


# Preferences: log-probs of whole answers.


def of_rows(model, tokens, labels):
    """The log-probs of whole rows in plain torch."""
    log_probs = model.head(model(tokens)).log_softmax(-1)
    return log_probs.gather(2, labels.clamp(min=0)[..., None])[..., 0].where(labels != -100, 0).sum(1)


def test_dpo_in_your_own_training_loop(tokens, labels):
    """Rows 0 and 2 are preferred to rows 1 and 3."""
    model, frozen = Bigrams(), Bigrams(1)
    log_probs = LogProbs()
    policy = per_document(log_probs(model(tokens), model.head.weight, labels).log_probs, labels)
    with torch.no_grad():
        reference = per_document(log_probs(frozen(tokens), frozen.head.weight, labels).log_probs, labels)
    assert_close(policy, of_rows(model, tokens, labels))
    answers = AnswerLogProbs(policy, reference)
    loss = DPO(beta=0.3)(answers.at(torch.tensor([0, 2])), answers.at(torch.tensor([1, 3]))).mean()
    # As in Rafailov et al., 2023.
    ratios = of_rows(model, tokens, labels) - of_rows(frozen, tokens, labels).detach()
    expected = -F.logsigmoid(0.3 * (ratios[[0, 2]] - ratios[[1, 3]])).mean()
    assert_close(loss, expected)
    for ours, theirs in zip(gradients(loss, model), gradients(expected, model), strict=True):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_losses_accept_plain_tensors():
    chosen, rejected = torch.tensor([-3.0, -5.0]), torch.tensor([-4.0, -2.0])
    assert_close(CPO(beta=0.5, nll=0)(chosen, rejected), -F.logsigmoid(0.5 * (chosen - rejected)))
    lengths = torch.tensor([2, 5])
    loss = SimPO(beta=2.0, gamma=1.0)(
        AnswerLogProbs(chosen, lengths=lengths), AnswerLogProbs(rejected, lengths=lengths)
    )
    assert_close(loss, -F.logsigmoid(2 * (chosen - rejected) / lengths - 1))
    assert_close(BradleyTerry()(chosen, rejected), -F.logsigmoid(chosen - rejected))


@pytest.mark.parametrize("loss", [DPO(), IPO(), DPO(length_normalized=True)])
def test_missing_reference_is_refused(loss):
    values = torch.tensor([-3.0, -5.0])
    for answers in (values, AnswerLogProbs(values), AnswerLogProbs(values, lengths=torch.tensor([1, 2]))):
        with refused("reference", "AnswerLogProbs"):
            loss(answers, answers)
    for answers in (values, AnswerLogProbs(values)):
        with refused("reference"):
            KTO()(answers, torch.tensor([True, False]), torch.tensor(0.0))


@pytest.mark.parametrize("loss", [IPO(), DPO(length_normalized=True), SimPO(), CPO(), ORPO()])
def test_missing_lengths_are_refused(loss):
    values = torch.tensor([-3.0, -5.0])
    answers = AnswerLogProbs(values, values)
    with refused("lengths", "AnswerLogProbs"):
        loss(answers, answers)


def test_mismatched_answers_are_refused():
    values = torch.tensor([-3.0, -5.0])
    with refused("policy", r"\[2, 7\]", "sum"):
        AnswerLogProbs(torch.zeros(2, 7))
    with refused("reference", r"\[2, 1\]"):
        AnswerLogProbs(values, torch.zeros(2, 1))
    with refused("reference", r"\[3\]", r"\[2\]"):
        AnswerLogProbs(values, torch.zeros(3))
    with refused("lengths", "list"):
        AnswerLogProbs(values, lengths=[1, 2])
    with refused("rejected", r"\[1\]", r"\[2\]"):
        DPO()(AnswerLogProbs(values, values), AnswerLogProbs(values[:1], values[:1]))
    with refused("is_good", "int64"):
        KTO()(AnswerLogProbs(values, values), torch.tensor([1, 0]), torch.tensor(0.0))
    with refused("margin", r"\[1\]", r"\[2\]"):
        BradleyTerry()(values, values, torch.zeros(1))
    with refused("chosen", r"\[2, 1\]"):
        BradleyTerry()(values[:, None], values[:, None])


def test_scores_of_rows_match_sequence_classification(tokens):
    """The score is taken at the last token that is not padding, as in `AutoModelForSequenceClassification`."""
    tokens[1, 5:] = tokens[3, 2:] = 0
    tokens[:, :2] = 1
    hidden, weight = Bigrams()(tokens), torch.randn(1, DIM)
    scores = LastTokenScores(pad_id=0)(hidden, weight, Batch.of(tokens))
    last = [row.nonzero().max().item() for row in tokens]
    assert_close(scores, (hidden[range(4), last] @ weight.T)[:, 0])
    with refused("weight", "2"):
        LastTokenScores()(hidden, torch.randn(2, DIM), Batch.of(tokens))
    with refused("hidden", r"\[4, 8, 8\]"):
        LastTokenScores()(hidden[:, 1:], weight, Batch.of(tokens))


# Policies: log-probs of tokens.


@pytest.fixture
def rollout(labels):
    """Log-probs, sampler log-probs and advantages `[rows, seq]`, also at padding positions; and the mask."""
    draw = torch.Generator().manual_seed(0)
    log_probs, sampled = (-torch.rand(labels.shape, generator=draw) * 3 for _ in range(2))
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.0])[:, None].expand_as(labels)
    return log_probs.requires_grad_(), sampled, advantages, labels != -100


def test_ppo_of_padded_rows(rollout):
    """Schulman et al. 2017 with the mask of TRL: only tokens of completions count, not padding."""
    log_probs, sampled, advantages, mask = rollout
    ratio = (log_probs - sampled).exp()
    terms = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    expected = (terms * mask).sum() / mask.sum()
    loss, clipped = ClippedPolicy(0.2, 0.2)(log_probs[mask], sampled[mask], advantages[mask])
    assert_close(loss.mean(), expected)
    assert_close(*(torch.autograd.grad(value, log_probs, retain_graph=True)[0] for value in (loss.mean(), expected)))
    assert 0 < clipped.sum() < len(clipped)


def test_gspo_of_padded_rows(rollout):
    """The ratio of a row is the exponential of its mean log-ratio (Zheng et al., 2025)."""
    log_probs, sampled, advantages, mask = rollout
    ratio = (((log_probs - sampled) * mask).sum(1) / mask.sum(1)).exp()
    terms = -torch.min(ratio * advantages[:, 0], ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantages[:, 0])
    expected = (terms * mask.sum(1)).sum()
    labels = torch.where(mask, 5, -100)
    for of_completions in (mask, labels, Batch.of(labels.clamp(min=0), labels)):
        loss, _ = GSPO()(log_probs[mask], sampled[mask], advantages[mask], of_completions)
        assert_close(loss.sum(), expected)
    with refused("labels", "mask"):
        GSPO()(log_probs[mask], sampled[mask], advantages[mask])


@pytest.mark.parametrize("loss", [PolicyGradient(), ClippedPolicy(), GSPO()])
def test_values_of_the_wrong_shape_are_refused(loss, rollout):
    *padded, mask = rollout
    log_probs, sampled, advantages = (values[mask] for values in padded)
    count = str(len(log_probs))
    with refused("log_probs", r"\[4, 9\]", "mask"):
        loss(*padded, mask)
    with refused("advantages", rf"\[{count}, 1\]"):
        loss(log_probs, sampled, advantages[:, None], mask)
    with refused("advantages", r"\[4\]", rf"\[{count}\]"):
        loss(log_probs, sampled, rollout[2][:, 0], mask)
    with refused("advantages", "float"):
        loss(log_probs, sampled, 1.0, mask)


def test_mask_must_match_the_number_of_values(rollout):
    *padded, mask = rollout
    fewer = mask.clone()
    fewer[0, 0] = False
    with refused(str(mask.sum().item()), str(fewer.sum().item())):
        GSPO()(*(values[mask] for values in padded), fewer)
    with refused(str(mask.sum().item()), str(mask.numel())):
        per_document(padded[0][mask], mask.long())  # not a mask but labels, all of which count
    with refused("labels", "float32"):
        per_document(padded[0][mask], mask.float())
    with refused("labels", rf"\[{mask.numel()}\]"):
        per_document(padded[0][mask], mask.flatten())


def test_kl_estimate_requires_equal_shapes():
    values = torch.zeros(3)
    assert kl_estimate(values, values).tolist() == [0, 0, 0]
    with refused("others", r"\[3, 1\]", r"\[3\]"):
        kl_estimate(values, values[:, None])


def test_advantages_of_padded_rows(rollout):
    """delta_t + decay A_{t+1}, where delta_t = r_t + V_{t+1} - V_t (Schulman et al., 2016), row by row."""
    values, rewards, _, mask = (tensor.detach() for tensor in rollout)
    final = torch.tensor([1.0, 2.0, 3.0, 4.0])
    advantages = torch.zeros(mask.shape)
    advantages[mask] = gae(rewards[mask], values[mask], mask, 0.9, final)
    for row in range(4):
        advantage, value_after = 0.0, 0.0
        at = mask[row].nonzero()[:, 0].tolist()
        for token in reversed(at):
            reward = rewards[row, token] + (final[row] if token == at[-1] else 0)
            advantage = reward + value_after - values[row, token] + 0.9 * advantage
            value_after = values[row, token]
            assert_close(advantages[row, token], advantage)
    with refused("rewards", r"\[4, 9\]", "mask"):
        gae(rewards, values, mask, 0.9)
    with refused("final", r"\[1\]", r"\[4\]"):
        gae(rewards[mask], values[mask], mask, 0.9, final[:1])
    with refused("decay", "1.5"):
        gae(rewards[mask], values[mask], mask, 1.5)


# Constructors check the same ranges as configs.


@pytest.mark.parametrize(
    ("make", "argument", "value"),
    [
        (lambda: DPO(beta=-1), "beta", "-1"),
        (lambda: DPO(0.1, 1.0), "label_smoothing", "1.0"),
        (lambda: IPO(beta=0), "beta", "0"),
        (lambda: SimPO(gamma=-0.5), "gamma", "-0.5"),
        (lambda: CPO(nll=-1), "nll", "-1"),
        (lambda: ORPO(beta=float("nan")), "beta", "nan"),
        (lambda: KTO(desirable=-1), "desirable", "-1"),
        (lambda: BradleyTerry(center=-1), "center", "-1"),
        (lambda: LinearCrossEntropy(chunk_tokens=0), "chunk_tokens", "0"),
        (lambda: LinearCrossEntropy(accuracy=1), "accuracy", "1"),
        (lambda: LogProbs(temperature=0), "temperature", "0"),
        (lambda: LogProbs(-5), "chunk_tokens", "-5"),
        (lambda: ForwardKL(0), "temperature", "0"),
        (lambda: ReverseKL(cross_entropy=1.5), "cross_entropy", "1.5"),
        (lambda: JensenShannon(beta=1.0), "beta", "1.0"),
        (lambda: MostProbable(0), "k", "0"),
        (lambda: LastTokenScores(pad_id=-1), "pad_id", "-1"),
        (lambda: PolicyGradient(max_ratio=0), "max_ratio", "0"),
        (lambda: ClippedPolicy(low=-0.2), "low", "-0.2"),
        (lambda: GSPO(high=0), "high", "0"),
        (lambda: LoRA(rank=0), "rank", "0"),
        (lambda: LoRA(alpha=-1), "alpha", "-1"),
        (lambda: LoRA(init="pisa"), "init", "pisa"),
        (lambda: LoRA(rank_pattern={"query": 0}), "rank_pattern", "0"),
        (lambda: cosine(optimizer(), 0), "total_steps", "0"),
        (lambda: linear(optimizer(), 10, min_ratio=2), "min_ratio", "2"),
    ],
)
def test_constructors_check_ranges(make, argument, value):
    with pytest.raises(TuneError) as error:
        make()
    assert str(error.value).startswith(f"{argument}: ") and value in str(error.value)


def optimizer():
    return torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)


@pytest.mark.slow
def test_losses_are_imported_without_process_groups_and_meshes():
    script = "import sys; before = {*sys.modules}; import tune.losses; print(*({*sys.modules} - before), sep='\\n')"
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert "torch" in loaded and "tune.losses" in loaded
    packages = {name.split(".")[1] for name in loaded if name.startswith("tune.")}
    assert packages == {"losses", "collators", "types", "errors", "secrets", "terminal"}
    assert "torch.distributed.tensor" not in loaded and "torch.distributed.fsdp" not in loaded


def test_sample_instead_of_a_batch_is_refused(tokens):
    model = Bigrams()
    sample = Sample(tokens[0].numpy(), tokens[0].numpy())
    with refused("labels", "Sample"):
        LinearCrossEntropy()(model(tokens), model.head.weight, sample)


def test_training_loops_of_the_docs_page():
    """The code of docs/components.md gives the gradients of torch's formulas."""
    page = (Path(__file__).parents[2] / "docs" / "components.md").read_text(encoding="utf-8")
    section = page.split("## Losses in a loop of your own")[1].split("\n## ")[0]
    first, second = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    torch.manual_seed(0)
    names = {}
    exec(first, names)
    tokens, head, body = names["tokens"], names["head"], names["body"]
    logits = head(body(tokens))
    (expected,) = torch.autograd.grad(
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()), head.weight
    )
    assert_close(head.weight.grad, expected, rtol=1e-4, atol=1e-7)
    head.weight.grad = None
    exec(second, names)
    model, frozen = (nn.Sequential(names[f"{kind}body"], names[f"{kind}head"]) for kind in ("", "reference_"))
    ratio = (of_tokens(model, tokens) - of_tokens(frozen, tokens).detach()).sum(1)
    (expected,) = torch.autograd.grad(-F.logsigmoid(0.1 * (ratio[:4] - ratio[4:])).mean(), head.weight)
    assert_close(head.weight.grad, expected, rtol=1e-4, atol=1e-7)


def of_tokens(model, tokens):
    return model(tokens)[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["LinearCrossEntropy", "ForwardKL", "LogProbs"])
def test_a_graph_has_several_backwards_but_no_second_derivative(name, dtype):
    """As for the plain computation; a second derivative, which would be wrong, is an error."""
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, DIM, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, DIM, dtype=dtype, requires_grad=True)
    labels = torch.randint(VOCABULARY, (2, 5))
    if name == "LinearCrossEntropy":
        loss = LinearCrossEntropy()(hidden, weight, labels)
    elif name == "LogProbs":
        loss = LogProbs()(hidden, weight, labels).log_probs.square().sum()
    else:
        targets = torch.randn(10, 5).log_softmax(dim=1)  # of 4 ids and all others
        ids = torch.arange(4).expand(10, -1)
        loss = ForwardKL()(hidden, weight, labels, teacher=TopK(ids, targets))
    once = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    again = torch.autograd.grad(3 * loss, [hidden, weight], retain_graph=True)
    for first, second in zip(once, again, strict=True):
        rounding = 1e-1 if dtype == torch.bfloat16 else 1e-5
        assert_close(second, 3 * first, rtol=rounding, atol=rounding)

    with pytest.raises(TuneError, match="create_graph"):
        torch.autograd.grad(loss, [hidden], create_graph=True)
