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
from tune.errors import TuneError
from tune.peft import adapted_modules, merge_in_place, switched_off
from tune.tokenizers import Message, Tokenizer
from tune.verify.probes import Probe, conversations
from tune.verify.programs import ChatText, Program, Stored

MARGIN = 2.0  # factor on the effect of rounding
ENOUGH = 0.5  # smallest share of the tokens that a program must report to be compared
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
    missing: list[str] | None = None  # tensors that the artifact lacks; None if the program does not open it then


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
        program.missing,
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
    own, theirs = _of_all(model, probes), _of_program(found, probes)
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
        if own.isfinite().all() and not math.isfinite(tolerance):
            raise TuneError(
                f"with its weights rounded to {stored}, the run's own model computes {tolerance} for a mean "
                "difference, so nothing can be measured against it. Set --tolerance NATS"
            )
    return [
        _tokens(found, probes, tokenizer),
        *_template(found, tokenizer),
        _stop_tokens(found, tokenizer),
        _answers(found, losses, tokenizer, tolerance),
        *_distances(theirs, own, tolerance, _miscounted(found, probes)),
        *([_adapter(theirs, own, base)] if base is not None else []),
        *_weights(found),
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


def _weights(found: Observed) -> list[Check]:
    """Check that the artifact has all tensors of the class that its config names, also those that no text needs."""
    if found.missing is None:
        return []
    count = len(found.missing)
    detail = f"the artifact lacks {', '.join(found.missing[:3])}" if count else ""
    return [Check("weights", "all tensors", f"{count} missing", f"{count} tensors", "0", not count, detail)]


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


def _of_program(found: Observed, probes: Sequence[Probe]) -> list[float | None]:
    """Return the program's log-probs in the same order; None for a token without one, and for all tokens of a text for
    which the program reports another number of them."""
    values: list[float | None] = []
    for of_text, probe in zip(found.log_probs, probes, strict=True):
        count = len(probe.ids) - 1
        values += of_text if len(of_text) == count else [None] * count
    return values


def _miscounted(found: Observed, probes: Sequence[Probe]) -> str:
    """Describe the first text for which the program reports another number of log-probs than it has tokens; ""."""
    for of_text, probe in zip(found.log_probs, probes, strict=True):
        if len(of_text) != len(probe.ids) - 1:
            return f"the artifact has {len(of_text)} log-probs for {len(probe.ids) - 1} tokens of {probe.plain[:60]!r}"
    return ""


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


def _distances(theirs: list[float | None], ours: Tensor, tolerance: float, miscounted: str) -> list[Check]:
    """Check the distances of the log-probs of the texts' tokens and of the perplexity.

    A value that is not finite is a difference, and so is another number of values. With values for fewer than
    `ENOUGH` of the tokens, or if the run's own model is not finite, nothing can be compared.
    """
    reported = [at for at, value in enumerate(theirs) if value is not None]
    values = torch.tensor([theirs[at] for at in reported], dtype=torch.float64)
    own = ours[reported]
    distance = float((values - own).abs().mean())
    mean, own_mean = float(-values.mean()), float(-own.mean())
    is_close: bool | None = distance <= tolerance
    is_same: bool | None = abs(mean - own_mean) <= tolerance
    detail = ""
    if miscounted:
        is_close, detail = False, miscounted
    elif broken := int((~values.isfinite()).sum()):
        is_close = is_same = False
        detail = f"the artifact computes NaN or infinity for {broken:,} of {len(theirs):,} tokens"
    elif broken := int((~ours.isfinite()).sum()):
        is_close = is_same = None
        detail = f"the run's own model computes NaN or infinity for {broken:,} of {len(ours):,} tokens"
    elif len(reported) < ENOUGH * len(theirs):
        is_close = is_same = None
        detail = f"the program reports log-probs of {len(reported):,} of {len(theirs):,} tokens. Use other --prompts"
    return [
        Check(
            "log-probs", f"{len(ours):,} tokens", f"{len(reported):,} tokens", f"{distance:.4f} nats a token",
            f"{tolerance:.4f}", is_close, detail,
        ),
        Check(
            "perplexity", f"{_exp(own_mean):.4g}", f"{_exp(mean):.4g}", f"{_exp(mean - own_mean) - 1:+.2%}",
            f"{tolerance:.1%}", is_same,
        ),
    ]  # fmt: skip


def _exp(value: float) -> float:
    """Return e to the power of a number of nats; infinity if it is too large for a float."""
    return float(torch.tensor(value, dtype=torch.float64).exp())


def _adapter(theirs: list[float | None], ours: Tensor, base: Tensor) -> Check:
    """Check how much of the adapter's effect is in the artifact: the least-squares slope through (run - base, artifact
    - base) of all tokens. The check is inconclusive if three standard errors exceed the tolerance."""
    reported = [at for at, value in enumerate(theirs) if value is not None]
    values = torch.tensor([theirs[at] for at in reported], dtype=torch.float64)
    changes, found = (ours - base)[reported], values - base[reported]
    square = float(changes.square().sum())
    share = float((changes * found).sum()) / square if square else math.nan
    error = math.sqrt(float((found - share * changes).square().mean()) / square) if square else math.inf
    is_same = None if 3 * error > ADAPTER_SHARE else abs(share - 1) <= ADAPTER_SHARE
    detail = "" if is_same is not False else f"the artifact has {share:.0%} of the adapter's effect"
    return Check("adapter", "1", f"{share:.2f} ± {error:.2f}", f"{share - 1:+.2f}", f"{ADAPTER_SHARE}", is_same, detail)
