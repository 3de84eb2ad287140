"""Several steps of one shape between two host synchronizations give the same tokens as single steps."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from generation.test_sampler import SMALL, approximately, make_prompts
from models.test_families import VARIANTS, make_pair

from tune.generation import Sampler, decoding, sampler
from tune.generation.decoding import Decoding, bucket

transformers = pytest.importorskip("transformers")

KINDS = ["llama", "gemma3_text", "gpt_oss", "qwen3_5_text", "deepseek_v3", "mixtral-window"]


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    config_class, changes = VARIANTS[request.param]
    return make_pair(getattr(transformers, config_class)(**SMALL | changes), tmp_path_factory.mktemp(request.param))[1]


@pytest.fixture
def replayed(monkeypatch):
    """Decode as on a GPU, with several steps, buckets and replayed captures; return the replays."""
    seen = []

    class Replayed(Decoding):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.steps, self.captures = 5, True
            self.uniforms, self.chosen = self.uniforms.repeat(1, 5), self.chosen.repeat(1, 1, 5)

        def _capture(self, rows, length):
            def replay():
                seen.append((rows, length))
                self._step(rows, length)

            self.graphs[rows, length] = SimpleNamespace(replay=replay)

    monkeypatch.setattr(sampler, "Decoding", Replayed)
    return seen


@pytest.mark.slow
def test_several_steps_at_once_give_the_same_tokens(model, replayed, monkeypatch):
    """Rows end at any time, others join, and lengths exceed windows and buckets."""
    monkeypatch.setattr(decoding, "FEWEST_SLOTS", 16)
    settings = {"max_new_tokens": 20, "stop_ids": range(9), "max_rows": 5}
    outputs = Sampler(**settings)(model, make_prompts(), samples=3)
    assert {rows for rows, _ in replayed} == {5, 1} and len({length for _, length in replayed}) > 1
    monkeypatch.undo()
    assert outputs == approximately(Sampler(**settings)(model, make_prompts(), samples=3))


def test_steps_do_not_wait_for_the_device(model, replayed):
    from recipes.test_synchronisation import Waits

    with Waits() as waits:
        Sampler(max_new_tokens=11, top_k=5, top_p=0.9)(model, make_prompts()[:2])
    assert not waits.found


def test_buckets():
    assert [bucket(count) for count in (1, 2, 3, 5, 64)] == [1, 2, 4, 8, 64]
    assert [bucket(count, 256) for count in (1, 256, 257)] == [256, 256, 512]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are captured on a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_step_is_one_launch_per_token(model, dtype):
    moved = model.to("cuda", dtype)
    settings = {"max_new_tokens": 41, "temperature": 0}
    launches = []
    replay = torch.cuda.CUDAGraph.replay
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: launches.append(1) or replay(graph))
        captured = Sampler(**settings)(moved, make_prompts())
        assert len(launches) == 39  # the first token follows the prompt, the second comes from the capture
        patch.setattr(decoding, "_can_capture", lambda model: False)
        plain = Sampler(**settings)(moved, make_prompts())
    model.to("cpu", torch.float32)
    if dtype == torch.float32:
        assert [[output.tokens for output in row] for row in captured] == [
            [output.tokens for output in row] for row in plain
        ]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("2 GiB"), RuntimeError("not permitted")])
def test_capture_without_memory_is_tried_again(error, monkeypatch):
    for name in ("CUDAGraph", "Stream", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    decoder = object.__new__(Decoding)
    decoder.device, decoder.pool, decoder.graphs, decoder.captures = "cuda", None, {}, True
    monkeypatch.setattr(Decoding, "_step", mock.Mock(side_effect=error))
    with pytest.warns(UserWarning, match="CUDA graph"):
        decoder._capture(1, 8)
    assert decoder.captures == isinstance(error, torch.OutOfMemoryError) and not decoder.graphs
