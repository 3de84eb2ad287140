"""The programs that people open models with, each asked the same."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from tune.distributed import Dtype, as_dtype
from tune.errors import TuneError, explained
from tune.lookup import needs
from tune.models import ConfigFile, read_json
from tune.tokenizers import Message
from tune.verify.llama_cpp import LlamaCpp

ADAPTER = "adapter_config.json"
PROGRAMS = ("transformers", "peft", "llama.cpp", "vllm")


class Program(Protocol):
    """A program that has opened a file or a folder."""

    name: str

    def reads(self, text: str, ids: Sequence[int]) -> bool:
        """Whether it encodes the `text` as these `ids`, with those that are put before a text."""
        ...

    def chat(self, messages: list[Message]) -> tuple[str, int]:
        """The text that its chat template makes of `messages` for an answer, and how many tokens are read of it."""
        ...

    def stops_at(self, token: int) -> bool:
        """Whether an answer ends with this token."""
        ...

    def answer(self, prompt: Sequence[int], count: int) -> list[int]:
        """The most likely tokens behind `prompt`, at most `count`, until one that ends an answer."""
        ...

    def log_probs(self, ids: Sequence[int]) -> list[float | None]:
        """Of all tokens but the first; None of one that it does not tell."""
        ...


class Transformers:
    """A folder in transformers; an adapter's in PEFT, on the base that its config names."""

    def __init__(self, folder: Path, device: torch.device, dtype: Dtype | None):
        with needs("hf", "tune verify"):
            import transformers
        self.name, model_class = "transformers", transformers.AutoModelForCausalLM
        if (folder / ADAPTER).exists():
            if find_spec("peft") is None:
                raise TuneError(f"{folder}: PEFT opens adapters: pip install peft")
            import peft

            self.name, model_class = "peft", peft.AutoPeftModelForCausalLM
        with explained(f"{self.name} cannot open {folder}", Exception):
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            self.model = model_class.from_pretrained(folder, dtype=_dtype_of(folder, device, dtype)).to(device).eval()
        self.device = device

    def reads(self, text: str, ids: Sequence[int]) -> bool:
        return bool(self.tokenizer(text)["input_ids"] == [*ids])

    def chat(self, messages: list[Message]) -> tuple[str, int]:
        asked = {"conversation": messages, "add_generation_prompt": True}
        text = self.tokenizer.apply_chat_template(**asked, tokenize=False)
        return text, len(self.tokenizer.apply_chat_template(**asked, return_dict=True)["input_ids"])

    def stops_at(self, token: int) -> bool:
        ends = self.model.generation_config.eos_token_id
        return token in (ends if isinstance(ends, list) else [ends])

    def answer(self, prompt: Sequence[int], count: int) -> list[int]:
        asked = torch.tensor([[*prompt]], device=self.device)
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        found = self.model.generate(
            input_ids=asked, attention_mask=torch.ones_like(asked), max_new_tokens=count, pad_token_id=0, **greedy
        )
        return [int(token) for token in found[0, len(prompt) :]]

    @torch.no_grad()
    def log_probs(self, ids: Sequence[int]) -> list[float | None]:
        tokens = torch.tensor([[*ids]], device=self.device)
        found = self.model(input_ids=tokens).logits[0, :-1].float().log_softmax(-1)
        return [*found.gather(1, tokens[0, 1:, None])[:, 0].tolist()]


