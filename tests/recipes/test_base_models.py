"""A base model trained to chat with a built-in template stops by itself wherever its export is loaded."""

import json
import shutil
from pathlib import Path

import full_finetune
import lora_finetune
import pytest
import torch
from helpers import WORDS, save_checkpoint
from tokenizers import Tokenizer, processors

from tune import config
from tune.cli import main as tune_command

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

SMOLLM2 = Path(__file__).parents[2] / ".demo" / "smollm2-135m"
ANSWER = "the cat sat on the mat"
# Per model: its config class and shape, its BOS if texts get one, and its reserved tokens for turns.
BASES = {
    "qwen": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}, None, ["<|im_start|>", "<|im_end|>"]),
    "gemma": (
        "Gemma3TextConfig",
        {"head_dim": 16, "tie_word_embeddings": True, "pad_token_id": None, "query_pre_attn_scalar": 16},
        "<bos>",
        ["<start_of_turn>", "<end_of_turn>"],
    ),
    "llama": ("LlamaConfig", {}, "<bos>", ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]),
    "bare": ("LlamaConfig", {}, None, []),
}
TEMPLATES = {"qwen": "chatml", "gemma": "gemma", "llama": "llama3", "bare": "plain"}


def save_base(folder, name):
    """Save a model like a base model: no template, and one EOS, which ends texts."""
    config_class, shape, bos, reserved = BASES[name]
    save_checkpoint(folder, config_class, vocab_size=310, eos_token_id=0, bos_token_id=None, **shape)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    content = json.loads(tokenizer.to_str().replace("<|im_start|>", "<|one|>").replace("<|im_end|>", "<|two|>"))
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens([*([bos] if bos else []), *reserved])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "bos_token": bos}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "chat_template.jinja").unlink()
    return folder


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name == "qwen" else [pytest.mark.slow]) for name in BASES],
)
def base(request, tmp_path_factory):
    return request.param, save_base(tmp_path_factory.mktemp(request.param) / "base", request.param)


@pytest.fixture
def settings(base, tmp_path):
    file = tmp_path / "chats.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": ANSWER}]} for word in WORDS
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"model.path={base[1]}", f"dataset.path={file}", f"tokenizer.chat_template={TEMPLATES[base[0]]}",
        "max_seq_len=64", "compute.dtype=fp32", "device=cpu", "global_batch_size=11", "micro_batch_size=11",
        "epochs=20", "optimizer.lr=1e-2", "schedule.warmup=0", "checkpointer.every=null",
        f"output_dir={tmp_path / 'run'}",
    ]  # fmt: skip


