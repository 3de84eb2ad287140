"""Warnings about data that is valid but probably not intended, with advice."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tune.datasets.dataset import Dataset
from tune.datasets.reasons import (
    CANNOT_BE_USED,
    EQUAL_AS_CUT,
    FOR_TRAINING,
    FULLY_MASKED,
    HELD_OUT,
    LEFT_OUT,
    SHARED_LIMIT,
    TOO_LONG,
)
from tune.datasets.remarks import COLUMN, REASONING_LOST
from tune.tokenizers import Tokenizer

LITTLE_LEARNED = 0.05  # of the tokens
NEARLY_ALL = 0.95
MANY = 0.01  # of the rows, or samples
MUCH_CUT = 0.05  # of the tokens
HAVE_PROMPTS = ("chat", "sharegpt", "alpaca", "prompt_completion")

# What to do about rows that are dropped, by reason.
ADVICE = {
    FULLY_MASKED: "they have no supervised token: is max_seq_len too short?",
    TOO_LONG: "raise max_seq_len, or set dataset.too_long=truncate",
    CANNOT_BE_USED: "the first ones are shown above; dataset.on_bad_row=skip drops them",
    "chosen equal to rejected": "leave them out with dataset.filter",
    **dict.fromkeys(("no message to learn", "no assistant message"), "see dataset.train_on"),
}
OTHERWISE = "fill them in, or leave them out with dataset.filter"


def overlap(training: Mapping[str, Dataset], validation: Mapping[str, Dataset]) -> str | None:
    """A warning if validation samples are also training samples."""
    if not (training and validation):
        return None
    trained_on, held_out = (np.concatenate([part.digests for part in side.values()]) for side in (training, validation))
    if not (both := int(np.isin(held_out, trained_on).sum())):
        return None
    return (
        f"{both:,} of the {len(held_out):,} validation samples are also training samples: their loss does not measure "
        "generalization"
    )


def beyond_positions(model: Any, longest: int) -> str | None:
    """A warning if the longest row, in tokens, exceeds the model's maximum position."""
    known = getattr(model, "max_positions", None)
    if not known or longest <= known:
        return None
    limit = f"{known:,} (max_position_embeddings in its config.json). Lower max_seq_len, or scale its RoPE"
    return f"the longest row has {longest:,} tokens, but the model supports {limit}"


def warnings_about(
    training: Mapping[str, Dataset], validation: Mapping[str, Dataset], tokenizer: Tokenizer
) -> list[str]:
    """The warnings about each part, with its name, and about training and validation data together."""
    parts = {**training, **validation}
    found = [f"{name}: {warning}" for name, part in parts.items() for warning in warnings_of(part, tokenizer)]
    return [*found, both] if (both := overlap(training, validation)) else found


def warnings_of(dataset: Dataset, tokenizer: Tokenizer) -> list[str]:
    """The warnings about one dataset."""
    accounting, found = dataset.accounting, []

    def warn(count: int, of: int, what: str, said: str, least: float = MANY) -> None:
        """Add the warning `said`, with the share filled in, if `count` is at least the share `least` of `of`."""
        if count and count >= least * of:
            found.append(said.replace("{}", f"{count:,} of {of:,} {what} ({count / of:.1%})"))

    meant = (HELD_OUT, FOR_TRAINING, LEFT_OUT)
    dropped = {reason: count for reason, count in accounting.dropped.most_common() if not reason.startswith(meant)}
    rows, samples = accounting.kept, len(dataset.lengths)
    for reason, count in dropped.items():
        advice = SHARED_LIMIT if reason.startswith(EQUAL_AS_CUT) else ADVICE.get(reason, OTHERWISE)
        warn(count, rows + sum(dropped.values()), "rows", f"{{}} are dropped, {reason}: {advice}")
    shorter = "raise max_seq_len"
    if "group" not in dataset.columns:
        shorter += ", or set dataset.too_long=split"
    all_tokens = accounting.tokens + accounting.cut_tokens
    warn(accounting.cut_tokens, all_tokens, "tokens", f"{{}} are cut off: {shorter}", MUCH_CUT)
    inside = "{} are cut inside an answer: raise max_seq_len, or set dataset.too_long=drop"
    warn(accounting.clipped, rows, "rows", inside)
    if dataset.learns_any(stops := sorted(tokenizer.stop_ids)):
        warn(accounting.endless, rows, "rows", "{} have no supervised end of turn: see the chat template", 0)
    else:
        ends = ", ".join(tokenizer.decode([stop]) for stop in stops) or "this tokenizer has none"
        found.append(
            f"no end-of-turn token ({ends}) is supervised anywhere: the model will not learn to stop. See the chat "
            "template and dataset.train_on_end_of_turn"
        )
    share = f"{accounting.supervised_share:.1%} of the tokens are supervised"
    if accounting.supervised_share < LITTLE_LEARNED:
        found.append(f"only {share}: are the answers where dataset.train_on looks for them?")
    elif accounting.supervised_share > NEARLY_ALL and accounting.format in HAVE_PROMPTS:
        found.append(f"{share}, prompts included: see dataset.train_on and the chat template's generation blocks")
    blank = "{} have at most one supervised token: are the answers blank? Leave rows out with dataset.filter"
    warn(int((dataset.supervised <= 1).sum()), samples, "samples", blank)
    copies = (
        "{} are copies of other samples: remove them from dataset.path. To repeat rows on purpose, give their source a "
        "weight in tune.datasets.mix"
    )
    warn(dataset.copies, samples, "samples", copies)
    named = "assign the column to a format with dataset.columns, or confirm with dataset.ignore"
    for remark, count in accounting.remarks.most_common():
        if remark.startswith(COLUMN):
            warn(count, rows, "rows", f"{remark}, in {{}}: {named}")
        else:
            is_together = remark == REASONING_LOST and "group" not in dataset.columns
            advice = (
                ". With dataset.turns=as_seen, each answer is trained with the reasoning that the template shows for it"
                if is_together
                else ""
            )
            warn(count, rows, "rows", f"{remark}: in {{}}{advice}", least=0)
    return found
