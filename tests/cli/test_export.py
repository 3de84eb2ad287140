"""`tune export`: llama.cpp itself and transformers read its output."""

import io
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import full_finetune
import lora_finetune
import pytest
import reward_finetune
import torch
from helpers import save_checkpoint
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from sample_texts import texts

from tune.checkpointers import load_model
from tune.cli import main
from tune.cli.export import modelfile
from tune.generation import Sampler
from tune.models import Decoder
from tune.peft import open_model
from tune.tokenizers import Tokenizer
from tune.verify import LlamaCpp

pytest.importorskip("xllamacpp")
gguf = pytest.importorskip("gguf")

TEXT = "the cat sat on XYZ, under 27 rugs and then it ran; qwerty!"
REAL = Path(__file__).parents[2] / ".demo" / "smollm2-135m"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 9.0, 16.0], "partial_rotary_factor": 0.75,
}  # fmt: skip
LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CORRECTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5, "attention_bias": True,
}  # fmt: skip
WINDOWS = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
OSS = {
    "head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 8, "num_hidden_layers": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
SCALES = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 3.0}
FAMILIES = {
    "llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-3.1": ("LlamaConfig", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 24}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2_moe": ("Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 64}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS | {"head_dim": 24, "norm_topk_prob": True}),
    "gemma": ("GemmaConfig", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2Config", GEMMA | {"num_hidden_layers": 4}),
    "gemma3_text": ("Gemma3TextConfig", GEMMA | {"num_hidden_layers": 6, "rope_parameters": LINEAR}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "phi3-long": ("Phi3Config", {"rope_parameters": LONG, "original_max_position_embeddings": 16}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", SCALES),
    "granitemoe": ("GraniteMoeConfig", SCALES | {"num_local_experts": 6}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        SCALES
        | {"layer_types": ["full_attention"] * 3, "num_local_experts": 0, "shared_intermediate_size": 96}
        | {"position_embedding_type": "rope"},
    ),
    "cohere": ("CohereConfig", {}),
    "cohere2": ("Cohere2Config", {"sliding_window": 16, "num_hidden_layers": 4}),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4}),
    "starcoder2": ("Starcoder2Config", {}),
    "arcee": ("ArceeConfig", {}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 24}),
    "ministral3": (
        "Ministral3Config",
        {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 8}},
    ),
    "olmo3": ("Olmo3Config", {"sliding_window": 8, "num_hidden_layers": 4, "rope_parameters": WINDOWS}),
    "olmoe": ("OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "exaone4": ("Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "exaone4-windows": (
        "Exaone4Config", {"sliding_window": 8, "sliding_window_pattern": 4, "num_hidden_layers": 64},
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32},
    ),
    "seed_oss": ("SeedOssConfig", {"head_dim": 24, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "glm": ("GlmConfig", {"head_dim": 16}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "glm4_moe": ("Glm4MoeConfig", CORRECTED | {"head_dim": 16, "use_qk_norm": True, "n_shared_experts": 2}),
    "gpt_oss": ("GptOssConfig", OSS),
}  # fmt: skip


def export(source: Path, out: Path, *options: str) -> Path:
    main(["export", str(source), "--out", str(out), *options])
    return out


def log_probs(model: Decoder, tokens: list[int]) -> list[float]:
    """Return the log-probabilities of all tokens but the first."""
    with torch.no_grad():
        log_softmax = model(torch.tensor([tokens])).log_softmax(-1)[0]
    return [log_softmax[at - 1, tokens[at]].item() for at in range(1, len(tokens))]


def below_the_best(model: Decoder, prompt: list[int], answer: list[int]) -> float:
    """Return the largest gap between the maximum logit and the logit of an answer token."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer]))[0, len(prompt) - 1 : -1]
    return (logits.amax(-1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]).max().item()


def require_same(file: Path, model: Decoder, tokens: list[int], within: float, **arguments: Path) -> None:
    with LlamaCpp(file, **arguments) as llama_cpp:
        theirs = [llama_cpp.log_prob(tokens[:at], tokens[at]) for at in range(1, len(tokens))]
    errors = [abs(one - other) for one, other in zip(theirs, log_probs(model, tokens), strict=True)]
    assert statistics.median(errors) < within  # for some tokens, a router may choose another expert


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_the_same_probabilities(family: str, tmp_path: Path) -> None:
    config_class, changes = FAMILIES[family]
    folder = save_checkpoint(tmp_path / "model", config_class, initializer_range=0.1, pad_token_id=None, **changes)
    export(folder, tmp_path / "model.gguf", "--to", "gguf")
    tokens = Tokenizer(str(folder)).encode(TEXT)[:32]
    require_same(tmp_path / "model.gguf", load_model(str(folder)), tokens, within=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "within"), [("f16", 0.005), ("bf16", 0.02), ("q8_0", 0.02), ("q4_0", 0.2)])
def test_gguf_types(checkpoint: Path, kind: str, within: float, tmp_path: Path) -> None:
    file = export(checkpoint, tmp_path / "model.gguf", "--to", "gguf", "--type", kind)
    stored = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert stored["blk.0.ffn_up.weight"] == kind.upper()
    assert stored["token_embd.weight"] == {"q4_0": "Q8_0"}.get(kind, kind.upper())
    require_same(file, load_model(str(checkpoint)), Tokenizer(str(checkpoint)).encode(TEXT)[:24], within)


@pytest.mark.slow
def test_gguf_tokens_and_chat_template_match_the_folder(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file, tokenizer = export(checkpoint, tmp_path / "m.gguf", "--to", "gguf"), Tokenizer(str(checkpoint))
    fields = gguf.GGUFReader(file).fields
    assert fields["tokenizer.chat_template"].contents() == tokenizer.chat_template
    texts = [TEXT, "  It's  1,234 €, naïve\n\n\tdef f(x):\r\n", "<|im_start|>user\nHi<|im_end|>\n日本語 ok"]
    chat = [{"role": "user", "content": "the dog ran"}]
    prompt = tokenizer.encode(tokenizer.apply_chat_template(chat, add_generation_prompt=True))
    with LlamaCpp(file) as llama_cpp:
        for text in texts:
            assert llama_cpp.count(text) == len(tokenizer.encode(text, add_special_tokens=True))
            assert llama_cpp.greedy(text, 3) == llama_cpp.greedy(tokenizer.encode(text), 3)
        assert llama_cpp.ask(messages=chat, max_tokens=1)["usage"]["prompt_tokens"] == len(prompt)
    printed = capsys.readouterr().out
    assert f"llama-cli -m {file}" in printed and "ollama create m -f" in printed
    assert "note: Ollama does not run the Jinja chat template" in printed
    assert (tmp_path / "m.gguf.Modelfile").read_text() == ('FROM ./m.gguf\nPARAMETER stop "<|im_end|>"\n')


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_vocabulary(prefix: bool, tmp_path: Path) -> None:
    """As in Llama 2: the ids match, as equal logits show, and greedy answers are the same."""
    sentencepiece, trained = pytest.importorskip("sentencepiece"), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts(700, seed=1)), model_writer=trained, vocab_size=1000, model_type="bpe",
        byte_fallback=True, character_coverage=0.99, normalization_rule_name="identity", add_dummy_prefix=prefix,
        remove_extra_whitespaces=False, split_digits=True, allow_whitespace_only_pieces=True, minloglevel=3,
    )  # fmt: skip
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    folder = save_checkpoint(tmp_path / "model", vocab_size=1000, initializer_range=0.1, **ends)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][:259] = 0  # llama.cpp's server cannot show tokens that are part of a character
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).unlink()
    (folder / "tokenizer.model").write_bytes(trained.getvalue())
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True, "legacy": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    file, tokenizer = export(folder, tmp_path / "m.gguf", "--to", "gguf"), Tokenizer(str(folder))
    library = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    model = load_model(str(folder))
    with LlamaCpp(file) as llama_cpp:
        for text in ("the cat", "  two  blanks ", "a\n\n\tb\n", "naïve Größe 你好", "🦊👍🏽 \u0e01 ᏣᎳᎩ 𓀀", "12345,67"):
            ids = tokenizer.encode(text, add_special_tokens=True)
            assert ids == [1, *library.encode(text)]
            assert llama_cpp.count(text) == len(ids)
            of_text, of_ids = llama_cpp.complete(text, 16), llama_cpp.complete(ids, 16)
            same = pytest.approx([token["logprob"] for token in of_ids], abs=1e-5)
            assert [token["logprob"] for token in of_text] == same
            (answer,) = Sampler(max_new_tokens=16, temperature=0)(model, [ids])[0]
            assert [token["id"] for token in of_text] == answer.tokens


def test_existing_modelfile_is_not_overwritten(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "m.gguf.Modelfile").write_text("mine")
    with pytest.raises(SystemExit) as stopped:
        export(checkpoint, tmp_path / "m.gguf", "--to", "gguf")
    assert stopped.value.code == 2 and "m.gguf.Modelfile (for Ollama) already exists" in capsys.readouterr().err
    assert (tmp_path / "m.gguf.Modelfile").read_text() == "mine" and not (tmp_path / "m.gguf").exists()


def test_stop_tokens_with_quotes() -> None:
    ends = SimpleNamespace(stop_ids={1, 2}, decode=lambda ids: {1: "<end>", 2: '<"end">'}[ids[0]])
    assert modelfile(ends, "m") == 'FROM ./m\nPARAMETER stop "<end>"\nPARAMETER stop """<"end">"""\n'


@pytest.mark.slow
def test_model_card_describes_the_export(checkpoint: Path, runs: dict[str, Path], tmp_path: Path) -> None:
    card = (export(checkpoint, tmp_path / "plain", "--to", "hf") / "README.md").read_text()
    assert f"`{checkpoint.name}`, written by `tune export`" in card and "Fine-tuned" not in card
    card = (export(runs["lora"], tmp_path / "lora", "--to", "hf") / "README.md").read_text()
    assert f"`{checkpoint.name}` with the adapter `lora_finetune/adapter` merged in" in card


def settings(model: Path, chats: Path, run: Path, *others: str) -> list[str]:
    return [
        f"model.path={model}", f"dataset.path={chats}", f"output_dir={run}", "device=cpu", "compute.dtype=fp32",
        "optimizer.lr=0.01", "global_batch_size=4", "max_seq_len=128", "max_steps=3", "checkpointer.every=1",
        "checkpointer.keep=null", *others,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def runs(checkpoint: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    for recipe, others in ((full_finetune, []), (lora_finetune, ["adapter.rank=4", "adapter.rank_pattern={down: 2}"])):
        with pytest.MonkeyPatch.context() as patch:
            run = folder / recipe.__name__
            patch.setattr("sys.argv", [recipe.__name__, *settings(checkpoint, chats, run, *others)])
            recipe.main()
    return {"full": folder / "full_finetune", "lora": folder / "lora_finetune"}


@pytest.mark.slow
def test_adapter_of_a_run_is_merged_or_exported_separately(
    runs: dict[str, Path], checkpoint: Path, tmp_path: Path
) -> None:
    opened = open_model(runs["lora"])
    model, tokenizer = opened.load(), opened.tokenizer()
    tokens = tokenizer.encode(TEXT)[:24]
    pairs = zip(log_probs(model, tokens), log_probs(load_model(str(checkpoint)), tokens), strict=True)
    distance = max(abs(tuned - base) for tuned, base in pairs)
    assert distance > 0.5
    merged = export(runs["lora"], tmp_path / "merged.gguf", "--to", "gguf")
    require_same(merged, model, tokens, within=0.01)
    base = export(checkpoint, tmp_path / "base.gguf", "--to", "gguf")
    lora = export(runs["lora"] / "adapter", tmp_path / "lora.gguf", "--to", "gguf-lora")
    require_same(base, model, tokens, within=0.01, lora=lora)
    assert (tmp_path / "lora.gguf.Modelfile").read_text() == "FROM ./BASE.gguf\nADAPTER ./lora.gguf\n"


@pytest.mark.slow
def test_run_with_a_merged_adapter_still_exports_the_adapter(
    runs: dict[str, Path], checkpoint: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["lora"], run)
    shutil.copytree(checkpoint, run / "model")
    of_adapter = export(run / "adapter", tmp_path / "adapter.gguf", "--to", "gguf-lora")
    of_run = export(run, tmp_path / "run.gguf", "--to", "gguf-lora")
    assert of_run.read_bytes() == of_adapter.read_bytes()
    main(["merge", str(checkpoint), str(run), str(tmp_path / "merged")])
    whole = export(run / "adapter", tmp_path / "whole", "--to", "hf")
    merged, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", whole))
    assert all(torch.equal(merged[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_export_checkpoint_of_a_reward_model_with_adapters(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Its head is trained in full, although the adapter settings do not list it. The merged model keeps the head."""
    pairs = tmp_path / "pairs.jsonl"
    rows = ({"instruction": f"Say {n}", "chosen": f"{n}", "rejected": "No."} for n in range(12))
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = tmp_path / "run"
    monkeypatch.setattr("sys.argv", ["reward_finetune", *settings(checkpoint, pairs, run, "adapter.rank=4")])
    reward_finetune.main()
    end, last = (
        export(run, tmp_path / name, "--to", "hf", *step) for name, step in (("a", []), ("b", ["--step", "3"]))
    )
    merged, stored = load_file(end / "model.safetensors"), load_file(last / "model.safetensors")
    assert "score.weight" in stored and stored.keys() == merged.keys()
    assert all(torch.equal(stored[name], merged[name]) for name in stored)
    shown = capsys.readouterr().out
    assert f"vllm serve {end} --runner pooling\n" in shown and "AutoModelForSequenceClassification" in shown
    assert '/classify with "use_activation": false' in shown
    again = export(end, tmp_path / "again", "--to", "hf")
    assert (again / "model.safetensors").read_bytes() == (end / "model.safetensors").read_bytes()
    for name, source in {"of_adapter": run, "of_model": end}.items():
        main(["quantize", str(source), "--to", "int8", "--out", str(tmp_path / name)])
        assert f"vllm serve {tmp_path / name} --runner pooling\n" in capsys.readouterr().out
    of_adapter, of_model = (load_file(tmp_path / name / "model.safetensors") for name in ("of_adapter", "of_model"))
    assert all(torch.equal(of_adapter[name], of_model[name]) for name in {*of_adapter, *of_model})
    for source in (run, end):
        with pytest.raises(SystemExit):
            main(["export", str(source), "--to", "gguf", "--out", str(tmp_path / "gguf")])
        assert "a score head" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("error:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_export_checkpoint_of_a_run(kind: str, runs: dict[str, Path], tmp_path: Path) -> None:
    run = runs[kind]
    last = load_model(str(export(run, tmp_path / "end", "--to", "hf")))
    for step, same in ((3, True), (2, False)):
        model = load_model(str(export(run, tmp_path / f"{step}", "--to", "hf", "--step", str(step))))
        pairs = zip(model.parameters(), last.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs) == same
    file = export(run, tmp_path / "m.gguf", "--to", "gguf", "--step", "3")
    require_same(file, last, Tokenizer(str(tmp_path / "end")).encode(TEXT)[:16], within=0.01)


@pytest.mark.slow
def test_other_commands_accept_checkpoints_of_a_run(
    runs: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """By its folder and by --step; no temporary files stay in the run."""
    run, at_two = runs["full"], export(runs["full"], tmp_path / "2", "--to", "hf", "--step", "2")
    checkpoint, files = run / "checkpoints" / "step-00000002", sorted(run.iterdir())
    text = tmp_path / "texts.jsonl"
    text.write_text(json.dumps({"text": TEXT}) + "\n")

    def generated(*named: str) -> str:
        capfd.readouterr()
        main(["generate", *named, "--prompt", "the cat", "--max-new-tokens", "9", "--temperature", "2"])
        return capfd.readouterr().out

    expected = generated(str(at_two))
    assert generated(str(checkpoint)) == generated(str(run), "--step", "2") == expected != generated(str(run))
    main(["generate", str(run), "--step", "2", "--prompt", "the cat", "--max-new-tokens", "1"])
    message = capfd.readouterr().err
    assert f"{run} after step 2: float32" in message and ".step-2-" not in message
    losses = []
    for named in ([str(at_two)], [str(run), "--step", "2"]):
        main(["eval", *named, "--data", str(text), "--out", str(tmp_path / "out.json")])
        losses.append(json.loads((tmp_path / "out.json").read_text())["results"])
    assert losses[0] == losses[1]
    for name, named in {"q2": [str(at_two)], "qn": [str(checkpoint)]}.items():
        main(["quantize", *named, "--to", "int8", "--out", str(tmp_path / name)])
    assert (tmp_path / "q2/model.safetensors").read_bytes() == (tmp_path / "qn/model.safetensors").read_bytes()
    assert sorted(run.iterdir()) == files
    with pytest.raises(SystemExit) as stopped:
        generated(str(run), "--step", "9")
    assert stopped.value.code == 2 and "has no checkpoint of step 9; it has 1, 2, 3" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_average_of_checkpoints(kind: str, runs: dict[str, Path], tmp_path: Path) -> None:
    for steps, options in (([1, 2, 3], []), ([1, 3], ["--steps", "3", "1"])):
        out = tmp_path / f"mean{len(steps)}"
        main(["merge", str(runs[kind]), str(out), "--method", "average", *options])
        averaged, models = load_model(str(out)).state_dict(), []
        for step in steps:
            folder = tmp_path / f"{step}"
            if not folder.exists():
                export(runs[kind], folder, "--to", "hf", "--step", str(step))
            models.append(load_model(str(folder)).state_dict())
        assert not torch.equal(
            models[0]["blocks.0.attention.query.weight"], averaged["blocks.0.attention.query.weight"]
        )
        for name, tensor in averaged.items():
            mean = torch.stack([model[name] for model in models]).mean(0)
            torch.testing.assert_close(tensor, mean, rtol=1e-6, atol=1e-7)
            if kind == "lora" and "norm" in name:
                assert torch.equal(tensor, models[0][name])  # frozen weights are unchanged
    assert "the mean of the steps 1, 3 of the run" in (tmp_path / "mean2" / "README.md").read_text()
    assert Tokenizer(str(tmp_path / "mean2")).chat_template


WRONG_MEANS = {
    "an adapter": (["RUN", "ADAPTER", "NEW", "--method", "average"], "--method average only takes RUN, OUT"),
    "weights": (["RUN", "NEW", "--method", "average", "--weights", "1", "1"], "--method average only takes RUN"),
    "another method": (["RUN", "A", "B", "NEW", "--method", "ties", "--steps", "1"], "Add --method average"),
    "one step": (["RUN", "NEW", "--method", "average", "--steps", "1"], "found 1."),
    "no run": (["MODEL", "NEW", "--method", "average"], "is not a run folder"),
    "no such step": (
        ["RUN", "NEW", "--method", "average", "--steps", "1", "9"],
        "no checkpoint of step 9; it has 1",
    ),
    "no method": (["RUN", "NEW"], "or RUN, OUT and --method average"),
    "there already": (["RUN", "MODEL", "--method", "average"], "already exists"),
}


@pytest.mark.parametrize("wrong", WRONG_MEANS)
def test_invalid_averages_are_rejected(
    wrong: str, checkpoint: Path, runs: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    arguments, message = WRONG_MEANS[wrong]
    places = {"MODEL": checkpoint, "RUN": runs["full"], "NEW": tmp_path / "new"}
    with pytest.raises(SystemExit) as stopped:
        main(["merge", *(str(places.get(argument, argument)) for argument in arguments)])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".new*"))


def with_settings(run: Path, folder: Path, **changes: Any) -> Path:
    """Create a run folder with changed settings and the checkpoints of `run`."""
    folder.mkdir()
    (folder / "checkpoints").symlink_to(run / "checkpoints")
    OmegaConf.save(OmegaConf.merge(OmegaConf.load(run / "config.yaml"), changes), folder / "config.yaml")
    return folder


@pytest.mark.parametrize("key", ["model", "adapter", "tokenizer"])
@pytest.mark.parametrize("code", ["subprocess.check_output", "tune.config.instantiate"])
def test_code_named_in_a_run_folder_does_not_run(
    key: str, code: str, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = {"_component_": "subprocess.check_output", "args": ["touch", str(tmp_path / "ran")]}
    evil = inner if code == inner["_component_"] else {"_component_": code, "node": inner}
    run = with_settings(runs["lora"], tmp_path / "run", **{key: evil})
    with pytest.raises(SystemExit) as stopped:
        export(run, tmp_path / "new", "--to", "hf", "--step", "3")
    assert stopped.value.code == 2 and not (tmp_path / "ran").exists()
    assert f"{key}._component_ is {code}" in capsys.readouterr().err


def test_code_in_a_model_folder_does_not_run(runs: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    trusting = {"_component_": "tune.models.hf", "trust_remote_code": True}
    run = with_settings(runs["full"], tmp_path / "run", model=trusting)
    with pytest.raises(SystemExit):
        export(run, tmp_path / "new", "--to", "hf", "--step", "3")
    assert "trust_remote_code would run code" in capsys.readouterr().err


@pytest.mark.slow
def test_checkpoint_relative_to_its_start_is_rejected(
    checkpoint: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run = tmp_path / "run"
    arguments = settings(checkpoint, chats, run, "adapter.rank=4", "adapter.init=pissa", "max_steps=1")
    monkeypatch.setattr("sys.argv", ["lora_finetune", *arguments])
    lora_finetune.main()
    with pytest.raises(SystemExit) as stopped:
        export(run, tmp_path / "new", "--to", "hf", "--step", "1")
    assert stopped.value.code == 2 and "adapter.init=pissa depends on" in capsys.readouterr().err


WRONG = {
    "nothing there": (["absent", "--to", "gguf"], "absent"),
    "no kind": (["MODEL"], "--to"),
    "unknown kind": (["MODEL", "--to", "onnx"], "invalid choice: 'onnx'"),
    "unknown type": (["MODEL", "--to", "gguf", "--type", "q4_k_m"], "invalid choice: 'q4_k_m'"),
    "a type of a folder": (["MODEL", "--to", "hf", "--type", "q8_0"], "--type is only for --to gguf"),
    "there already": (["MODEL", "--to", "gguf", "--out", "MODEL"], "already exists"),
    "no such step": (["RUN", "--to", "gguf", "--step", "7"], "has no checkpoint of step 7; it has 1, 2, 3"),
    "a step of a model": (["MODEL", "--to", "gguf", "--step", "1"], "has no checkpoint of step 1; it has none"),
    "no adapter": (["MODEL", "--to", "gguf-lora"], "none found. Use --to gguf"),
    "no family of llama.cpp's": (["OTHER", "--to", "gguf"], "convert_hf_to_gguf.py"),
    "bounds that llama.cpp does not read": (["YARN", "--to", "gguf"], "does not support other bounds of YaRN"),
    "another activation": (["GELU", "--to", "gguf"], "does not support the activation gelu"),
    "not finite": (["NAN", "--to", "gguf"], "has values that are not finite"),
    "too large": (["HUGE", "--to", "gguf"], "too large for fp16: use bf16"),
    "no tokenizer": (["BARE", "--to", "gguf"], "no tokenizer in"),
    "other words": (["WORDS", "--to", "gguf"], "unknown word-splitting rule"),
    "a token without a row": (["EXTRA", "--to", "gguf"], "'<|extra|>' with id "),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_inputs_are_rejected(
    wrong: str, checkpoint: Path, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = WRONG[wrong]
    if "--out" not in arguments:
        arguments = [*arguments, "--out", "NEW"]
    places = {"MODEL": checkpoint, "RUN": runs["full"], "NEW": tmp_path / "new"}
    for name in {"OTHER", "YARN", "GELU", "NAN", "HUGE", "BARE", "WORDS", "EXTRA"} & {*arguments}:
        places[name] = spoiled(name, tmp_path / "spoiled")
    with pytest.raises(SystemExit) as stopped:
        main(["export", *(str(places.get(argument, argument)) for argument in arguments)])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".new*"))


def spoiled(how: str, folder: Path) -> Path:
    changes = {
        "OTHER": {"config_class": "DeepseekV3Config", "num_key_value_heads": 4, "pad_token_id": None},
        "YARN": {"rope_parameters": YARN | {"beta_fast": 8.0}},
        "GELU": {"hidden_act": "gelu"},
    }
    save_checkpoint(folder, **changes.get(how, {}))
    if how in ("NAN", "HUGE"):
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = math.nan if how == "NAN" else 1e6
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if how == "BARE":
        (folder / "tokenizer.json").unlink()
    if how == "WORDS":
        content = json.loads((folder / "tokenizer.json").read_text())
        content["pre_tokenizer"] = {"type": "Whitespace"}
        (folder / "tokenizer.json").write_text(json.dumps(content))
    if how == "EXTRA":
        rows = json.loads((folder / "config.json").read_text())["vocab_size"]
        tokenizer = Tokenizer(folder)
        tokenizer.add_tokens([f"<|fill{index}|>" for index in range(tokenizer.vocab_size, rows)])
        assert tokenizer.add_tokens(["<|extra|>"]) == [rows]
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer.definition))
    return folder


@pytest.mark.weekly
@pytest.mark.skipif(not REAL.exists(), reason="needs the real model: make model")
def test_fine_tuned_demo_model_in_llama_cpp(tmp_path: Path) -> None:
    """After a few steps of the demo, the perplexity of held-out conversations matches ours. Answers are greedy by our
    logits, up to near-ties."""
    root, run = Path(__file__).parents[2], tmp_path / "run"
    command = ["run", "lora_finetune", "--config", "examples/home_commands/demo.yaml", "export.merge=true"]
    command += [f"model.path={REAL}", f"output_dir={run}", "max_steps=3", "evaluate.every=null"]
    environment = os.environ | {"PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-m", "tune.cli", *command], cwd=root, env=environment, check=True)
    model, tokenizer = load_model(str(run / "model")), Tokenizer(str(run / "model"))
    lines = (root / "examples/home_commands/validation.jsonl").read_text().splitlines()
    chats = [json.loads(line)["messages"] for line in lines[:40]]
    tokens = tokenizer.encode("".join(map(tokenizer.apply_chat_template, chats)))
    # llama.cpp also rounds the inputs of Q8_0's products, in a CPU-specific order: the mean needs more tokens.
    lengths, within = {"f16": 200, "q8_0": 1000}, {"f16": 0.005, "q8_0": 0.01}
    asked = [chat[:2] for chat in chats[:6]]
    prompts = [tokenizer.encode(tokenizer.apply_chat_template(chat, add_generation_prompt=True)) for chat in asked]
    for kind, length in lengths.items():
        pieces = [tokens[start : start + 100] for start in range(0, length, 100)]
        file = export(run, tmp_path / f"{kind}.gguf", "--to", "gguf", "--type", kind)
        if kind == "q8_0":  # our model with the file's rounded weights
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    rounded = gguf.quants.quantize(parameter.detach().numpy(), gguf.GGMLQuantizationType.Q8_0)
                    parameter.data = torch.from_numpy(gguf.quants.dequantize(rounded, gguf.GGMLQuantizationType.Q8_0))
        ours = math.exp(-statistics.mean(value for piece in pieces for value in log_probs(model, piece)))
        with LlamaCpp(file) as llama_cpp:
            theirs = math.exp(-statistics.mean(value for piece in pieces for value in llama_cpp.log_probs(piece)))
            answers = [llama_cpp.greedy(prompt, 32, ignore_eos=False) for prompt in prompts]
            counts = [llama_cpp.ask(messages=chat, max_tokens=1)["usage"]["prompt_tokens"] for chat in asked]
        below = max(below_the_best(model, *pair) for pair in zip(prompts, answers, strict=True))
        print(f"perplexity as {kind}: {theirs:.3f}, ours {ours:.3f}; answers are {below:.3f} below the best")
        assert theirs / ours == pytest.approx(1, abs=within[kind])
        assert kind != "f16" or below < 0.1  # another CPU may choose the other of two nearly equal tokens
        for *before, last in answers:
            assert not {*before} & {*tokenizer.stop_ids} and (len(before) == 31 or last in tokenizer.stop_ids)
        assert gguf.GGUFReader(file).fields["tokenizer.chat_template"].contents() == tokenizer.chat_template
        assert counts == [len(prompt) for prompt in prompts]
