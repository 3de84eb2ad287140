"""Time tokenizing and labeling the conversations of a JSONL file: tune, TRL's SFTTrainer, and a bare loop.

    python benchmarks/prepare.py --model SmolLM2-135M-Instruct --data chats.jsonl [--workers 2 --rows 10000]

All use the same rows, template (with generation marks; labels are the assistant's) and number of processes. `bare` only
renders and tokenizes: no labels, no checks, nothing written. Each variant runs in a separate process, imports are not
counted, and rounds alternate. cpu sums the seconds of all processes, which is more reliable than wall time on a busy
machine. What is done again after a change, each with the cache of the first time:

- `cached`: tune, without a change
- `longer`, `trl_longer`: twice the length
- `appended`: tune, a hundred lines more at the end of the file
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{% generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}"
)


def tune(args, folder):
    from tune.datasets import load
    from tune.tokenizers import Tokenizer

    tokenizer = Tokenizer(str(folder))

    def run():
        data = load(
            tokenizer, args.data, max_seq_len=args.max_seq_len, workers=args.workers, cache_dir=str(folder / "cache")
        )
        return data.accounting.tokens

    return run


def trl(args, folder):
    import datasets
    import transformers
    import trl

    datasets.config.HF_DATASETS_CACHE = folder / "hf"
    datasets.disable_progress_bars()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(tokenizer), **shape))
    config = trl.SFTConfig(
        folder / "out", dataset_num_proc=args.workers, max_length=args.max_seq_len, assistant_only_loss=True,
        report_to="none", use_cpu=True, bf16=False,
    )  # fmt: skip
    seconds = []

    class Timed(trl.SFTTrainer):
        def _prepare_dataset(self, *arguments, **keywords):
            start = usage()
            data = super()._prepare_dataset(*arguments, **keywords)
            seconds.append([end - begin for begin, end in zip(start, usage(), strict=True)])
            return data

    def run():
        start = usage()
        rows = datasets.load_dataset("json", data_files=args.data, split="train", cache_dir=str(folder / "hf"))
        loading = [end - begin for begin, end in zip(start, usage(), strict=True)]
        data = Timed(model, config, train_dataset=rows, processing_class=tokenizer).train_dataset
        tokens = sum(len(ids) for ids in data["input_ids"])
        return tokens, [sum(both) for both in zip(loading, seconds[0], strict=True)]

    return run


def bare(args, folder):
    import jinja2
    import tokenizers

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    source = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    template = jinja2.Environment().from_string(source)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def share(index):
        tokens = 0
        with open(args.data, encoding="utf-8") as file:
            lines = islice(file, index, None, args.workers)
            while batch := list(islice(lines, 64)):
                texts = [template.render(messages=json.loads(line)["messages"]) for line in batch]
                tokens += sum(len(each.ids) for each in tokenizer.encode_batch(texts, add_special_tokens=False))
        return tokens

    global _share
    _share = share

    def run():
        with ProcessPoolExecutor(args.workers, get_context("fork")) as pool:
            return sum(pool.map(_call, range(args.workers)))

    return run


def _call(index):
    return _share(index)


VARIANTS = {
    "tune": tune, "cached": tune, "longer": tune, "appended": tune, "trl": trl, "trl_longer": trl, "bare": bare,
}  # fmt: skip
MORE = 100  # lines that are appended


def usage():
    """Return wall seconds and CPU seconds."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return [time.perf_counter(), sum(each.ru_utime + each.ru_stime for each in used)]


def measure(args, folder):
    """Return tokens, seconds, CPU seconds, and the peak GiB of the main process."""
    if args.variant.endswith("longer"):
        args.max_seq_len *= 2
    if args.variant == "appended":
        args.data = args.data.replace("rows.jsonl", "appended.jsonl")
    run = VARIANTS[args.variant](args, folder)
    start = usage()
    result = run()
    tokens, spent = result if args.variant.startswith("trl") else (result, None)
    spent = spent or [end - begin for begin, end in zip(start, usage(), strict=True)]
    return tokens, *spent, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with a tokenizer")
    parser.add_argument("--data", required=True, help="JSONL with messages")
    parser.add_argument("--rows", type=int, help="number of rows (default: all)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-seq-len", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    parser.add_argument("--variant", choices=VARIANTS, help="measure this one, in this process")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        print("result", *measure(args, args.folder))
        return
    results = {variant: [] for variant in args.only}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "rows.jsonl")
        with open(args.data, encoding="utf-8") as rows:
            lines = list(islice(rows, args.rows))
        data.write_text("".join(lines), encoding="utf-8")
        data.with_name("appended.jsonl").write_text("".join(lines + lines[:MORE]), encoding="utf-8")
        for number in range(args.rounds):
            place = Path(folder, str(number))
            place.mkdir()
            for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
                if Path(args.model, name).exists():
                    shutil.copyfile(Path(args.model, name), place / name)
            (place / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
            for variant, rounds in results.items():
                command = [sys.executable, *sys.argv, "--variant", variant, "--folder", place, "--data", data]
                run = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True)
                rounds.append([float(word) for word in run.stdout.rpartition("result ")[2].split()])
    for variant, rounds in results.items():
        tokens, seconds, cpu, peak = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(
            f"{variant:10} {seconds:7.2f} s   cpu {cpu:7.2f} s   {tokens / seconds:11,.0f} tokens/s   "
            f"{tokens / cpu:11,.0f} tokens/cpu s   peak {peak:.2f} GiB   {tokens:,.0f} tokens"
        )


if __name__ == "__main__":
    main()
