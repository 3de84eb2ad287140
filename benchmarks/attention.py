"""Print how each family's attention is computed: a table of the paths, and on a GPU the time of each.

    python benchmarks/attention.py [--capability 9.0] [--dtype bf16 fp32]
    python benchmarks/attention.py --time [--rows 2 --tokens 4096]

Paths come from `tune.models.attention.choose`: for training, with and without packed documents, and for prompts in
sampling. Heads are those of the named model. `--capability` defaults to this machine's GPU. `--time` measures forward
and backward of a layer with documents of 600 tokens on average, and of plain flash attention: without soft caps, sinks
and window.
"""

import argparse
import statistics
import tempfile
import warnings
from pathlib import Path

import torch
import transformers

from tune.collators import Batch
from tune.distributed import DTYPES
from tune.models.attention import Scoring, attend
from tune.models.config_file import ConfigFile
from tune.models.context import Masks
from tune.models.families import family, supported
from tune.models.latent_attention import LatentAttentionConfig

SLIDING = {"sliding_window": 4096}
MODELS = {  # name of the config in transformers; number of query heads and key heads, and their size
    "arcee": ("AFM-4.5B", "ArceeConfig", 20, 4, 128, {}),
    "cohere": ("Command R", "CohereConfig", 64, 64, 128, {}),
    "cohere2": ("Command R7B", "Cohere2Config", 32, 8, 128, SLIDING),
    "deepseek_v3": ("DeepSeek-V3", "DeepseekV3Config", 128, 128, None, {}),
    "ernie4_5": ("ERNIE-4.5-0.3B", "Ernie4_5Config", 16, 2, 128, {}),
    "exaone4": ("EXAONE-4.0-32B", "Exaone4Config", 40, 8, 128, SLIDING),
    "gemma": ("Gemma 7B", "GemmaConfig", 16, 16, 256, {}),
    "gemma2": ("Gemma 2 9B", "Gemma2Config", 16, 8, 256, SLIDING),
    "gemma3_text": ("Gemma 3 1B", "Gemma3TextConfig", 4, 1, 256, {"sliding_window": 512}),
    "glm": ("GLM-4-9B", "GlmConfig", 32, 2, 128, {}),
    "glm4": ("GLM-4-9B-0414", "Glm4Config", 32, 2, 128, {}),
    "glm4_moe": ("GLM-4.5-Air", "Glm4MoeConfig", 96, 8, 128, {}),
    "gpt_oss": ("gpt-oss-20b", "GptOssConfig", 64, 8, 64, {"sliding_window": 128}),
    "granite": ("Granite 3.1 8B", "GraniteConfig", 32, 8, 128, {}),
    "granitemoe": ("Granite 3.1 3B-A800M", "GraniteMoeConfig", 24, 8, 64, {}),
    "granitemoehybrid": (
        "Granite 4.0 Micro", "GraniteMoeHybridConfig", 40, 8, 64,
        {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "num_local_experts": 0},
    ),
    "llama": ("Llama 3.1 8B", "LlamaConfig", 32, 8, 128, {}),
    "minimax_m2": ("MiniMax-M2", "MiniMaxM2Config", 48, 8, 128, {}),
    "ministral3": ("Ministral 3 8B", "Ministral3Config", 32, 8, 128, {}),
    "mistral": ("Mistral 7B v0.1", "MistralConfig", 32, 8, 128, SLIDING),
    "mixtral": ("Mixtral 8x7B", "MixtralConfig", 32, 8, 128, {}),
    "olmo2": ("OLMo 2 7B", "Olmo2Config", 32, 32, 128, {}),
    "olmo3": ("OLMo 3 7B", "Olmo3Config", 32, 32, 128, SLIDING),
    "olmoe": ("OLMoE-1B-7B", "OlmoeConfig", 16, 16, 128, {}),
    "phi3": ("Phi-3-mini", "Phi3Config", 32, 32, 96, {"sliding_window": 2047}),
    "qwen2": ("Qwen2.5 7B", "Qwen2Config", 28, 4, 128, {}),
    "qwen2_moe": ("Qwen2 57B-A14B", "Qwen2MoeConfig", 28, 4, 128, {}),
    "qwen3": ("Qwen3 8B", "Qwen3Config", 32, 8, 128, {}),
    "qwen3_5_text": ("Qwen3.5 9B", "Qwen3_5TextConfig", 16, 4, 256, {}),
    "qwen3_moe": ("Qwen3 30B-A3B", "Qwen3MoeConfig", 32, 4, 128, {}),
    "seed_oss": ("Seed-OSS-36B", "SeedOssConfig", 80, 8, 128, {}),
    "smollm3": ("SmolLM3 3B", "SmolLM3Config", 16, 4, 128, {}),
    "starcoder2": ("StarCoder2 7B", "Starcoder2Config", 36, 4, 128, SLIDING),
}  # fmt: skip


