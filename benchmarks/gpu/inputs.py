"""Make checkpoints with random weights, a tokenizer, chats and prompts: equal in every run, without network.

python benchmarks/gpu/inputs.py FOLDER SHAPE [SHAPE ...] [--device cuda]
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

Shapes = list[tuple[str, tuple[int, ...]]]

TEXT = Path(__file__).parents[2] / "LICENSE"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATS, PROMPTS = 2000, 256
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "head_dim": 64, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_MOE = LLAMA | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "tie_word_embeddings": False, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "router_aux_loss_coef": 0.001,
}  # fmt: skip
SHAPES = {
    "llama-1b": LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "llama-8b": LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "head_dim": 128, "tie_word_embeddings": False,
    },
    "qwen3-moe": QWEN3_MOE | {  # Qwen3-30B-A3B with 4 of its 48 layers
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 4, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "tiny": LLAMA | {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 1024, "head_dim": 16,
    },
    "tiny-moe": QWEN3_MOE | {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 1024, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shapes", nargs="+", choices=SHAPES, metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--device", default="cpu", help="device that draws the weights: a GPU takes seconds")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if not (options.folder / "chats.jsonl").exists():
        write_rows(options.folder)
    for shape in options.shapes:
        write_checkpoint(options.folder / shape, SHAPES[shape], options.device)


def write_checkpoint(folder: Path, config: dict, device: str) -> None:
    """Write a checkpoint like a user's: bf16, normal weights with standard deviation 0.02, one file per layer."""
    folder.mkdir()
    special = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config | special | {"torch_dtype": "bfloat16"}), encoding="utf-8")
    write_tokenizer(folder, config["vocab_size"])
    generator = torch.Generator(device).manual_seed(0)
    files = {}
    for number, shapes in enumerate(tensors_by_file(config)):
        file = f"model-{number:05d}.safetensors"
        weights = {}
        for name, shape in shapes:
            weight = torch.ones(shape, dtype=torch.bfloat16, device=device)
            if len(shape) > 1:
                weight.normal_(std=0.02, generator=generator)
            weights[name] = weight.cpu()
        save_file(weights, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(weights, file)
    index = json.dumps({"metadata": {}, "weight_map": files})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def tensors_by_file(config: dict) -> Iterator[Shapes]:
    """Yield names and shapes of all tensors: embedding, norm and head, then each layer."""
    hidden, width = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    vocabulary = (config["vocab_size"], hidden)
    head: Shapes = [] if config["tie_word_embeddings"] else [("lm_head.weight", vocabulary)]
    yield [("model.embed_tokens.weight", vocabulary), ("model.norm.weight", (hidden,)), *head]
    for layer in range(config["num_hidden_layers"]):
        shapes: Shapes = [
            ("input_layernorm", (hidden,)),
            ("self_attn.q_proj", (heads * width, hidden)),
            ("self_attn.k_proj", (kv_heads * width, hidden)),
            ("self_attn.v_proj", (kv_heads * width, hidden)),
            ("self_attn.o_proj", (hidden, heads * width)),
            ("post_attention_layernorm", (hidden,)),
        ]
        if config["model_type"] == "qwen3_moe":
            shapes += [("self_attn.q_norm", (width,)), ("self_attn.k_norm", (width,))]
            shapes += [("mlp.gate", (config["num_experts"], hidden))]
        for name, size in mlps(config):
            shapes += [(f"{name}.gate_proj", (size, hidden)), (f"{name}.up_proj", (size, hidden))]
            shapes += [(f"{name}.down_proj", (hidden, size))]
        yield [(f"model.layers.{layer}.{name}.weight", shape) for name, shape in shapes]


def mlps(config: dict) -> list[tuple[str, int]]:
    """Return the MLPs of a layer, or its experts, with their widths."""
    if config["model_type"] == "qwen3_moe":
        return [(f"mlp.experts.{number}", config["moe_intermediate_size"]) for number in range(config["num_experts"])]
    return [("mlp", config["intermediate_size"])]


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer of English. Numbered words that occur in no text fill the vocabulary up to the
    model's size, so that all samples of a random model are text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT.read_text(encoding="utf-8")], trainer)
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"Ġ#{number}": number for number in range(len(vocabulary), vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    special = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2], "pad_token": SPECIAL[2]}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind | special), encoding="utf-8")


def write_rows(folder: Path) -> None:
    """Write chats and prompts as long as in grade-school math, 60 to 360 tokens: pieces of an English text."""
    words, draw = TEXT.read_text(encoding="utf-8").split(), random.Random(0)

    def piece(shortest: int, longest: int) -> str:
        length = draw.randint(shortest, longest)
        start = draw.randrange(len(words) - length)
        return " ".join(words[start : start + length])

    def user() -> dict[str, str]:
        return {"role": "user", "content": piece(15, 75)}

    chats = [{"messages": [user(), {"role": "assistant", "content": piece(20, 140)}]} for _ in range(CHATS)]
    prompts = [{"prompt": [user()]} for _ in range(PROMPTS)]
    for name, rows in (("chats", chats), ("prompts", prompts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
