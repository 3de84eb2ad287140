"""Compare llama.cpp's results for a model's GGUF files with tune's.

    python benchmarks/export_gguf.py MODEL [--text FILE --pieces 10 --prompts 3]

MODEL is anything that `tune export` accepts. Prints the number of equal greedy tokens (of 64, or up to the end of the
turn) in F16 and Q8_0, whether chat templates are equal, and perplexities of pieces of 200 tokens. In llama.cpp these
are for both files, and for a Q8_0 file that llama.cpp quantized from the F16 file. In tune they are for the original
weights, for the weights of the Q8_0 file, and for these with inputs of products also rounded to 8 bits, as llama.cpp
does on a CPU. Needs xllamacpp.
"""

import argparse
import contextlib
import ctypes
import itertools
import math
import shutil
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
import xllamacpp.xllamacpp

from tune import cli
from tune.generation import Sampler
from tune.models import Decoder
from tune.peft import open_model
from tune.verify import LlamaCpp

QUESTIONS = ["Write a short story about a dog.", "Explain what a prime number is.", "List three fruits."]
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def rounded(values):
    """Round to Q8_0: blocks of 32 8-bit numbers with a scale."""
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values.numpy(), Q8_0), Q8_0))


def requantize(file, source):
    """Replace the blocks of a Q8_0 `file` by llama.cpp's quantization of the F16 file `source`. Returns the share of
    blocks that were already equal."""
    function = ctypes.CDLL(xllamacpp.xllamacpp.__file__).quantize_q8_0
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    function.restype = ctypes.c_size_t
    originals = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    same = count = 0
    for tensor in gguf.GGUFReader(file, "r+").tensors:
        if tensor.tensor_type != Q8_0:
            continue
        values = np.ascontiguousarray(originals[tensor.name].data, dtype=np.float32)
        blocks = np.empty(tensor.data.shape, dtype=np.uint8)
        rows, columns = values.size // values.shape[-1], values.shape[-1]
        assert function(values.ctypes.data, blocks.ctypes.data, rows, columns, None) == blocks.nbytes
        equal = (blocks == tensor.data).reshape(-1, 34).all(axis=1)
        same, count = same + int(equal.sum()), count + equal.size
        tensor.data[:] = blocks
    return same / count


@torch.no_grad()
def loss(model, pieces, inputs_too=False):
    """Return the mean negative log-prob of all tokens except the first of each piece."""

    def head(hidden, weight, batch, **softcap):
        return Decoder.logits(rounded(hidden) if inputs_too else hidden, weight, batch, **softcap)

    def of(piece):
        found = model(torch.tensor([piece]), head)[0, :-1].log_softmax(-1)
        return -found.gather(1, torch.tensor(piece[1:])[:, None]).mean().item()

    with contextlib.ExitStack() as hooks:
        for layer in model.modules() if inputs_too else ():
            if isinstance(layer, torch.nn.Linear):
                hook = layer.register_forward_pre_hook(lambda _, given: rounded(given[0]))
                hooks.callback(hook.remove)
        return sum(map(of, pieces)) / len(pieces)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--text", metavar="FILE", type=Path, default=Path(__file__).parents[1] / "LICENSE")
    parser.add_argument("--pieces", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=3, choices=(1, 2, 3))
    args = parser.parse_args()

    opened = open_model(args.model)
    model, tokenizer = opened.load(dtype="fp32"), opened.tokenizer()
    ids = tokenizer.encode(" ".join(args.text.read_text(encoding="utf-8").split()))
    pieces = [ids[start : start + 200] for start in range(0, len(ids) - 199, 200)][: args.pieces]
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS[: args.prompts]]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    prompts = [tokenizer.encode(text) for text in texts]
    ours = Sampler(max_new_tokens=64, temperature=0, stop_ids=tokenizer.stop_ids)(model, prompts)
    losses = {"tune, as they are": loss(model, pieces)}
    with tempfile.TemporaryDirectory() as folder:
        files = {kind: Path(folder) / f"{kind}.gguf" for kind in ("f16", "q8_0", "q8_0, quantized by llama.cpp")}
        for kind in ("f16", "q8_0"):
            cli.main(["export", args.model, "--to", "gguf", "--type", kind, "--out", str(files[kind])])
        theirs = files["q8_0, quantized by llama.cpp"]
        shutil.copyfile(files["q8_0"], theirs)
        print(f"q8_0 blocks equal to llama.cpp's quantization of f16: {requantize(theirs, files['f16']):.4%}")
        for kind, file in files.items():
            with LlamaCpp(file) as llama_cpp:
                for prompt, (answer,) in zip(prompts, ours, strict=True):
                    there = llama_cpp.greedy(prompt, 64, ignore_eos=False)
                    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(there, answer.tokens, strict=False))
                    count = len(list(same))
                    print(f"{kind}: {count} of {len(answer.tokens)} greedy tokens equal before the first difference")
                for chat, prompt in zip(chats, prompts, strict=True):
                    read = llama_cpp.ask(messages=chat, max_tokens=1)["usage"]["prompt_tokens"]
                    print(f"{kind}: a chat has {read} tokens, in tune {len(prompt)}")
                found = [value for piece in pieces for value in llama_cpp.log_probs(piece) if value is not None]
                losses[f"llama.cpp, {kind}"] = -sum(found) / len(found)
            field = gguf.GGUFReader(file).get_field("tokenizer.chat_template")
            print(f"{kind}: chat template equals the checkpoint's: {field.contents() == tokenizer.chat_template}")
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data = rounded(parameter.detach())
    losses["tune, with the weights of q8_0"] = loss(model, pieces)
    losses["tune, with these, and inputs in q8_0"] = loss(model, pieces, inputs_too=True)
    plain = losses["tune, as they are"]
    for name, value in losses.items():
        print(f"{name:50} perplexity {math.exp(value):8.3f}  {math.exp(value - plain) - 1:+.2%}")


if __name__ == "__main__":
    main()