def kinds_of(model_type):
    """Return the attention configs in the layers of a family, one of each kind."""
    _, config_class, heads, kv_heads, size, changes = MODELS[model_type]
    fields = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "pad_token_id": None} | changes
    if size is not None:
        fields |= {"hidden_size": heads * size, "head_dim": size}
    with tempfile.TemporaryDirectory() as folder:
        getattr(transformers, config_class)(**fields).save_pretrained(folder)
        config = family(model_type).read_config(ConfigFile(Path(folder)))
    parts = [layer.attention for layer in config.layers if hasattr(layer.attention, "path")]
    return {in_words(part): part for part in parts}


def shape_of(part):
    """Return the number of query heads and key heads, the head size and the size of values."""
    if isinstance(part, LatentAttentionConfig):
        return part.num_heads, part.num_heads, part.plain_size + part.rope.size, part.value_size
    return part.num_heads, part.num_kv_heads, part.head_dim, part.head_dim


def in_words(part):
    heads, kv_heads, size, value_size = shape_of(part)
    words = [f"{heads}/{kv_heads} x {size}" + (f"/{value_size}" if value_size != size else "")]
    for name in ("window", "softcap"):
        if value := getattr(part, name, None):
            words.append(f"{name} {value:g}")
    if getattr(part, "sinks", False):
        words.append("sinks")
    return ", ".join(words)


def milliseconds(part, batch, dtype, *, plain):
    """Return the median time of ten forwards and backwards; with `plain`, of flash attention."""
    device, documents = torch.device("cuda"), batch.documents
    heads, kv_heads, size, value_size = shape_of(part)
    shapes = (heads, size), (kv_heads, size), (kv_heads, value_size)
    inputs = [
        torch.randn(*batch.tokens.shape, *shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes
    ]
    scoring, mask = Scoring(), None
    if not plain:
        sinks = torch.zeros(heads, device=device, dtype=dtype) if getattr(part, "sinks", False) else None
        window, softcap = (getattr(part, name, None) for name in ("window", "softcap"))
        scoring = Scoring(window, part.scale, softcap, sinks)
        mask = Masks(documents, batch.tokens.shape, device, dtype).of(part)
    times = []
    for _ in range(13):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        output = attend(*inputs, documents, scoring, mask)
        torch.autograd.grad(output, inputs, torch.ones_like(output))
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_gpu = torch.cuda.is_available()
    here = "{}.{}".format(*torch.cuda.get_device_capability()) if has_gpu else "9.0"
    parser.add_argument("--capability", default=here)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bf16", "fp32"])
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", message=".*is not applied")  # dropout in these configs
    if args.time and not has_gpu:
        parser.error("--time needs a GPU")
    capability = tuple(map(int, args.capability.split(".")))
    without = sorted({*supported()} - {*MODELS})
    print(
        f"torch {torch.__version__}, compute capability {args.capability}; as their text models: {', '.join(without)}"
    )
    ends = torch.rand(args.rows, args.tokens, generator=torch.Generator().manual_seed(0)) < 1 / 600
    batch = Batch.of(torch.zeros(args.rows, args.tokens, dtype=torch.long), documents=ends.cumsum(1))
    batch = batch.to("cuda") if args.time else batch
    for model_type, (name, *_) in MODELS.items():
        for words, part in kinds_of(model_type).items():
            row = f"{model_type:17} {name:21} {words:36}"
            for dtype in args.dtype:
                path, because = part.path(capability, DTYPES[dtype])
                row += f" {dtype}: {path:9}"
                if args.time:
                    time = milliseconds(part, batch, DTYPES[dtype], plain=False)
                    fastest = milliseconds(part, batch, torch.bfloat16, plain=True)
                    row += f" {time:8.2f} ms ({time / fastest:.2f})"
                if path == "math":
                    row += f" ({because})"
            print(row)


if __name__ == "__main__":
    main()
