"""Answer lm-evaluation-harness with one of tune's models."""

import json
import sys
from collections.abc import Iterator
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import nn

from tune.distributed import World
from tune.errors import TuneError
from tune.evaluation.likelihoods import log_likelihoods
from tune.generation import Sampler, answer
from tune.tokenizers import Message, Tokenizer

CACHED_TOKENS = 32768  # cache size in tokens of all rows that are generated together
GENERATED, UNKNOWN_LENGTH = 256, 2048  # the defaults of `HFLM` for a task and for a model


def sampling(settings: dict[str, Any], eos: str | None = None) -> tuple[list[str], dict[str, Any]]:
    """Return the texts that end an answer, and the settings of `Sampler`, from a task's `generation_kwargs`. Raises
    TuneError for a setting that `Sampler` does not have."""
    given: dict[str, Any] = dict(normalize_gen_kwargs(settings, GENERATED))
    until = handle_stop_sequences(given.pop("until"), eos)
    given["max_new_tokens"], _ = given.pop("max_gen_toks"), given.pop("do_sample")
    given.setdefault("temperature", 0.0)
    if others := given.keys() - {"max_new_tokens", "temperature", "top_k", "top_p", "min_p"}:
        raise TuneError(f"generation_kwargs: {', '.join(sorted(others))} is not supported")
    Sampler(**given)
    return until, given


def length_of(model: nn.Module, max_length: int | None) -> int:
    return max_length or getattr(model, "max_positions", None) or UNKNOWN_LENGTH


def require_generation(model: nn.Module, new: int, max_length: int | None) -> None:
    """Raise TuneError if `model` cannot generate or has no room for `new` tokens."""
    Sampler(max_new_tokens=new).check(model, [], [])
    if new >= (most := length_of(model, max_length)):
        raise TuneError(f"a task generates {new} tokens, but max_length={most} leaves no room for its text")


class HarnessModel(TemplateLM):
    """Answer the same requests as lm-evaluation-harness's `HFLM`. Every process gets all requests and computes a share.
    `batch_size` is the number of requests per forward (default: as many as fit). Contexts are cut from the left to
    `max_length` (default: the length that the model was trained for)."""

    eot_token_id: Any = None  # properties in the base class
    prefix_token_id: Any = None
    tokenizer_name = ""

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, world: World, batch_size: int | None, max_length: int | None
    ):
        super().__init__()
        self.model, self.tokenizer, self.world, self.batch_size = model, tokenizer, world, batch_size
        self.max_length = length_of(model, max_length)
        self.tokenizer_name, self.eot_token_id = str(tokenizer.path).replace("/", "__"), tokenizer.eos_id
        self.prefix_token_id = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        if self.prefix_token_id is None:
            raise TuneError(f"{tokenizer.path} has neither a BOS nor an EOS token to start a text with")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode `string`; by default with the tokenizer's BOS, unless a chat template has already written it."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode([self.prefix_token_id]))
        return [*(self.tokenizer.prefix_ids if add_special_tokens else ()), *self.tokenizer.encode(string)]

    def apply_chat_template(self, chat_history: list[Message], add_generation_prompt: bool = True) -> str:
        if add_generation_prompt:
            return self.tokenizer.apply_chat_template(chat_history, add_generation_prompt=True)
        *before, last = chat_history  # continue the last message, as transformers' continue_final_message
        begun = [*before, {**last, "content": f"{last['content']}\ufdd0 "}]
        text, _, behind = self.tokenizer.apply_chat_template(begun).rpartition("\ufdd0")
        return text if behind.startswith(" ") else text.rstrip()

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        # lm-eval moves trailing blanks of a context to the continuation, so a context of blanks is empty.
        pairs = [(context or [self.prefix_token_id], continuation) for _, context, continuation in requests]
        self._tell_cut([len(context) + len(continuation) - 1 for context, continuation in pairs], self.max_length)
        return log_likelihoods(self.model, pairs, self.world, self.max_length, self.batch_size)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Score whole texts in pieces of `max_length` tokens, each with as much context as fits."""
        totals, windows = [0.0] * len(requests), []
        for index, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            pieces = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            windows += [(index, make_disjoint_window(each)) for each in pieces]
        found = log_likelihoods(self.model, [each for _, each in windows], self.world, self.max_length, self.batch_size)
        for (index, _), (log_prob, _) in zip(windows, found, strict=True):
            totals[index] += log_prob
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        alike: dict[str, dict[int, str]] = {}  # contexts by settings
        for index, request in enumerate(requests):
            context, settings = request.args
            alike.setdefault(json.dumps(settings, sort_keys=True), {})[index] = context
        found = {index: text for settings, each in alike.items() for index, text in self._behind(each, settings)}
        return [found[index] for index in range(len(requests))]

    def _behind(self, contexts: dict[int, str], settings: str) -> Iterator[tuple[int, str]]:
        """Yield the number of each of `contexts` and the text generated after it."""
        eos = None if self.eot_token_id is None else self.tokenizer.decode([self.eot_token_id])
        until, given = sampling(json.loads(settings), eos)
        require_generation(self.model, new := given["max_new_tokens"], self.max_length)
        room = self.max_length - new
        whole = {index: self.tok_encode(text) or [self.prefix_token_id] for index, text in contexts.items()}
        self._tell_cut([*map(len, whole.values())], room)
        prompts = {index: whole[index][-room:] for index in sorted(whole, key=lambda index: -len(whole[index]))}
        rows = self.batch_size or max(1, min(64, CACHED_TOKENS // (new + max(map(len, prompts.values())))))
        sampler = Sampler(
            stop_ids=self.tokenizer.stop_ids, stop_strings=[each for each in until if each],
            decode=self.tokenizer.decode, max_rows=rows, **given,
        )  # fmt: skip
        for index, (completion,) in answer(self.model, sampler, self.tokenizer, prompts, self.world).items():
            yield index, postprocess_generated_text(completion.text, until, None)

    def _tell_cut(self, lengths: list[int], room: int) -> None:
        if self.world.is_main and (cut := sum(length > room for length in lengths)):
            print(
                f"{cut:,} of {len(lengths):,} texts exceed {room:,} tokens and lose their start",
                file=sys.stderr,
            )
