"""Convert a GGUF file to a folder in Hugging Face layout."""

import json
from pathlib import Path
from typing import Any

from tune.errors import TuneError
from tune.files import exported
from tune.lookup import needs
from tune.models import without_bars

# transformers splits text into words like GPT-2 unless it knows the vocabulary (`tokenizer.ggml.pre`). That is right
# for
# the first set; the second set also splits digits.
GPT2_SPLITS = {"gpt-2", "jais", "mpt", "olmo", "phi-2", "trillion"}
DIGIT_SPLITS = {"codeshell", "command-r", "exaone", "refact", "smollm", "starcoder"}


def import_gguf(file: Path, out: Path) -> list[str]:
    """Write the model and tokenizer of a GGUF file to `out`, with weights in fp32. `out` appears when it is complete.

    Returns notes on parts that may be converted wrongly.

    Raises:
        TuneError: the file is not a GGUF file, is damaged, or has an architecture that transformers does not convert.
    """
    if not file.is_file():
        raise TuneError(f"{file}: file not found.")
    with file.open("rb") as stream:
        start = stream.read(4)
    if start != b"GGUF":
        raise TuneError(f"{file} is not a GGUF file: it starts with {start!r}, not b'GGUF'.")
    with needs("hf", "GGUF"):
        import accelerate  # noqa: F401  (transformers' reader would only report that it is missing after much work)
        import torch
        from gguf import GGUFReader
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    try:
        fields = GGUFReader(file).fields
    except (IndexError, ValueError) as error:
        raise TuneError(f"{file} is truncated or damaged ({error}). Download it again.") from error
    architecture, splitting = (
        fields[name].contents() if name in fields else "" for name in ("general.architecture", "tokenizer.ggml.pre")
    )
    if architecture not in GGUF_SUPPORTED_ARCHITECTURES:
        raise TuneError(
            f"{file}: transformers cannot convert the architecture '{architecture}'. Supported: "
            f"{', '.join(sorted(GGUF_SUPPORTED_ARCHITECTURES))}. Use the model's original checkpoint."
        )
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(file.parent),
        "gguf_file": file.name,
        "trust_remote_code": False,
    }
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        with without_bars():
            model = AutoModelForCausalLM.from_pretrained(
                **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
            )
    except (ValueError, KeyError, RuntimeError) as error:  # an unknown tokenizer, quantization or shape
        raise TuneError(f"{file} ({architecture}) cannot be converted: {error}") from error

    notes = _mend_word_splitting(tokenizer, splitting)
    model.hf_quantizer = None  # the weights are dequantized, which the saved config must reflect
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config

    with exported(out) as unfinished, without_bars():
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
    return notes


def _mend_word_splitting(tokenizer: Any, name: str) -> list[str]:
    """Restore the word splitting of the vocabulary `name` if the conversion lost it. Returns notes."""
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    converted = json.loads(backend.to_str())["pre_tokenizer"]
    if not name or converted is None or converted["type"] != "ByteLevel" or name in GPT2_SPLITS:
        return []
    if name in DIGIT_SPLITS:
        digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
        return []
    return [
        f"unknown word-splitting rule of the vocabulary '{name}'; using GPT-2's rule. Compare the tokens with the "
        "original tokenizer's, or put its tokenizer.json into the folder"
    ]
