"""`tune add-tokens`: a model with a larger vocabulary."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tune.cli.convert import check_absent
from tune.errors import TuneError


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="tune add-tokens",
        description="Write BASE with new tokens: in its tokenizer, and as rows of its embedding and head that start at "
        "the mean of all others. To train an adapter and these rows: adapter.trainable_tokens=[their ids].",
    )
    parser.add_argument("base", metavar="BASE", help="a model folder")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write: absent or empty")
    parser.add_argument("tokens", metavar="TOKEN", nargs="+", help="such as '<|tool_call|>'")
    options = parser.parse_args(arguments)
    check_absent(options.out)
    try:
        from tune.checkpointers import add_tokens

        ids = add_tokens(options.base, options.out, options.tokens)
    except OSError as error:
        raise TuneError(f"{error.filename or options.out}: {error.strerror}") from error
    setting = f"adapter.trainable_tokens=[{','.join(map(str, ids))}]"
    print(f"wrote {options.out}. To train the new rows with an adapter: tune run lora_finetune ... '{setting}'")
