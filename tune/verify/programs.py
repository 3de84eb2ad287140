"""Programs that people open models with, behind one interface."""

import gc
import json
import math
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch

from tune.checkpointers import plain_tensors
from tune.distributed import Dtype, as_dtype
from tune.errors import TuneError, explained
from tune.files import ADAPTER_CONFIG, is_adapter
from tune.lookup import needs
from tune.models import ConfigFile, read_json
from tune.tokenizers import Message, mapping_in
from tune.verify.llama_cpp import LlamaCpp

# Messages rendered by a template, and the tokens read from the text, or their number.
ChatText = tuple[str, int | list[int]]
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # GGUF types
GROUP = 32  # weights per scale in GGUF, and in formats of fewer than 8 bits that do not name another number


@dataclass(frozen=True)
class Stored:
    """The form of the weights in an artifact's blocks: `kind` is a dtype, or the number of bits of integers and other
    codes. Each `group` weights of a row have a scale; None: a whole row. If `inputs` is set, products also round their
    inputs to 8 bits, with a scale for this number of values."""

    kind: torch.dtype | int
    group: int | None = None
    inputs: int | None = None

    def __str__(self) -> str:
        return f"{self.kind} bits" if isinstance(self.kind, int) else str(self.kind).removeprefix("torch.")


class Program(Protocol):
    """A program that has opened a file or a folder."""

    name: str

    @property
    def missing(self) -> list[str] | None:
        """The tensors of the model that the artifact lacks, which are therefore random; None if the program refuses to
        open such an artifact."""
        ...

    def reads(self, text: str, ids: Sequence[int]) -> bool:
        """Whether it encodes `text` as `ids`, including the tokens that are put before a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str | None:
        """Return the text of `ids` without special tokens; None if the program only decodes its answers."""
        ...

    def chat(self, messages: list[Message], tools: list[Any] | None = None) -> ChatText | None:
        """Return `messages` rendered by its chat template for an answer, and the tokens read from the text. None if the
        program adds texts of its own for `tools`."""
        ...

    def stops(self, tokens: Collection[int]) -> set[int]:
        """Return those of `tokens` that end an answer, and others that the artifact's settings name."""
        ...

    def answer(self, prompt: Sequence[int], count: int) -> tuple[list[int], str]:
        """Return the most likely tokens after `prompt`, at most `count`, up to one that ends an answer, and their text
        without special tokens."""
        ...

    def log_probs(self, ids: Sequence[int]) -> list[float | None]:
        """Return the log-probs of all tokens but the first; None for tokens without a reported value."""
        ...