def answer(model, folder, question="dog", **options):
    """Return the answer that transformers generates by default; it must end with a stop token."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        tokens = model.generate(**prompt, max_new_tokens=40, do_sample=False, **options)[0]
    text = tokens[prompt["input_ids"].shape[1] :]
    stops = "<|endoftext|>", "<|im_end|>", "<end_of_turn>", "<|eot_id|>"
    assert len(text) < 40 and tokenizer.decode(text[-1]) in stops
    return tokenizer.decode(text, skip_special_tokens=True).strip()


def loaded(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("has_generation_config", [True, False])
def test_full_finetuning(base, settings, tmp_path, has_generation_config):
    folder = shutil.copytree(base[1], tmp_path / "base")
    if not has_generation_config:
        (folder / "generation_config.json").unlink()
    full_finetune.main(config.load("full_finetune", [*settings, f"model.path={folder}", "optimizer.lr=3e-3"]))
    assert answer(loaded(tmp_path / "run" / "model"), tmp_path / "run" / "model") == ANSWER


@pytest.mark.slow
def test_adapter_and_merged_model(base, settings, tmp_path):
    (base[1] / "README.md").write_text("a base model's card")
    vocabulary = Tokenizer.from_file(str(base[1] / "tokenizer.json")).get_vocab()
    tokens = [vocabulary[token] for token in BASES[base[0]][3]]
    trained = [f"adapter.trainable_tokens={tokens}", "export.merge=true"]
    lora_finetune.main(config.load("lora_finetune", [*settings, *trained]))
    adapter, merged = tmp_path / "run" / "adapter", tmp_path / "run" / "model"
    stops = transformers.GenerationConfig.from_pretrained(adapter)
    adapted = peft.PeftModel.from_pretrained(loaded(base[1]), adapter)
    assert answer(adapted, adapter, generation_config=stops) == ANSWER
    assert answer(loaded(merged), merged) == ANSWER
    assert "Fine-tuned from" in (merged / "README.md").read_text()
    tune_command(["merge", str(base[1]), str(adapter), str(tmp_path / "merged")])
    assert answer(loaded(tmp_path / "merged"), tmp_path / "merged") == ANSWER
    assert "merged in" in (tmp_path / "merged" / "README.md").read_text()


@pytest.mark.slow
def test_custom_eos_token_is_exported(settings, tmp_path, base):
    if base[0] != "qwen":
        pytest.skip("one model is enough")
    lora_finetune.main(config.load("lora_finetune", [*settings, "tokenizer.eos_token='<|im_end|>'", "max_steps=1"]))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "adapter")
    assert tokenizer.eos_token == "<|im_end|>" and "im_start" in tokenizer.chat_template


@pytest.mark.slow
@pytest.mark.parametrize("quantized", [[], ["model.quantization=nf4"]], ids=["", "nf4"])
def test_never_trained_rows_are_named(base, settings, tmp_path, quantized):
    """They are zero (Llama 3) or alike (tied weights). Rows that this run trains are not named."""
    from safetensors.torch import load_file, save_file

    reserved = BASES[base[0]][3]
    if not reserved:
        pytest.skip("the model has no reserved tokens")
    vocabulary = Tokenizer.from_file(str(base[1] / "tokenizer.json")).get_vocab()
    first, last = vocabulary[reserved[0]], vocabulary[reserved[-1]]
    folder = shutil.copytree(base[1], tmp_path / "base")
    tensors = load_file(folder / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]
    rows[[first, last]] = 1e-9 * rows[[first, last]] if base[0] == "llama" else rows[[309, 309]] * 1.0001
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def log(name, *more):
        run = tmp_path / name
        path = [f"model.path={folder}", f"output_dir={run}", "max_steps=1"]
        lora_finetune.main(config.load("lora_finetune", [*settings, *path, *quantized, *more]))
        return (run / "log.txt").read_text()

    text = log("frozen")
    assert f"the data contain {reserved[0]} ({first})" in text and f"{reserved[-1]} ({last}), whose rows" in text
    assert f"adapter.trainable_tokens=[{first}, {last}]" in text
    assert "never trained" not in log("rows", f"adapter.trainable_tokens=[{first},{last}]")
    some = log("some", f"adapter.trainable_tokens=[{first}]")
    assert f"the data contain {reserved[-1]} ({last}), whose rows" in some
    assert "never trained" not in log("whole", "adapter.modules_to_save=[embed_tokens]")
    settings[0] = f"model.path={base[1]}"
    folder = base[1]
    assert "never trained" not in log("trained before")


@pytest.mark.slow
@pytest.mark.skipif(not (SMOLLM2 / "config.json").exists(), reason="needs the model: make model")
def test_real_model(tmp_path):
    """Use SmolLM2 as a base model: without its template, and with the EOS that ends texts."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(SMOLLM2.resolve() / "model.safetensors")
    shutil.copyfile(SMOLLM2 / "tokenizer.json", folder / "tokenizer.json")
    for name, changes in {
        "config.json": {"eos_token_id": 0},
        "generation_config.json": {"eos_token_id": 0},
        "tokenizer_config.json": {"eos_token": "<|endoftext|>"},
    }.items():
        (folder / name).write_text(json.dumps(json.loads((SMOLLM2 / name).read_text()) | changes))
    said = [(f"Say {word}.", f"{word}, {word}!") for word in WORDS if word != "dog"]
    rows = [{"instruction": question, "output": answer} for question, answer in said]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        f"model.path={folder}", f"dataset.path={tmp_path / 'chats.jsonl'}", "tokenizer.chat_template=chatml",
        "max_seq_len=64", "compute.dtype=fp32", "device=cpu", "global_batch_size=7", "micro_batch_size=7", "epochs=6",
        "optimizer.lr=1e-3", "checkpointer.every=null", "export.merge=true", f"output_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    lora_finetune.main(config.load("lora_finetune", settings))
    assert "never trained" not in (tmp_path / "run" / "log.txt").read_text()
    merged = tmp_path / "run" / "model"
    assert answer(loaded(merged), merged, "Say dog.") == "dog, dog!"
