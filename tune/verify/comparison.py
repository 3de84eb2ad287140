"""Checks of an artifact against the run's model."""

import math
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tune.distributed import repeated_blocks
from tune.peft import adapted_modules, merge_in_place, switched_off
from tune.tokenizers import Message, Tokenizer
from tune.verify.probes import Probe, conversations
from tune.verify.programs import ChatText, Program, Stored

MARGIN = 2.0  # factor on the effect of rounding
ADAPTER_SHARE = 0.5  # largest accepted deviation of the adapter's effect, as a share


@dataclass(frozen=True)
class Check:
    """A row of the table. `is_same` is None if the check is inconclusive; `detail` describes a difference, also one
    within the tolerance."""

    name: str
    run: str
    artifact: str
    difference: str
    tolerance: str
    is_same: bool | None
    detail: str = ""


@dataclass(frozen=True)
class Observed:
    """A program's results: for each probe an answer of at most `longest` tokens, and log-probs."""

    misread: list[str]
    texts: list[tuple[Sequence[int], str]]  # ids, and their text without special tokens
    chats: dict[str, ChatText | str]  # by the run's rendered text: the program's text and tokens, or its error
    stops: set[int]
    answers: list[list[int]]
    longest: int
    log_probs: list[list[float | None]]


def ask(program: Program, tokenizer: Tokenizer, probes: Sequence[Probe], longest: int) -> Observed:
    """Run the probes, and the chats and stop tokens of the run's `tokenizer`, through `program`."""
    misread = [
        probe.plain
        for probe in probes
        if not program.reads(probe.plain, tokenizer.encode(probe.plain, add_special_tokens=True))
    ]
    answers = [program.answer(probe.prompt, longest) for probe in probes]
    decoded = [(probe.ids, program.decode(probe.ids)) for probe in probes]
    chats = {text: _chat(program, *asked) for text, asked in conversations(tokenizer).items()}
    return Observed(
        misread,
        [(ids, text) for ids, text in [*decoded, *answers] if text is not None],
        {text: rendered for text, rendered in chats.items() if rendered is not None},
        program.stops(tokenizer.stop_ids),
        [ids for ids, _ in answers],
        longest,
        [program.log_probs(probe.ids) for probe in probes],
    )


def _chat(program: Program, messages: list[Message], tools: list[Any] | None) -> ChatText | str | None:
    try:
        return program.chat(messages, tools)
    except Exception as error:  # templates and their engines can raise anything
        return f"{type(error).__name__}: {error}"


def compare(
    found: Observed, model: Any, tokenizer: Tokenizer, probes: Sequence[Probe], tolerance: float | None,
    stored: Stored, noise: float,
) -> list[Check]:  # fmt: skip
    """Compare a program's results `found` with the run's own `model`, which is rounded in place afterwards.

    `tolerance` is in nats per token. None: `MARGIN` times the effect of rounding `model` as its weights are `stored`,
    plus `noise`.
    """
    own, theirs = _of_all(model, probes), _of_program(found)
    base = None
    if adapted_modules(model):
        with switched_off(model):
            base = _of_all(model, probes)
    losses = [_losses(model, probe.prompt, answer) for probe, answer in zip(probes, found.answers, strict=True)]
    if tolerance is None:
        if base is not None:
            merge_in_place(model)
        round_weights(model, stored)
        with RoundedInputs(stored.inputs) if stored.inputs else nullcontext():
            rounded = _of_all(model, probes)
        tolerance = MARGIN * float((rounded - own).abs().mean()) + noise
    return [
        _tokens(found, probes, tokenizer),
        *_template(found, tokenizer),
        _stop_tokens(found, tokenizer),
        _answers(found, losses, tokenizer, tolerance),
        *_distances(theirs, own, tolerance),
        *([_adapter(theirs, own, base)] if base is not None else []),
    ]


@torch.no_grad()
def round_weights(model: Any, stored: Stored) -> None:
    """Round the matrices in the blocks of `model` as they are `stored`; other matrices to at least 8 bits."""
    in_blocks = {id(each) for block in repeated_blocks(model) for each in block.parameters()}
    for parameter in model.parameters():
        if parameter.ndim < 2:
            continue
        of_others = max(8, stored.kind) if isinstance(stored.kind, int) else stored.kind
        kind = stored.kind if id(parameter) in in_blocks else of_others
        parameter.copy_(_rounded(parameter.float(), kind, stored.group))


