"""Add tokens to a model: write BASE with new tokens in its tokenizer and new rows in its embedding and head. New rows
start at the mean of all other rows. To train them with an adapter, set adapter.trainable_tokens=[their ids]."""

from argparse import ArgumentParser

from tune.cli.output import new_folder
from tune.lookup import local_path


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("base", metavar="BASE", help="a model folder")
    parser.add_argument("out", metavar="OUT", type=local_path, help="the folder to write; it must be absent or empty")
    parser.add_argument("tokens", metavar="TOKEN", nargs="+", help="such as '<|tool_call|>'")
    options = parser.parse_args(arguments)
    with new_folder(options.out):
        from tune.checkpointers import add_tokens

        ids = add_tokens(options.base, options.out, options.tokens)
    setting = f"adapter.trainable_tokens=[{','.join(map(str, ids))}]"
    print(f"To train the new rows with an adapter: tune run lora_finetune ... '{setting}'")