class Transformers:
    """A folder opened in transformers; an adapter in PEFT, on the base that its config names."""

    def __init__(self, folder: Path, device: torch.device, dtype: Dtype):
        with needs("hf", "tune verify"):
            import transformers
        self.name = "transformers"
        self.missing: list[str] | None = None
        is_adapted = is_adapter(folder)
        base = _base_of(folder) if is_adapted else folder
        with explained(f"transformers cannot open {base}", Exception):
            model_class = _class_of(base)
        if is_adapted:
            if find_spec("peft") is None:
                raise TuneError(f"{folder}: adapters need PEFT: pip install peft")
            import peft

            self.name = "peft"
            named = {"_target_class": model_class}  # PEFT's own choice for a base may lack parts of it
            model_class = type("AutoPeftModel", (peft.AutoPeftModelForCausalLM,), named)
        with explained(f"{self.name} cannot open {folder}", Exception):
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            settings: dict[str, Any] = {"dtype": computed_in(folder, dtype), "device_map": str(device)}
            settings["trust_remote_code"] = False
            if is_adapted:
                self.model = model_class.from_pretrained(folder, **settings).eval()
            else:
                self.model, info = model_class.from_pretrained(folder, **settings, output_loading_info=True)
                self.missing = sorted({*info["missing_keys"], *(each[0] for each in info["mismatched_keys"])})
                self.model.eval()
        if not self.model.can_generate():
            raise TuneError(f"{base}: config.json names {type(self.model).__name__}, which writes no text")
        self.device = device

    def reads(self, text: str, ids: Sequence[int]) -> bool:
        return bool(self.tokenizer(text)["input_ids"] == [*ids])

    def decode(self, ids: Sequence[int]) -> str:
        # Without changes to the spaces before punctuation, which some tokenizers ask for and tune never makes.
        text = self.tokenizer.decode([*ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def chat(self, messages: list[Message], tools: list[Any] | None = None) -> ChatText:
        asked = {"conversation": messages, "tools": tools, "add_generation_prompt": True}
        text = self.tokenizer.apply_chat_template(**asked, tokenize=False)
        return text, [*self.tokenizer.apply_chat_template(**asked, return_dict=True)["input_ids"]]

    def stops(self, tokens: Collection[int]) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        return {*ends} if isinstance(ends, list) else {ends} - {None}

    def answer(self, prompt: Sequence[int], count: int) -> tuple[list[int], str]:
        asked = torch.tensor([[*prompt]], device=self.device)
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        found = self.model.generate(
            input_ids=asked, attention_mask=torch.ones_like(asked), max_new_tokens=count, pad_token_id=0, **greedy
        )
        ids = [int(token) for token in found[0, len(prompt) :]]
        return ids, self.decode(ids)

    @torch.no_grad()
    def log_probs(self, ids: Sequence[int]) -> list[float | None]:
        tokens = torch.tensor([[*ids]], device=self.device)
        found = self.model(input_ids=tokens).logits[0, :-1].float().log_softmax(-1)
        return [*found.gather(1, tokens[0, 1:, None])[:, 0].tolist()]


def _base_of(adapter: Path) -> Path:
    return Path(str(read_json(adapter / ADAPTER_CONFIG, "adapter").get("base_model_name_or_path")))


def _class_of(folder: Path) -> Any:
    """Return the class of transformers that config.json names, or the automatic one if it names none of them."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    for name in config.architectures or []:
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            return named
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Show no progress bars of libraries."""
    from tqdm.std import tqdm

    usual = tqdm.__init__

    def disabled(self: Any, *arguments: Any, **options: Any) -> None:
        usual(self, *arguments, **(options | {"disable": True}))

    tqdm.__init__ = disabled
    try:
        yield
    finally:
        tqdm.__init__ = usual


def require_opens(folder: Path, packages: Sequence[str] = ()) -> bool:
    """Open the model in `folder` in transformers, so that it looks for all tensors. This needs memory for them only in
    the format of bitsandbytes. Returns False if transformers or one of the `packages` that read the folder is not
    installed, or if the class that its config names comes with the model.

    Raises:
        TuneError: transformers fails to open it, or lacks tensors, which would be random.
    """
    if not all(map(find_spec, ("transformers", *packages))):
        return False

    with explained(f"transformers cannot open the folder with the model type of {folder}", Exception):
        if ConfigFile(folder).get("auto_map"):
            return False
        model_class = _class_of(folder)
    with explained("transformers cannot open the result, so nothing is written", Exception), without_progress_bars():
        device = "cpu" if "bitsandbytes" in packages else "meta"
        _, info = model_class.from_pretrained(folder, device_map=device, output_loading_info=True)
    lacking = sorted({*info["missing_keys"], *(each[0] for each in info["mismatched_keys"])})
    if lacking:
        raise TuneError(
            f"transformers opens the result with {len(lacking)} random tensors, such as {lacking[0]}, so nothing is "
            f"written: {model_class.__name__} has other linear layers"
        )
    return True


class VLLMServer:
    """A folder opened in vLLM; an adapter on the base that its config names."""

    name = "vllm"
    missing = None

    def __init__(self, folder: Path, dtype: Dtype, context: int):
        if find_spec("vllm") is None:
            raise TuneError("--with vllm: vLLM is not installed (pip install vllm)")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a new process would import this process's main module
        import vllm
        from vllm.lora.request import LoRARequest

        settings: dict[str, Any] = {"model": str(folder)}
        self.lora = None
        if is_adapter(folder):
            config = read_json(folder / ADAPTER_CONFIG, "adapter")
            settings = {"model": config["base_model_name_or_path"], "tokenizer": str(folder), "enable_lora": True}
            settings["max_lora_rank"] = max(8, 1 << (int(config["r"]) - 1).bit_length())
            self.lora = LoRARequest("adapter", 1, str(folder))
        self.generation = mapping_in(Path(settings["model"]) / "generation_config.json")
        with explained(f"vllm cannot open {folder}", Exception):
            self.engine = vllm.LLM(
                **settings, dtype=computed_in(folder, dtype), max_model_len=context, enforce_eager=True
            )
        self.tokenizer = self.engine.get_tokenizer()

    def __enter__(self) -> "VLLMServer":
        return self

    def __exit__(self, *_: object) -> None:
        """Free the device's memory."""
        self.engine.llm_engine.engine_core.shutdown()
        del self.engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

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

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode([*ids], skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def chat(self, messages: list[Message], tools: list[Any] | None = None) -> ChatText:
        text = self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        return text, [*self.tokenizer.encode(text, add_special_tokens=False)]

    def stops(self, tokens: Collection[int]) -> set[int]:
        named = self.generation.get("eos_token_id")
        listed = named if isinstance(named, list) else [named]
        asked = {*tokens, *(token for token in listed if token is not None)}
        return {token for token in asked if self._stops_at(token)}

    def _stops_at(self, token: int) -> bool:
        return bool(self._ask([token], max_tokens=2, allowed_token_ids=[token]).outputs[0].finish_reason == "stop")

    def answer(self, prompt: Sequence[int], count: int) -> tuple[list[int], str]:
        ids = [*self._ask(prompt, max_tokens=count).outputs[0].token_ids]
        return ids, self.decode(ids)

    def log_probs(self, ids: Sequence[int]) -> list[float | None]:
        of_tokens = self._ask(ids, max_tokens=1, prompt_logprobs=0).prompt_logprobs
        return [found[token].logprob for found, token in zip(of_tokens[1:], ids[1:], strict=True)]


def _quantization(folder: Path) -> str:
    """Return quantization_config from config.json as text; "{}" if there is none."""
    return json.dumps(ConfigFile(folder, "ARTIFACT").get("quantization_config") or {})


def computed_in(artifact: Path, dtype: Dtype) -> torch.dtype:
    """Return the dtype that a program computes in if `dtype` is requested. With FP8 or FP4 weights, also in the base of
    an adapter, it is bf16: libraries only have bf16 products for them."""
    if artifact.is_file():
        return torch.float32
    folder = artifact
    if is_adapter(folder):
        folder = _base_of(folder)
    is_coded = (folder / "config.json").exists() and re.search('fp4|"quant_method": "fp8"', _quantization(folder))
    return torch.bfloat16 if is_coded else as_dtype(dtype)


@contextmanager
def open_program(
    artifact: Path, program: str | None, device: torch.device, dtype: Dtype, context: int
) -> Iterator[Program]:
    """Open `artifact` in the named program. By default: a GGUF file in llama.cpp, an adapter in PEFT, other folders in
    transformers. Text and answer have at most `context` tokens together.

    Raises:
        TuneError: the program does not open this kind of artifact, is not installed, or fails to open it.
    """
    usual = "peft" if is_adapter(artifact) else "transformers"
    if artifact.is_file():
        usual = "llama.cpp"
    if usual != (program or usual) and (program != "vllm" or usual == "llama.cpp"):
        raise TuneError(
            f"--with {program}: {artifact} can only be opened with {usual}{'' if artifact.is_file() else ' or vllm'}"
        )
    if artifact.is_file():
        with LlamaCpp(artifact, context=context, threads=torch.get_num_threads()) as llama_cpp:
            yield llama_cpp
    elif program == "vllm":
        with VLLMServer(artifact, dtype, context) as vllm:
            yield vllm
    else:
        with without_progress_bars():
            yield Transformers(artifact, device, dtype)


def type_of(artifact: Path, base: Path) -> Stored:
    """Return the form of the weights in an artifact's blocks. If the run's `base` is quantized in the same way, the
    artifact has the base's codes, and only other weights are rounded.

    Raises:
        TuneError: the artifact is neither a GGUF file nor a folder of a model or an adapter.
    """
    if artifact.is_file():
        with needs("hf", "GGUF"):
            import gguf
        with explained(f"{artifact} is not a GGUF file", Exception):
            tensors = gguf.GGUFReader(artifact).tensors
        largest = max(tensors, key=lambda tensor: int(tensor.n_elements) * tensor.name.startswith("blk."))
        count, size = gguf.GGML_QUANT_SIZES[largest.tensor_type]
        if kind := FLOATS.get(largest.tensor_type.name):
            return Stored(kind)
        return Stored(8 * size // count, GROUP, count)  # llama.cpp rounds the inputs of a product by the same blocks
    if is_adapter(artifact):
        return Stored(torch.float32)
    quantization = _quantization(artifact)
    method = json.loads(quantization).get("quant_method")
    if method and method == json.loads(_quantization(base)).get("quant_method"):
        return Stored(torch.bfloat16)
    if not method:
        tensors = plain_tensors(artifact).values()
        return Stored(max(tensors, key=lambda tensor: math.prod(tensor.shape)).dtype)
    group = next(map(int, re.findall(r'"(?:group_size|q_group_size)": (\d+)', quantization)), None)
    if re.search(r'"load_in_4bit": true|fp4|int4', quantization):
        return Stored(4, group or GROUP)
    bits = min(map(int, re.findall(r'"(?:num_bits|bits|w_bit)": (\d+)', quantization)), default=8)
    if bits == 8 and re.search(r'"float|fp8', quantization):
        return Stored(torch.float8_e4m3fn, group)
    return Stored(bits, group or (GROUP if bits < 8 else None))