class VLLMServer:
    """A folder in vLLM; an adapter's on the base that its config names."""

    name = "vllm"

    def __init__(self, folder: Path, device: torch.device, dtype: Dtype | None, context: int):
        if find_spec("vllm") is None:
            raise TuneError("--with vllm: vLLM is not installed (pip install vllm)")
        import vllm
        from vllm.lora.request import LoRARequest

        settings: dict[str, Any] = {"model": str(folder)}
        self.lora = None
        if (folder / ADAPTER).exists():
            config = read_json(folder / ADAPTER, "adapter")
            settings = {"model": config["base_model_name_or_path"], "tokenizer": str(folder), "enable_lora": True}
            settings["max_lora_rank"] = max(8, 1 << (int(config["r"]) - 1).bit_length())
            self.lora = LoRARequest("adapter", 1, str(folder))
        with explained(f"vllm cannot open {folder}", Exception):
            self.engine = vllm.LLM(
                **settings, dtype=_dtype_of(folder, device, dtype), max_model_len=context, enforce_eager=True
            )
        self.tokenizer = self.engine.get_tokenizer()

    def _ask(self, prompt: Sequence[int], **settings: Any) -> Any:
        sampling = self.engine.get_default_sampling_params()
        sampling.temperature = 0.0
        for name, value in settings.items():
            setattr(sampling, name, value)
        asked = {"prompt_token_ids": [*prompt]}
        (output,) = self.engine.generate([asked], sampling, lora_request=self.lora, use_tqdm=False)
        return output

    def reads(self, text: str, ids: Sequence[int]) -> bool:
        return bool(self.tokenizer.encode(text) == [*ids])

    def chat(self, messages: list[Message]) -> tuple[str, int]:
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return text, len(self.tokenizer.encode(text, add_special_tokens=False))

    def stops_at(self, token: int) -> bool:
        return bool(self._ask([token], max_tokens=2, allowed_token_ids=[token]).outputs[0].finish_reason == "stop")

    def answer(self, prompt: Sequence[int], count: int) -> list[int]:
        return [*self._ask(prompt, max_tokens=count).outputs[0].token_ids]

    def log_probs(self, ids: Sequence[int]) -> list[float | None]:
        of_tokens = self._ask(ids, max_tokens=1, prompt_logprobs=0).prompt_logprobs
        return [found[token].logprob for found, token in zip(of_tokens[1:], ids[1:], strict=True)]


def _quantization(folder: Path) -> str:
    """What config.json says of it, as text; {} if nothing."""
    return json.dumps(ConfigFile(folder, "ARTIFACT").get("quantization_config") or {})


def _dtype_of(folder: Path, device: torch.device, dtype: Dtype | None) -> torch.dtype | Literal["auto"]:
    """As for the run's own model: that which is asked for, else fp32 on a CPU and elsewhere that of the files."""
    if dtype is None and not (folder / ADAPTER).exists() and "fp4" in _quantization(folder):
        return torch.bfloat16  # compressed-tensors knows no other for it
    if dtype is None:
        return torch.float32 if device.type == "cpu" else "auto"
    return as_dtype(dtype)


@contextmanager
def open_program(
    artifact: Path, program: str | None, device: torch.device, dtype: Dtype | None, context: int
) -> Iterator[Program]:
    """The `artifact` in the program of this name, by default the one that its kind is for: a GGUF file in llama.cpp, an
    adapter in PEFT, another folder in transformers. Texts and answers are together at most `context` tokens.

    Raises:
        TuneError: it is none of these, or the program is not installed or does not take it.
    """
    usual = "llama.cpp" if artifact.is_file() else "peft" if (artifact / ADAPTER).exists() else "transformers"
    if usual != (program or usual) and (program != "vllm" or usual == "llama.cpp"):
        raise TuneError(f"--with {program}: {artifact} is opened by {usual}{'' if artifact.is_file() else ' or vllm'}")
    if artifact.is_file():
        with LlamaCpp(artifact, context=context, threads=torch.get_num_threads()) as llama_cpp:
            yield llama_cpp
    elif program == "vllm":
        yield VLLMServer(artifact, device, dtype, context)
    else:
        yield Transformers(artifact, device, dtype)


def bits_of(artifact: Path) -> int:
    """Of the weights in an artifact: 16 or more are 16, else 8 or 4.

    Raises:
        TuneError: it is no GGUF file, and no folder of a model or an adapter.
    """
    if artifact.is_file():
        with needs("hf", "GGUF"):
            import gguf
        with explained(f"{artifact} is no GGUF file", Exception):
            tensors = gguf.GGUFReader(artifact).tensors
        largest = max(tensors, key=lambda tensor: int(tensor.n_elements) * tensor.name.startswith("blk."))
        block, size = gguf.GGML_QUANT_SIZES[largest.tensor_type]
        bits = 8 * size / block
    elif (artifact / ADAPTER).exists():
        bits = 16
    else:
        quantization = _quantization(artifact)
        named = [*map(int, re.findall(r'"(?:num_bits|bits|w_bit)": (\d+)', quantization))]
        named += [4] if re.search(r'"load_in_4bit": true|fp4|int4', quantization) else []
        bits = min([*named, 8 if quantization != "{}" else 16])
    return next(each for each in (16, 8, 4) if bits >= each or each == 4)
