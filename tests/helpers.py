"""Helpers for many tests: a tiny, realistic checkpoint folder, and processes that form a group."""

import atexit
import contextlib
import functools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from multiprocessing import connection
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Seconds after which a process started by a test counts as hanging; before that, the machine may just be busy.
HANGS = 1200
# The checker that rejects a row in a table of errors. A run rejects it before it starts. `tune validate` rehearses a
# whole run first and takes a second: tests/recipes/test_validate.py has a quick error of each kind.
REFUSED_BY = ("by", ["run", pytest.param("validate", marks=pytest.mark.weekly)])
WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "under",
    "mat",
    "rug",
    "and",
    "then",
    "it",
    "was",
    "very",
    "big",
    "small",
    "red",
    "blue",
    "green",
    "quick",
    "slow",
]


# Raise it with each change that is more than a mend: the slow tier then runs other weekly tests.
DRAW = int(Path(__file__).with_name("draw.txt").read_text())
OF_SPEED = re.compile(r"_seconds$|_per_second$|^mfu$|_gib$|^slowest_")  # metrics that depend on the machine
DRAWN_OF = 40  # weekly tests, of which one is drawn


def is_drawn(test: str) -> bool:
    """Return whether the slow tier runs a weekly test, too. `test` is its name and parameters."""
    return drawn_number(test) % DRAWN_OF == 0


def drawn_number(test: str) -> int:
    """A number of a test that another number in tests/draw.txt changes."""
    return crc32(f"{DRAW} {test}".encode())


def slow_but(fast: Iterable, cases: Iterable, mark: pytest.MarkDecorator = pytest.mark.slow) -> list:
    """Return the cases as test parameters. Cases outside `fast` get the mark: they repeat what `fast` covers."""
    parameters = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        parameters.append(pytest.param(*values, marks=() if case in fast else mark))
    return parameters


def weekly_but(fast: Iterable, cases: Iterable) -> list:
    """As `slow_but`, for the weekly tier."""
    return slow_but(fast, cases, pytest.mark.weekly)


def curve_steps(usual: int = 3) -> int:
    """Return the number of steps whose losses a layout test compares: CURVE_STEPS from the environment, or `usual`.
    Step 3 is the first that depends on optimizer states of an earlier step."""
    return int(os.environ.get("CURVE_STEPS", usual))


def seed_of_run() -> int:
    """Return the seed of random draws: that of draw.txt, or TUNE_TEST_SEED from the environment (a number, or `random`
    for a new one). pytest shows it when the test fails."""
    given = os.environ.get("TUNE_TEST_SEED", str(DRAW))
    seed = random.SystemRandom().randrange(10**6) if given == "random" else int(given)
    print(f"TUNE_TEST_SEED={seed}")
    return seed


def of_training(metrics: Mapping[str, float]) -> set[str]:
    """Return the names of a step's `metrics` without those that depend on the speed of the processes."""
    return {name for name in metrics if not name.startswith("slowest_")}


def results_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return a step's `metrics` without those of speed and memory: all that a layout must not change."""
    return {name: value for name, value in metrics.items() if not OF_SPEED.search(name)}


def figures_of(run: Path) -> dict[str, float]:
    """Return the results of each step of a run by step and name, for a comparison of layouts. Each logged metric is
    in it: one that is not compared is wrong in some layout sooner or later."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {f"step {line['step']}: {name}": value for line in lines for name, value in results_of(line).items()}


def save_checkpoint(folder: Path, config_class: str = "LlamaConfig", **changes) -> Path:
    """Save a random transformers model with weights of usual magnitude and a byte-level BPE tokenizer with ChatML."""
    import transformers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", bos_token="<|endoftext|>"
    )
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    shape = {
        "vocab_size": len(fast),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.05,
        "eos_token_id": fast.eos_token_id,
        "bos_token_id": fast.bos_token_id,
    }
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**shape | changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # biases start at zero, which hides errors
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


def make_adapter(base: Path, folder: Path, seed: int, **settings) -> Path:
    """Save a random adapter in PEFT's layout, with settings of `LoRA`."""
    from tune import distributed
    from tune.checkpointers import load_model
    from tune.peft import LoRA, add_adapters, export_adapter
    from tune.tokenizers import Tokenizer as Ours

    model, lora = load_model(str(base)), LoRA(rank=4, alpha=8, **settings)
    add_adapters(model, lora)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    export_adapter(model, folder, world=distributed.init("cpu"), base=str(base), tokenizer=Ours(str(base)))
    return folder


