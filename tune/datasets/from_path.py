"""Load the dataset that a config's `dataset` describes."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, Literal

from tune import rehearsal
from tune.datasets.dataset import Dataset
from tune.datasets.fit import Fit, TooLong
from tune.datasets.full_rows import full_rows
from tune.datasets.held_out import with_validation
from tune.datasets.kept_files import hash_of, key_of
from tune.datasets.kept_windows import KeptWindows
from tune.datasets.parse.formats import FORMATS, Format, Kind
from tune.datasets.preparation import Preparation, fit_settings, reader_for, reader_settings
from tune.datasets.ray_data import for_all_processes, require_ray
from tune.datasets.read.opening import read
from tune.datasets.render import TrainOn, Turns
from tune.datasets.rows import RowReader
from tune.datasets.samples import Samples
from tune.datasets.stream import Chunks, Stream
from tune.datasets.workers import cores_of_a_process
from tune.errors import TuneError, explained
from tune.files import cache_folder
from tune.lookup import did_you_mean
from tune.tokenizers import Tokenizer, require_ours
from tune.types import Fraction, NonNegativeInt, PositiveInt, checked

WINDOW = 8192  # stream rows that are shuffled together


@checked
def load(
    tokenizer: Tokenizer,
    path: str,
    split: str = "train",
    *,
    max_seq_len: PositiveInt,
    packed: bool = False,
    kind: Kind = "supervised",
    format: str | None = None,
    columns: Mapping[str, str] | None = None,
    subset: str | None = None,
    take: PositiveInt | None = None,
    filter: str | None = None,
    train_on: TrainOn = "assistant",
    train_on_end_of_turn: bool = True,
    turns: Turns = "together",
    too_long: TooLong | None = None,
    bos_in_pieces: bool = True,
    ignore: Sequence[str] = (),
    extra_columns: Sequence[str] = (),
    on_bad_row: Literal["error", "skip"] = "error",
    max_bad_share: Fraction = 0.05,
    validation: str | Mapping[str, Any] | None = None,
    validation_fraction: Fraction = 0.0,
    validation_seed: NonNegativeInt = 0,
    cache_dir: str | None = None,
    workers: PositiveInt | None = None,
    streaming: bool | Literal["ray"] = False,
    shuffle_buffer: PositiveInt | None = None,
) -> Dataset | Stream:
    """Tokenize a dataset: a file, folder, glob, a URL of these, a dataset on the hub, or a generator function.

    Args:
        path: `python:my_data.rows` names a generator function.
        max_seq_len: tokens; see `too_long` for longer rows.
        packed: pack several samples into rows of `max_seq_len` tokens.
        kind: `supervised` rows have one answer or text. `preferences` have better and worse answers to a prompt,
            `graded` also a margin. `labelled` answers are good or bad. The answers to a prompt form a group of samples
            with `max_seq_len` tokens in total.
        format: the name of a format, or the dotted path of a function that converts a row to one. None: recognized by
            the columns.
        columns: the data's names for the columns of a format, as {"prompt": "question", "completion": "answer"}.
        subset: a configuration of a hub dataset.
        take: read only this many rows.
        filter: dotted path of a function that returns whether to keep a row.
        train_on: `assistant`, `all`, `last` (the assistant's last turn), or a list of roles.
        turns: `together` renders a conversation once. `as_seen` renders it for each answer, as the model is asked for
            this answer.
        too_long: `truncate` (a conversation after a message), `drop`, `split`, or `error`. None splits texts and
            truncates everything else.
        bos_in_pieces: if a text begins with BOS, so does each piece of it.
        ignore: columns, or `<image>`, to leave out although they change the meaning of a row.
        extra_columns: columns that go with the samples into the batches: a number, or for rows of `input_ids` a
            number per token.
        on_bad_row: `error` raises TuneError with the places of invalid rows. `skip` drops and counts them, unless
            their share exceeds `max_bad_share`.
        validation: the data in `.validation`: a path, or the arguments that differ from those of the training data, as
            {"split": "test", "take": 500}. `take` and `streaming` are of the training data alone.
        validation_fraction: the share of rows that goes into `.validation` instead.
        cache_dir: folder for the prepared samples (default: $TUNE_CACHE or ~/.cache/tune). They are reused for the same
            content, tokenizer and options.
        workers: tokenizing processes; None: one per core.
        streaming: tokenize while reading, and keep only the rows from which runs start. Each process reads all rows;
            with "ray", Ray Data tokenizes once for all processes.
        shuffle_buffer: stream rows that are shuffled and packed together (default: 8,192).

    Rows that cannot be trained on are dropped and counted in `.accounting`.
    """
    if rehearsal.planning():
        return full_rows(kind, max_seq_len, packed, extra_columns)
    if validation:
        return with_validation(load, locals())  # nothing but the arguments is defined yet
    path, train_on = os.fspath(path), _plain(train_on)
    with explained("path"):
        source = read(path, split, subset, take)
    require_ours(tokenizer)
    if kind != "supervised":
        if train_on != "assistant" or too_long == "split":
            raise TuneError(
                f"{kind} rows train on whole answers: remove train_on and too_long=split "
                f"(found train_on={train_on}, too_long={too_long})"
            )
        too_long = too_long or "truncate"
    if turns == "as_seen":
        _require_turns(kind, train_on, too_long, extra_columns)
    reader = RowReader(
        tokenizer, _named(format, kind), dict(columns or {}), filter, train_on, train_on_end_of_turn, turns, ignore,
        extra_columns, kind, pictures=folder_of(path) if tokenizer.pictures else None,
    )  # fmt: skip
    fit = Fit(
        max_seq_len, too_long, kind, turns == "as_seen", tokenizer.prefix_ids if bos_in_pieces else (),
        validation_fraction, validation_seed,
    )  # fmt: skip
    bad_share = max_bad_share if on_bad_row == "skip" else 0.0
    if "group" in extra_columns and (streaming or validation_fraction):
        raise TuneError("extra_columns: streaming and validation_fraction could separate the rows of a group")
    source = source.rehearsed()
    pack_to = max_seq_len if packed else None
    if streaming == "ray" and rehearsal.current():  # no cluster is started for so few rows
        require_ray()
        streaming = True
    reader, ignored_columns = reader_for(source, reader)
    if streaming:
        if kind == "labelled":
            raise TuneError("streaming: labelled rows are compared with answers to other prompts; set streaming=false")
        if validation_fraction:
            raise TuneError("validation_fraction: a stream cannot hold out rows; name other rows in validation")
        window = shuffle_buffer or WINDOW
        names = [file.name for file in source.files]
        # Positions in checkpoints depend on this fingerprint, which was made without digests of rows.
        settings = [reader_settings(replace(reader, digests=False)), fit_settings(fit)]
        fingerprint = hash_of(names, tokenizer.fingerprint, settings, packed, window)
        kept = KeptWindows(cache_folder(cache_dir) / "windows", key_of(fingerprint))
        chunks = Chunks(source, reader, fit, bad_share, ignored_columns, workers, kept)
        return _stream(chunks, pack_to, window, fingerprint, streaming == "ray")
    if shuffle_buffer:
        raise TuneError("shuffle_buffer: without streaming=true, all rows are shuffled together. Remove it")
    folder = cache_folder(cache_dir)
    preparation = Preparation(source, reader, folder, workers, bad_share, ignored_columns)
    training = Dataset(preparation.samples(fit, path, pack_to), pack_to, tokenizer.pictures)
    if validation_fraction:
        name, held_out = f"{path}, the rows held out for validation", replace(fit, validation=True)
        training.validation = Dataset(preparation.samples(held_out, name, pack_to), pack_to, tokenizer.pictures)
    return training


def folder_of(path: str) -> str:
    """The folder in which relative paths in the rows of a source begin: that of its file, or itself."""
    place = os.path.abspath(path)
    return place if os.path.isdir(place) else os.path.dirname(place)


def _require_turns(kind: Kind, train_on: TrainOn, too_long: TooLong | None, extra_columns: Sequence[str]) -> None:
    """Raise TuneError for settings that are incompatible with `turns="as_seen"`."""
    if kind != "supervised":
        raise TuneError(f"turns: {kind} rows train on the last answer, which is always as seen. Remove turns=as_seen")
    if train_on not in ("assistant", "last", ["assistant"]):
        raise TuneError(f"turns: as_seen trains on answers, but train_on is {train_on}. Set train_on=assistant or last")
    if too_long == "split":
        raise TuneError(
            "turns: too_long=split separates a turn from its conversation, which is incompatible with turns=as_seen. "
            "Set too_long to truncate or drop"
        )
    if "group" in extra_columns:
        raise TuneError("extra_columns: turns=as_seen sets the column group itself. Remove group")


def ray(tokenizer: Tokenizer, path: str, split: str = "train", **options: Any) -> Dataset | Stream:
    """Stream like `load` with `streaming=true`, the same rows in the same order, tokenized by Ray Data.

    Ray Data reads and tokenizes on the CPUs of a cluster, once for all processes. A checkpoint of either can be resumed
    with the other.
    """
    return load(tokenizer, path, split, **options, streaming="ray")


def _plain(train_on: TrainOn) -> TrainOn:
    return train_on if isinstance(train_on, str) else [*train_on]


NOT_STREAMED = ("streaming", "validation_fraction", "validation_seed")
_known = [parameter for parameter in signature(load).parameters.values() if parameter.name not in NOT_STREAMED]
ray.__signature__ = signature(load).replace(parameters=_known)  # type: ignore[attr-defined]
ray.__annotations__ = load.__annotations__


def _stream(chunks: Chunks, pack_to: int | None, window: int, fingerprint: str, by_ray: bool) -> Stream:
    source, fit = chunks.source, chunks.fit
    if not (chunks.workers or by_ray):  # each process reads the same rows
        chunks = replace(chunks, workers=cores_of_a_process())
    read: Callable[[int], Iterator[Samples]] = partial(chunks.after, by_ray=by_ray)
    read = for_all_processes(read, source.name) if by_ray else read
    kept = None if rehearsal.current() else chunks.windows  # a rehearsal may have cut the rows
    return Stream(
        read, source.name, fit.max_seq_len, pack_to, window, fingerprint, kept, chunks.reader.tokenizer.pictures
    )


def _named(format: str | None, kind: Kind) -> Format | str | None:
    """The format with this name, or the dotted path of the user's function."""
    if format is None or "." in format:
        return format
    known = {format.name: format for format in FORMATS[kind]}
    if format not in known:
        raise TuneError(
            f"format={format} is not a format of {kind} rows.{did_you_mean(format, known)} Known formats: "
            f"{', '.join(known)}. For your own function, give its path: format=my_data.to_messages"
        )
    return known[format]
