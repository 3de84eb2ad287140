import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tune.cli import main

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

Write = Callable[..., Path]
TEXT = "In 2024 it's 30% colder,   say 1,234 people."


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A byte-level tokenizer that splits numbers into digits, as SmolLM's does."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([TEXT, "it's colder", "2024 2024 2024 234 234"] * 9, trainer)
    return tokenizer


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        request.param,
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128 if request.param == "qwen3" else 8,  # transformers uses 128 for every Qwen3
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model


@pytest.fixture
def write(tmp_path: Path, model: Any, tokenizer: Any) -> Write:
    """Return a function that writes the model and its tokenizer to a GGUF file as llama.cpp's converter does."""

    def write(splits: str = "smollm", architecture: str | None = None) -> Path:
        file = tmp_path / "tiny.gguf"
        config = model.config
        writer = gguf.GGUFWriter(file, architecture or config.model_type)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_vocab_size(config.vocab_size)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(splits)
        tokens = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
        writer.add_token_list(tokens)
        writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(tokens) - 1))
        merges = tokenizers.models.BPE.__getstate__(tokenizer.model).decode()
        writer.add_token_merges([" ".join(pair) for pair in json.loads(merges)["merges"]])
        writer.add_eos_token_id(0)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
        for name, weight in model.state_dict().items():
            if name == "lm_head.weight":
                continue
            for projection, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
                if projection in name and config.model_type == "llama":  # there llama.cpp's rotary pairs are adjacent
                    weight = weight.view(heads, 2, -1, config.hidden_size).transpose(1, 2).reshape(weight.shape)
            stem, _, suffix = name.rpartition(".")
            writer.add_tensor(f"{names.get_name(stem)}.{suffix}", weight.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    return write


@pytest.mark.slow
def test_converted_folder_has_the_same_logits_and_tokens(
    tmp_path: Path, write: Write, model: Any, tokenizer: Any
) -> None:
    main(["convert", str(write()), str(tmp_path / "out")])
    imported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    imported_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens = tokenizer.encode(TEXT).ids
    assert imported_tokenizer(TEXT)["input_ids"] == tokens
    assert imported.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(imported(torch.tensor([tokens])).logits, model(torch.tensor([tokens])).logits)
    assert not list(tmp_path.glob(".*.unfinished"))


@pytest.mark.parametrize("model", ["llama"], indirect=True)
@pytest.mark.slow
def test_convert_prints_only_its_own_messages(tmp_path: Path, write: Write) -> None:
    """No progress bars from transformers, and no warnings from torchao, which transformers imports."""
    command = [sys.executable, "-m", "tune.cli", "convert", str(write()), str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    assert ended.stdout == f"converting {tmp_path / 'tiny.gguf'}\nwrote {tmp_path / 'out'}\n"


def test_unknown_word_splitting_prints_a_note(tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    main(["convert", str(write(splits="mine")), str(tmp_path / "out")])
    assert "note: unknown word-splitting rule of the vocabulary 'mine'" in capsys.readouterr().out


def test_truncated_file_is_rejected(tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    file = write()
    whole = file.read_bytes()
    for share in (0.01, 0.1, 0.5, 0.99):
        file.write_bytes(whole[: int(len(whole) * share)])
        assert "is truncated or damaged" in fails(file, tmp_path / "out", capsys)
    assert not (tmp_path / "out").exists()


def test_other_file_formats_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK\x03\x04")
    assert "is not a GGUF file: it starts with b'PK" in fails(file, tmp_path / "out", capsys)


def test_unsupported_architecture_is_rejected(tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot convert the architecture 'unheard'" in fails(write(architecture="unheard"), tmp_path / "out", capsys)


def test_nothing_is_overwritten(tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("my work")
    assert "Name a folder that is absent or empty" in fails(write(), tmp_path / "out", capsys)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def fails(file: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["convert", str(file), str(out)])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message