def free_port() -> int:
    """Return a port below the ephemeral range: the system may assign an ephemeral port before it is used."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@functools.cache
def forking(number: int) -> subprocess.Popen:
    """Start a process whose forks run scripts (see fork_server.py). There are two, for even and odd ranks, because the
    order of sets differs between processes."""
    command = [sys.executable, str(Path(__file__).with_name("fork_server.py"))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    atexit.register(process.wait)
    atexit.register(process.kill)  # before
    return process


def start_script(script: Path, arguments: Sequence[str], output: Path, **variables: object) -> subprocess.Popen:
    """Run `script` in a fork with `variables`, including RANK, in its environment; return the forking process."""
    env = os.environ | {name: str(value) for name, value in variables.items()}
    job = {"script": str(script), "arguments": arguments, "output": str(output), "env": env, "cwd": os.getcwd()}
    process = forking(int(env["RANK"]) % 2)
    process.stdin.write(json.dumps(job).encode() + b"\n")
    process.stdin.flush()
    return process


def exit_codes(processes: Iterable[subprocess.Popen], count: int) -> dict[int, int]:
    """Return the exit codes of `count` scripts by rank. After a script fails, others may keep waiting for it."""
    codes: dict[int, int] = {}
    while len(codes) < count and not any(codes.values()):
        ready = connection.wait([process.stdout for process in processes], HANGS)
        assert ready, f"{count - len(codes)} of {count} processes hang"
        for stream in ready:
            text = stream.read1()
            assert text, "the process that forks has ended"
            codes |= {int(rank): int(code) for rank, code in map(bytes.split, text.splitlines())}
    return codes


def run_processes(script: Path, count: int, *arguments: str) -> str:
    """Run `script` in `count` processes that connect as under torchrun; return rank 0's output."""
    place = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": 1}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(rank)) for rank in range(count)]
        processes = {
            start_script(script, arguments, output, RANK=rank, LOCAL_RANK=rank, **place)
            for rank, output in enumerate(outputs)
        }
        codes: dict[int, int] = {}
        try:
            codes = exit_codes(processes, count)
        finally:
            if len(codes) < count:
                for process in processes:
                    os.killpg(process.pid, signal.SIGKILL)
                forking.cache_clear()
        texts = [output.read_text() for output in outputs]
    assert not any(codes.values()), "\n".join(texts[rank][-3000:] for rank in codes if codes[rank])
    return texts[0]


def as_in_transformers(version: str) -> pytest.MarkDecorator:
    """Skip a comparison with transformers before this version, which computes something else."""
    found = Version(metadata.version("transformers"))
    return pytest.mark.skipif(found < Version(version), reason=f"transformers {found} computes something else")


def result_of(output: str) -> Any:
    """Return the last line of JSON in the output of a process. At its exit, Triton may print what leaked."""
    return json.loads(next(line for line in reversed(output.splitlines()) if line[:1] in ("{", "[")))


def run_verbs(*command_lines: list[str]) -> list[subprocess.CompletedProcess[str]]:
    """Run `tune` with each command line in order, in a separate process."""
    output = run_processes(Path(__file__).with_name("run_command_lines.py"), 1, json.dumps(command_lines))
    return [subprocess.CompletedProcess(*done) for done in result_of(output)]