def _rounded(values: Tensor, kind: torch.dtype | int, group: int | None) -> Tensor:
    """Round `values` `[..., columns]`, with a scale for each `group` of a row, or for the row if it does not divide."""
    if isinstance(kind, torch.dtype) and kind.itemsize > 1:
        return values.to(kind).float()
    columns = values.shape[-1]
    blocks = values.unflatten(-1, (-1, columns if group is None or columns % group else group))
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    if isinstance(kind, int):
        scale = largest / (2 ** (kind - 1) - 0.5)
        return ((blocks / scale).round() * scale).flatten(-2)
    scale = largest / torch.finfo(kind).max
    return ((blocks / scale).to(kind).float() * scale).flatten(-2)


class RoundedInputs(TorchDispatchMode):
    """Round the inputs of matrix products to 8 bits, with a scale for each `group` values, as llama.cpp does on a CPU
    if the weights are quantized. Attention's own products are not rounded."""

    INPUTS: ClassVar = {"aten::mm": 0, "aten::addmm": 1, "aten::_grouped_mm": 0, "tune::product_by_group": 0}

    def __init__(self, group: int):
        super().__init__()
        self.group = group

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        at = self.INPUTS.get(func._schema.name)
        if at is not None:
            rounded = _rounded(args[at].float(), 8, self.group).to(args[at].dtype)
            args = (*args[:at], rounded, *args[at + 1 :])
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _log_softmax(model: Any, ids: Sequence[int]) -> Tensor:
    """Return the log-probs after each of `ids`, `[ids, vocab]`, on the host."""
    device = next(model.parameters()).device
    log_probs: Tensor = model(torch.tensor([[*ids]], device=device))[0].float().log_softmax(-1).cpu()
    return log_probs


def _of_all(model: Any, probes: Sequence[Probe]) -> Tensor:
    """Return the model's log-probs of all tokens of the probes, except the first of each."""
    found = []
    for probe in probes:
        targets = torch.tensor(probe.ids[1:])
        found.append(_log_softmax(model, probe.ids[:-1]).gather(1, targets[:, None])[:, 0])
    return torch.cat(found).double()


def _of_program(found: Observed) -> Tensor:
    """Return the program's log-probs in the same order; NaN for missing ones."""
    values = [math.nan if value is None else value for each in found.log_probs for value in each]
    return torch.tensor(values, dtype=torch.float64)


def _tokens(found: Observed, probes: Sequence[Probe], tokenizer: Tokenizer) -> Check:
    """Check the ids of the texts, and the texts of their ids and of the answers."""
    details = [f"{text[:60]!r} has other ids" for text in found.misread]
    for ids, text in found.texts:
        own = tokenizer.decode([*ids], skip_special_tokens=True)
        if not _is_same_text(text, own):
            details.append(f"it decodes ids to {text[:60]!r}, the run to {own[:60]!r}")
    total, count = len(probes) + len(found.texts), len(details)
    same = f"{total - count} the same"
    return Check("tokens", f"{total} texts", same, f"{count} texts", "0", not count, "".join(details[:1]))


def _is_same_text(theirs: str, own: str) -> bool:
    """Whether two decoded texts are the same, up to the first byte that is no character, for which programs write
    different texts, and except for a space before the first word."""
    begin, is_cut, _ = own.removeprefix(" ").partition("\ufffd")
    theirs = theirs.removeprefix(" ")
    return theirs.startswith(begin) if is_cut else theirs.rstrip("\ufffd") == begin


def _template(found: Observed, tokenizer: Tokenizer) -> list[Check]:
    """Check the chat template, if the run has one. llama.cpp removes the BOS that a template writes and lets its
    tokenizer add it, so the number of tokens shows whether it is there."""
    if not found.chats:
        return []
    bos = tokenizer.special_tokens.get("bos_token", "")
    details = []
    for expected, theirs in found.chats.items():
        if isinstance(theirs, str):
            details.append(theirs)
        elif not _is_same_chat(theirs, expected, tokenizer, bos):
            details.append(f"it writes {theirs[0]!r:.300}, but the run writes {expected!r:.300}")
        else:
            ids, (_, read) = tokenizer.encode(expected), theirs
            if read != (len(ids) if isinstance(read, int) else ids):
                count = read if isinstance(read, int) else len(read)
                others = "" if count != len(ids) else ", some of which differ"
                details.append(f"it reads {count} tokens from {expected!r:.300}, the run {len(ids)}{others}")
    total, count = len(found.chats), len(details)
    same = f"{total - count} the same"
    return [Check("chat template", f"{total} chats", same, f"{count} chats", "0", not count, "".join(details[:1]))]


def _is_same_chat(theirs: ChatText, expected: str, tokenizer: Tokenizer, bos: str) -> bool:
    """Whether a rendered conversation is the expected one. llama.cpp decodes it from the tokens, so a SentencePiece
    tokenizer adds spaces around special tokens. The number of tokens, which is compared too, shows real ones."""
    texts = [text.removeprefix(bos) for text in (theirs[0], expected)]
    if isinstance(theirs[1], int):
        special = "|".join(map(re.escape, tokenizer.special_ids.values())) or "(?!)"
        texts = [re.sub(rf"^ | ?({special}) ?", r"\1", text) for text in texts]
    return texts[0] == texts[1]


