"""Chosen tokens follow the distribution, and truncation matches transformers."""

import math
import statistics
from itertools import islice
from pathlib import Path

import pytest
import torch
from helpers import run_processes, slow_but
from torch.testing import assert_close

from tune.generation.sampler import _kept, choose, uniforms
from tune.losses.chunks import ALL

transformers = pytest.importorskip("transformers")

LOGITS = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
def test_choose_inverts_the_cumulative_distribution(temperature):
    probs = (LOGITS.double() / temperature).softmax(dim=-1)
    for uniform in (0.0, 0.123456, 0.5, 0.9, 1 - 2**-53):
        ids, log_probs = choose(LOGITS, torch.full((5,), uniform, dtype=torch.float64), temperature=temperature)
        below = torch.stack([row[:id].sum() for row, id in zip(probs, ids, strict=True)])
        chosen = probs.gather(1, ids[:, None])[:, 0]
        assert (below <= uniform + 1e-6).all() and (uniform < below + chosen + 1e-6).all()
        assert_close(log_probs, chosen.log().float(), atol=1e-5, rtol=1e-5)


def test_tokens_are_chosen_in_proportion_to_their_probability():
    logits = torch.tensor([0.5, 0.0, 0.3, 0.2]).log().expand(4000, -1)
    ids, _ = choose(logits, (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000)
    assert ids.bincount().tolist() == pytest.approx([2000, 0, 1200, 800], abs=1)


def test_temperature_0_takes_the_argmax_with_its_log_prob_at_1():
    ids, log_probs = choose(LOGITS, torch.zeros(5), temperature=0)
    assert torch.equal(ids, LOGITS.argmax(dim=-1))
    assert_close(log_probs, LOGITS.log_softmax(dim=-1).amax(dim=-1))


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        *((7, None, None), (1000, None, None), (1, None, None), (None, 0.8, None), (None, 1e-9, None)),
        *((None, 1.0, None), (None, None, 0.05), (None, None, 1.0), (40, 0.9, 0.02), (20, 0.5, None)),
    ],
)
def test_top_k_top_p_and_min_p_match_transformers(top_k, top_p, min_p):
    settings = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    expected = LOGITS
    processors = transformers.generation.logits_process
    for name, processor in {
        "top_k": processors.TopKLogitsWarper, "top_p": processors.TopPLogitsWarper, "min_p": processors.MinPLogitsWarper
    }.items():  # fmt: skip
        expected = expected if settings[name] is None else processor(settings[name])(None, expected)
    kept = _kept(LOGITS.log_softmax(dim=-1), top_k, top_p, min_p, ALL)
    assert torch.equal(kept.isfinite(), expected.isfinite())
    draws = torch.rand(5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    draws[:2] = torch.tensor([0, 1 - 2**-53], dtype=torch.float64)  # the extremes, where excluded ids may be
    ids, log_probs = choose(LOGITS, draws, **settings)
    assert expected.gather(1, ids[:, None]).isfinite().all()
    assert_close(log_probs, LOGITS.log_softmax(dim=-1).gather(1, ids[:, None])[:, 0])  # under the whole distribution


@pytest.mark.parametrize(("top_p", "count"), [(0.5, 1), (0.75, 2), (0.875, 3)])
def test_top_p_stops_where_probabilities_add_up_to_it_exactly(top_p, count):
    logits = torch.tensor([[0.125, 0.5, 0.0625, 0.25, 0.0625]]).log()
    kept = _kept(logits, None, top_p, None, ALL).isfinite()
    assert kept.sum() == count
    assert torch.equal(kept, transformers.TopPLogitsWarper(top_p)(None, logits).isfinite())


DRAWN = [{"temperature": 0.7}, {"temperature": 1.5}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}]


@pytest.mark.slow
@pytest.mark.parametrize("settings", slow_but(DRAWN[2:3], DRAWN))
def test_10_000_draws_follow_the_distribution(settings):
    """Pearson's chi-square against the distribution of transformers; the seed determines each draw."""
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(3)) * 1.5
    processors = transformers.generation.logits_process
    wanted = logits / settings.get("temperature", 1.0)
    for name, warper in {"top_k": "TopKLogitsWarper", "top_p": "TopPLogitsWarper", "min_p": "MinPLogitsWarper"}.items():
        if name in settings:
            wanted = getattr(processors, warper)(settings[name])(None, wanted)
    shares = wanted.double().softmax(dim=-1)[0]

    def draws(seed):
        numbers = torch.tensor([next(uniforms(seed, 0, prompt, 0)) for prompt in range(10_000)], dtype=torch.float64)
        return choose(logits.expand(10_000, -1), numbers, **settings)[0]

    chosen, possible = draws(1), shares > 0
    counts = chosen.bincount(minlength=20)
    assert not counts[~possible].any()
    expected = 10_000 * shares[possible]
    chi_square = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    # Wilson and Hilferty's normal approximation of chi-square: below 3.1 with a probability of 0.999.
    normal = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert normal < 3.1
    assert torch.equal(chosen, draws(1)) and not torch.equal(chosen, draws(2))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_processes_with_sharded_logits_choose_together(processes):
    run_processes(Path(__file__).with_name("choose_together.py"), processes)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_logits_give_nan_log_probs(value, temperature):
    """A sampler stops at NaN log-probs; the ids are still in the vocabulary."""
    ids, log_probs = choose(LOGITS.clone().index_fill_(1, torch.tensor([7]), value), torch.full((5,), 0.5), temperature)
    assert log_probs.isnan().all() and (ids >= 0).all() and (ids < 300).all()


def test_equally_likely_tokens_are_kept_together():
    assert _kept(torch.full((1, 4), math.log(0.25)), 2, 0.3, None, ALL).isfinite().all()


def test_uniforms():
    draws = list(islice(uniforms(1, 2, 3, 4), 20_000))
    assert min(draws) >= 0 and max(draws) < 1 and statistics.mean(draws) == pytest.approx(0.5, abs=0.01)
    assert len({next(uniforms(*keys)) for keys in [(1, 2, 3, 4), (2, 1, 3, 4), (1, 2, 4, 3), (0, 0, 0, 0)]}) == 4
    # numpy's Philox and SeedSequence give the same numbers in all versions.
    assert list(islice(uniforms(0, 0, 0, 0), 2)) == [0.014067035665647709, 0.2577672456246177]
