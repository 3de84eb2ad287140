"""Warnings about data that can be trained on, but is probably not what was meant, with what to do."""

from collections.abc import Mapping

import numpy as np

from tune.datasets.dataset import Dataset
from tune.datasets.remarks import COLUMN
from tune.datasets.rows import CANNOT_BE_USED, FOR_TRAINING, FULLY_MASKED, HELD_OUT, LEFT_OUT, TOO_LONG
from tune.tokenizers import Tokenizer

LITTLE_LEARNED = 0.05  # of the tokens
NEARLY_ALL = 0.95
MANY = 0.01  # of the rows, or samples
MUCH_CUT = 0.05  # of the tokens
HAVE_PROMPTS = ("chat", "sharegpt", "alpaca", "prompt_completion")

# What to do about rows that are dropped, by reason.
ADVICE = {
    FULLY_MASKED: "nothing in them is learned: is max_seq_len too short?",
    TOO_LONG: "raise max_seq_len, or set dataset.too_long=truncate",
    CANNOT_BE_USED: "the first ones are shown above; dataset.on_bad_row=skip drops them",
    "chosen equal to rejected": "leave them out with dataset.filter",
    **dict.fromkeys(("no message to learn", "no assistant message"), "see dataset.train_on"),
}
OTHERWISE = "fill them, or leave them out with dataset.filter"


def overlap(training: Mapping[str, Dataset], validation: Mapping[str, Dataset]) -> str | None:
    """A warning if samples that are validated on are trained on too."""
    if not (training and validation):
        return None
    trained_on, held_out = (np.concatenate([part.digests for part in side.values()]) for side in (training, validation))
    if not (both := int(np.isin(held_out, trained_on).sum())):
        return None
    return f"{both:,} of the {len(held_out):,} validation samples are trained on too: their loss tells nothing new"


def warnings_about(
    training: Mapping[str, Dataset], validation: Mapping[str, Dataset], tokenizer: Tokenizer
) -> list[str]:
    """The warnings of each part, by name, and of training and validation data together."""
    parts = {**training, **validation}
    found = [f"{name}: {warning}" for name, part in parts.items() for warning in warnings_of(part, tokenizer)]
    return [*found, both] if (both := overlap(training, validation)) else found


def warnings_of(dataset: Dataset, tokenizer: Tokenizer) -> list[str]:
    """The warnings about one dataset."""
    accounting, found = dataset.accounting, []
    meant = (HELD_OUT, FOR_TRAINING, LEFT_OUT)
    dropped = {reason: count for reason, count in accounting.dropped.most_common() if not reason.startswith(meant)}
    read = accounting.kept + sum(dropped.values())
    for reason, count in dropped.items():
        if count >= MANY * read:
            found.append(f"{_share(count, read, 'rows')} are dropped, {reason}: {ADVICE.get(reason, OTHERWISE)}")
    rows, all_tokens = accounting.kept, accounting.tokens + accounting.cut_tokens
    if accounting.cut_tokens >= MUCH_CUT * all_tokens:
        shorter = "raise max_seq_len" + ", or set dataset.too_long=split" * ("group" not in dataset.columns)
        found.append(f"{_share(accounting.cut_tokens, all_tokens, 'tokens')} are cut off: {shorter}")
    if accounting.clipped and accounting.clipped >= MANY * rows:
        ends = f"{_share(accounting.clipped, rows, 'rows')} end inside an answer, without its end"
        found.append(f"{ends}: raise max_seq_len, or set dataset.too_long=drop")
    if not dataset.learns_any(stops := sorted(tokenizer.stop_ids)):
        ends = ", ".join(tokenizer.decode([stop]) for stop in stops) or "none is known of this tokenizer"
        found.append(
            f"no end of turn is learned anywhere ({ends}): the model will not learn to stop. See the chat template and "
            "dataset.train_on_end_of_turn"
        )
    elif accounting.endless:
        found.append(f"{_share(accounting.endless, rows, 'rows')} have no end of turn to learn: see the chat template")
    share = f"{accounting.supervised_share:.1%} of the tokens are learned"
    if accounting.supervised_share < LITTLE_LEARNED:
        found.append(f"only {share}: are the answers where dataset.train_on looks for them?")
    elif accounting.supervised_share > NEARLY_ALL and accounting.format in HAVE_PROMPTS:
        found.append(f"{share}, those of the prompts too: see dataset.train_on and the chat template's marks")
    samples = len(dataset.lengths)
    if (blank := int((dataset.supervised <= 1).sum())) >= MANY * samples:
        little = f"{_share(blank, samples, 'samples')} have no more than one token to learn"
        found.append(f"{little}: are the answers blank? dataset.filter leaves rows out")
    if (copies := dataset.copies) >= MANY * samples:
        found.append(
            f"{_share(copies, samples, 'samples')} are copies of others, and learned as often: leave them out of "
            "dataset.path. To read rows more often, give their source a weight in tune.datasets.mix"
        )
    for remark, count in accounting.remarks.most_common():
        if not remark.startswith(COLUMN):
            found.append(f"{remark}: in {_share(count, rows, 'rows')}")
        elif count >= MANY * rows:
            what = "dataset.columns gives it to a format, dataset.ignore says that this is meant"
            found.append(f"{remark}, in {_share(count, rows, 'rows')}: {what}")
    return found


def _share(count: int, of: int, what: str) -> str:
    return f"{count:,} of {of:,} {what} ({count / max(1, of):.1%})"