def _stop_tokens(found: Observed, tokenizer: Tokenizer) -> Check:
    own, theirs, missing, more = (
        [tokenizer.decode([token]) for token in sorted(tokens)]
        for tokens in (
            tokenizer.stop_ids, found.stops, tokenizer.stop_ids - found.stops, found.stops - tokenizer.stop_ids
        )
    )  # fmt: skip
    details = [f"answers do not stop at {' and '.join(missing)}"] if missing else []
    details += [f"answers also stop at {' and '.join(more)}"] if more else []
    return Check(
        "stop tokens", " ".join(own), " ".join(theirs) or "none", f"{len(missing)} missing, {len(more)} more", "0",
        not details, "; ".join(details),
    )  # fmt: skip


def _losses(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Return, for each token of an answer, its distance in log-prob from the model's most likely token, in nats."""
    log_probs = _log_softmax(model, [*prompt, *answer])[len(prompt) - 1 : -1]
    return log_probs.amax(-1) - log_probs.gather(1, torch.tensor(answer, dtype=torch.int64)[:, None])[:, 0]


def _answers(found: Observed, losses: Sequence[Tensor], tokenizer: Tokenizer, tolerance: float) -> Check:
    """Check the mean of `losses` up to the end that the run gives an answer, and that answers end there."""
    same, cut, details = 0, [], []
    for answer, of_tokens in zip(found.answers, losses, strict=True):
        end = next((at for at, token in enumerate(answer, 1) if token in tokenizer.stop_ids), None)
        if end != len(answer) and (end or len(answer) < found.longest):
            details = [f"an answer ends elsewhere than with the run's model: {tokenizer.decode(answer)!r:.200}"]
        cut.append(of_tokens[:end])
        same += bool((cut[-1] <= 0).all())
    mean = float(torch.cat(cut).mean())
    if not mean <= tolerance:
        worst = max(range(len(cut)), key=lambda at: float(cut[at].sum()))
        details.append(f"for example {tokenizer.decode(found.answers[worst])!r:.200}")
    is_same = not details
    if is_same and same < len(cut):
        details = [
            f"{len(cut) - same} of {len(cut)} differ, and are almost as likely for the run ({mean:.4f} nats a token)"
        ]
    return Check(
        "greedy answers", f"{len(cut)}, {sum(map(len, cut)):,} tokens", f"{same} the same",
        f"{mean:.4f} nats a token", f"{tolerance:.4f}", is_same, "; ".join(details),
    )  # fmt: skip


def _distances(theirs: Tensor, ours: Tensor, tolerance: float) -> list[Check]:
    """Check the distances of the log-probs of the texts' tokens and of the perplexity."""
    told = ~theirs.isnan() if len(theirs) == len(ours) else torch.zeros_like(ours, dtype=torch.bool)
    theirs, ours = theirs[told], ours[told]
    distance = float((theirs - ours).abs().mean())
    mean, own = float(-theirs.mean()), float(-ours.mean())
    return [
        Check(
            "log-probs", f"{len(ours):,} tokens", "", f"{distance:.4f} nats a token", f"{tolerance:.4f}",
            distance <= tolerance,
        ),
        Check(
            "perplexity", f"{math.exp(own):.4g}", f"{math.exp(mean):.4g}", f"{math.expm1(mean - own):+.2%}",
            f"{tolerance:.1%}", abs(mean - own) <= tolerance,
        ),
    ]  # fmt: skip


def _adapter(theirs: Tensor, ours: Tensor, base: Tensor) -> Check:
    """Check how much of the adapter's effect is in the artifact: the least-squares slope through (run - base, artifact
    - base) of all tokens. The check is inconclusive if three standard errors exceed the tolerance."""
    told = ~theirs.isnan()
    changes, found = (ours - base)[told], (theirs - base)[told]
    square = float(changes.square().sum())
    share = float((changes * found).sum()) / square if square else math.nan
    error = math.sqrt(float((found - share * changes).square().mean()) / square) if square else math.inf
    is_same = None if 3 * error > ADAPTER_SHARE else abs(share - 1) <= ADAPTER_SHARE
    detail = "" if is_same is not False else f"the artifact has {share:.0%} of the adapter's effect"
    return Check("adapter", "1", f"{share:.2f} ± {error:.2f}", f"{share - 1:+.2f}", f"{ADAPTER_SHARE}", is_same, detail)
