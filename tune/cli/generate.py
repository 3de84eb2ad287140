"""Answer prompts with MODEL: a model folder, an adapter folder or a run. Answers go to standard output, all else to
standard error; under torchrun the prompts are shared by its processes.

    tune generate runs/mine --prompt "Why is the sky blue?"
    tune generate ./model --adapter ./adapter --prompts questions.jsonl --out answers.jsonl
    torchrun --nproc-per-node 2 -m tune.cli generate ./model --prompts questions.txt --out answers.jsonl
"""

import io
import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tune.errors import TuneError

MAX_NEW_TOKENS = 512
ASKED = ("prompt", "messages", "conversations", "instruction", "input", "system")  # columns that records have too

SAMPLING = ("temperature", "top_k", "top_p", "min_p")
NOT_APPLIED = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1, "typical_p": 1.0}  # and off


def add_arguments(parser: ArgumentParser) -> None:
    """Those of a model and of sampling."""
    parser.add_argument("model", metavar="MODEL", help="a model in Hugging Face layout, an adapter, or a run folder")
    parser.add_argument("--adapter", metavar="A", action="append", default=[], help="again for several, which add up")
    longest = f"end answers there (default: {MAX_NEW_TOKENS}, or what the model has room for)"
    parser.add_argument("--max-new-tokens", metavar="N", type=int, help=longest)
    by_file = "(default: the model's generation_config.json)"
    parser.add_argument("--temperature", metavar="T", type=float, help=f"0: the most likely tokens {by_file}")
    parser.add_argument("--top-k", metavar="K", type=int, help="choose among the K most likely; 0: all")
    parser.add_argument("--top-p", metavar="P", type=float, help="among the fewest that have this probability")
    parser.add_argument("--min-p", metavar="P", type=float, help="among those at least P times as likely as the first")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="another one gives other samples (default: 0)")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")
    dtype = "bf16, fp16 or fp32 (default: fp32 on a CPU, else the file's)"
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), metavar="TYPE", help=dtype)


def main(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    add_arguments(parser)
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", metavar="TEXT", help="without this and --prompts: standard input, as FILE")
    file = "a prompt a line (.txt), or rows with prompt or messages (.jsonl, .csv, .parquet)"
    prompts.add_argument("--prompts", metavar="FILE", help=file)
    parser.add_argument("--samples", metavar="N", type=int, default=1, help="answers to each prompt (default: 1)")
    parser.add_argument("--raw", action="store_true", help="go on from texts as they are, without a chat template")
    parser.add_argument("--out", metavar="FILE.jsonl", type=Path, help="write prompts and answers there too")
    parser.add_argument("--batch-size", metavar="N", type=int, default=16, help="answers at a time (default: 16)")
    options = parser.parse_args(arguments)
    for name in ("samples", "batch_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: {getattr(options, name)} is not a positive integer")
    if options.prompt is None and options.prompts is None and sys.stdin.isatty():
        parser.error("give --prompt TEXT, --prompts FILE, or prompts on standard input")
    from tune.datasets.prompts import placed_rows

    is_given = options.prompt is not None
    generate(
        options, [("--prompt", {"prompt": options.prompt})] if is_given else placed_rows(options.prompts, "--prompts")
    )


def opened(options: Namespace, device: Any, tell: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The model, its tokenizer, and the settings of a sampler but for `max_new_tokens`."""
    from tune.peft import open_model, resolve_model

    model, tokenizer = open_model(options.model, adapters=options.adapter, device=device, dtype=options.dtype)
    given = {name: getattr(options, name) for name in SAMPLING}
    folders = tokenizer.path, resolve_model(options.model, options.adapter).base  # an adapter's may say nothing
    folder = next((each for each in folders if (each / "generation_config.json").exists()), tokenizer.path)
    settings, words = sampling_settings(folder, **given)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    tell(f"{options.model}: {dtype} on {device}; {words}, seed {options.seed}")
    return model, tokenizer, settings | {"seed": options.seed, "stop_ids": tokenizer.stop_ids}


def sampling_settings(folder: Path, **given: float | None) -> tuple[dict[str, Any], str]:
    """The sampler's settings: those `given`, and for the others what generation_config.json in the `folder` says, which
    is the most likely token where it does not say do_sample. Also in words."""
    from tune.tokenizers.folder import mapping_in

    file = mapping_in(folder / "generation_config.json")
    settings = {name: file.get(name) for name in SAMPLING} if file.get("do_sample") else {"temperature": 0.0}
    settings |= {name: value for name, value in given.items() if value is not None}
    settings = {name: value for name, value in settings.items() if value is not None and (name, value) != ("top_k", 0)}
    temperature = settings.setdefault("temperature", 1.0)
    shown = ", ".join(f"{name} {value:g}" for name, value in settings.items())
    ignored = [f"{name}={file[name]}" for name, off in NOT_APPLIED.items() if file.get(name, off) not in (off, None)]
    notes = "".join(f"; {each} of generation_config.json is not applied" for each in ignored)
    return settings, (shown if temperature else "the most likely token") + notes


def generate(options: Namespace, rows: list[tuple[str, Any]]) -> None:
    """Print and write the answers to all rows, in their order, some batches at a time."""
    from tune import distributed
    from tune.datasets.prompts import open_prompts
    from tune.generation import Sampler, answer

    if options.out and options.prompts and options.out.exists() and options.out.samefile(options.prompts):
        raise TuneError(f"--out {options.out} is the file of the prompts, which would be lost. Name another file")
    world = distributed.init(options.device)

    def tell(message: str) -> None:
        if world.is_main:
            print(message, file=sys.stderr, flush=True)

    model, tokenizer, settings = opened(options, world.device, tell)
    prompts = open_prompts(tokenizer, rows, system=options.system, raw=options.raw)
    longest = max(len(prompt.tokens) for prompt in prompts)
    room = max(1, min(MAX_NEW_TOKENS, (model.max_generated or sys.maxsize) - longest))
    count = room if options.max_new_tokens is None else options.max_new_tokens
    sampler = Sampler(max_new_tokens=count, max_rows=options.batch_size, **settings)
    sampler.check(model, [each.tokens for each in prompts], [each.index for each in prompts])  # before --out is emptied
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        file = options.out.open("w", encoding="utf-8") if options.out and world.is_main else nullcontext()
    except OSError as error:
        raise TuneError(f"--out {options.out} cannot be written: {error.strerror}") from error
    begin, tokens, wave = time.perf_counter(), 0, 4 * options.batch_size * world.size
    with file as out:
        for start in range(0, len(prompts), wave):
            some = {each.index: each for each in prompts[start : start + wave]}
            asked = {index: each.tokens for index, each in some.items()}
            found = answer(model, sampler, tokenizer, asked, world, options.samples)
            for index in some if world.is_main else ():
                for sample, completion in enumerate(found[index]):
                    tokens += len(completion.tokens)
                    print(completion.text, flush=True)
                    if out:
                        record = {
                            "index": index, "sample": sample,
                            **{name: value for name in ASKED if (value := some[index].row.get(name))},
                            "completion": completion.text, "finish": completion.finish,
                            "tokens": len(completion.tokens),
                        }  # fmt: skip
                        out.write(json.dumps(record, ensure_ascii=False) + "\n")
            rate = tokens / (time.perf_counter() - begin)
            done = min(start + wave, len(prompts))
            tell(f"{done:,} of {len(prompts):,} prompts, {tokens:,} tokens, {rate:.1f} tokens/s")
    world.finish()
