"""`tune import-gguf`: a GGUF file as a folder in Hugging Face layout."""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tune.errors import TuneError

# transformers' conversion gives byte-level tokenizers GPT-2's way of cutting text into words unless it knows the
# vocabulary's own (`tokenizer.ggml.pre`). That is right for the first set; the second also cuts at every digit.
GPT2_SPLITS = {"gpt-2", "jais", "mpt", "olmo", "phi-2", "trillion"}
DIGIT_SPLITS = {"codeshell", "command-r", "exaone", "refact", "smollm", "starcoder"}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="tune import-gguf",
        description="Turn a GGUF file into a folder in Hugging Face layout, with weights in fp32.",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="a .gguf file")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write: absent or empty")
    options = parser.parse_args(arguments)
    import_gguf(options.file, options.out)
    print(f"wrote {options.out}")


def import_gguf(file: Path, out: Path) -> None:
    """Write the model and tokenizer of a GGUF file to `out`, which appears only when it is complete."""
    check_file(file)
    check_absent(out)
    try:
        import accelerate  # noqa: F401  (transformers' reader asks for it only after the work has begun)
        import torch
        from gguf import GGUFReader
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise TuneError(f"`tune import-gguf` needs the hf extra ({error}): pip install 'tune-recipes[hf]'") from error

    try:
        fields = GGUFReader(file).fields
    except (IndexError, ValueError) as error:
        raise TuneError(f"{file} is truncated or damaged ({error}). Get it again.") from error
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    except ValueError as error:  # how transformers says that it does not know the architecture or the tokenizer
        raise TuneError(f"{file} cannot be imported: {error}") from error

    if "tokenizer.ggml.pre" in fields:
        mend_word_splitting(tokenizer, fields["tokenizer.ggml.pre"].contents())
    model.hf_quantizer = None  # the weights are plain now: no trace of the quantisation in what is saved
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config

    unfinished = out.with_name(out.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.replace(out)


def check_file(file: Path) -> None:
    if not file.is_file():
        raise TuneError(f"{file}: there is no such file.")
    with file.open("rb") as stream:
        start = stream.read(4)
    if start != b"GGUF":
        raise TuneError(f"{file} is not a GGUF file: it starts with {start!r}, not b'GGUF'.")


def check_absent(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TuneError(f"{out} exists already. Name a folder that is absent or empty.")
    out.parent.mkdir(parents=True, exist_ok=True)


def mend_word_splitting(tokenizer: Any, name: str) -> None:
    """Cut text into words as the vocabulary `name` was made with, where the conversion lost that."""
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    converted = json.loads(backend.to_str())["pre_tokenizer"]
    if converted is None or converted["type"] != "ByteLevel" or name in GPT2_SPLITS:
        return
    if name in DIGIT_SPLITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
            ]
        )
        return
    print(
        f"warning: how the vocabulary '{name}' cuts text into words is not known here; GPT-2's way was taken. "
        "Compare the tokens with the original tokenizer, or put its tokenizer.json in the folder.",
        file=sys.stderr,
    )
