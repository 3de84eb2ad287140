"""Follow a page of the documentation block by block in a folder with tiny stand-ins.

A block is a file if its first line names one, a change if it is a diff with a header, a script if it begins with an
import, and commands if it has no language and begins with a command.
"""

import argparse
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Container, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from itertools import count
from pathlib import Path

import pytest
import torch
import yaml
from helpers import result_of, run_processes, save_checkpoint
from packaging.requirements import Requirement

from tune import checkpointers, cli, config
from tune.cli.recipes import default_config, recipe_of, split
from tune.models import families
from tune.rules import Facts, judge

ROOT = Path(__file__).parents[1]
VALIDATED = Path(__file__).with_name("validate_command_lines.py")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(tune|torchrun|python|pip|make|git|pytest|cat|echo|srun|sbatch|\.) ")
FILE = re.compile(r'(?:"""|# )([\w/]+\.\w+)\b')
SCRIPT = re.compile(r"(import|from) ")
ON_EIGHT: set[tuple[str, ...]] = set()  # recipes and setting names already validated for eight processes
TINY = {
    "model.path": "SmolLM2-135M-Instruct", "dataset.path": "chats.jsonl", "device": "cpu", "compute.dtype": "fp32",
    "max_seq_len": "256", "max_steps": "1", "global_batch_size": "8",
}  # fmt: skip
EIGHT = {"max_seq_len": 256, "global_batch_size": 64}  # rows for eight processes
# A tiny model never answers with a JSON object, and a run ends with an error when all rewards are 0.
REWARD = """

def fraction_right(row, completion):
    return len(set(completion)) / 100
"""
NIMBUS = {
    "model_type": "nimbus", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def commands(text: str) -> Iterator[str]:
    """Yield the lines that a reader types: lines of blocks without a language that begin with a program."""
    for language, block in BLOCK.findall(text):
        if not language:
            yield from filter(COMMAND.match, block.splitlines())


def change(diff: str, folder: Path) -> None:
    """Apply a diff without line numbers to its file in `folder`: the lines of a hunk must occur exactly once."""
    header, *hunks = re.split(r"^@@\n", diff, flags=re.MULTILINE)
    file = folder / header.split("+++ ")[1].strip()
    text = file.read_text()
    for hunk in hunks:
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(before) == 1, f"{file.name} has {text.count(before)} times:\n{before}"
        text = text.replace(before, after)
    file.write_text(text)


class Reader:
    """Follows pages in `folder`, using the tiny `checkpoint` and `chats` for all models and data they name."""

    def __init__(self, folder: Path, checkpoint: Path, chats: Path):
        self.folder, self.checkpoint = folder, checkpoint
        self.namespace: dict[str, object] = {}
        self.numbers = count(1)
        self.on_eight: list[list[str]] = []  # command lines validated for eight processes at the end of a page
        for name in ("recipes", "configs", "benchmarks"):
            (folder / name).symlink_to(ROOT / name)
        shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        with (folder / "examples/reinforcement/rewards.py").open("a", encoding="utf-8") as file:
            file.write(REWARD)
        shutil.copytree(checkpoint, folder / "TEACHER")  # a teacher equal to the student would cause a warning
        for model in ("SmolLM2-135M-Instruct", "Qwen3-0.6B", "BASE", ".demo/smollm2-135m", "output_dir/model"):
            (folder / model).parent.mkdir(exist_ok=True)
            (folder / model).symlink_to(checkpoint)
        (folder / "chats.jsonl").symlink_to(chats)
        pairs = [{"instruction": f"{number}?", "chosen": f"{number}.", "rejected": "None."} for number in range(8)]
        (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        (folder / "my_data.py").write_text("from tune.datasets import load\n")

    def follow(self, text: str, skipped: Container[str] = ()) -> None:
        """Follow all blocks of `text` except the `skipped` commands."""
        with self.at_work():
            for language, block in BLOCK.findall(text):
                if language == "diff" and block.startswith("--- "):
                    change(block, self.folder)
                elif language and (named := FILE.match(block)):
                    (self.folder / named[1]).write_text(block)
                elif language == "python" and SCRIPT.match(block):
                    exec(compile(block, "<the page>", "exec"), self.namespace)
                for line in commands(f"```{language}\n{block}```"):
                    if line not in skipped:
                        self.run(line)
            if self.on_eight:
                found = result_of(run_processes(VALIDATED, 1, "8", json.dumps(self.on_eight)))
                assert not [each for each in zip(self.on_eight, found, strict=True) if each[1]]
            self.on_eight.clear()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Work in the folder and reset state as a new process would. torchrun starts one process: this one."""
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            patch.setattr(sys, "path", [str(self.folder), *sys.path])
            patch.setenv("PYTHONPATH", str(self.folder), prepend=os.pathsep)
            patch.setattr(sys, "argv", sys.argv)
            patch.setattr(families, "FAMILIES", dict(families.FAMILIES))
            patch.setattr(
                "torch.distributed.run.run", lambda options: self.script(options.training_script_args, options)
            )
            patch.setattr("tune.launchers.torchrun.wait_for_first_node", lambda address, port: None)
            try:
                yield
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)

    def run(self, line: str) -> None:
        program, *arguments = shlex.split(line, comments=True)
        print(f"$ {line}", file=sys.stderr)
        try:
            getattr(self, {".": "source"}.get(program, program))(arguments, line)
        except SystemExit as end:
            assert end.code in (0, None), f"`{line}` ended with {end.code}"

    def tune(self, arguments: list[str], line: str) -> None:
        verb = arguments[0]
        if " [" in line:
            self.compare_usage(verb, line)
            return
        if verb in ("run", "validate", "preview", "prepare"):
            arguments = [verb, *self.completed(arguments[1:], is_run=verb == "run")]
        if verb == "run" and "--help" not in arguments:
            _, recipe, settings = split(arguments[1:])
            self.validate(str(recipe), settings)
        if verb == "eval":
            for argument in arguments:
                self.stand_in(argument.removeprefix("./"))
            arguments = [*arguments, "device=cpu"]
        (self.folder / "questions.txt").write_text("the cat\n")
        shutil.rmtree(self.folder / "OUT", ignore_errors=True)  # each example starts without it
        if "ADAPTER" in arguments:
            shutil.copytree(self.trained_adapter(), self.folder / "ADAPTER", dirs_exist_ok=True)
        cli.main(arguments)

    def torchrun(self, arguments: list[str], line: str) -> None:
        from torch.distributed.run import main

        if measured := [at for at, each in enumerate(arguments) if each.startswith("benchmarks/")]:
            self.read_arguments(arguments[measured[0] :])
        else:
            main(self.completed(arguments))

    def python(self, arguments: list[str], line: str) -> None:
        if arguments[0].startswith("benchmarks/"):  # they measure for minutes, so only their arguments are parsed
            self.read_arguments(arguments)
        elif arguments[0].startswith("examples/"):
            self.script(arguments[1:], argparse.Namespace(training_script=arguments[0]))
        else:
            settings = self.completed(arguments)[1:]
            self.validate(arguments[0], settings)
            self.script(settings, argparse.Namespace(training_script=arguments[0]))

    def validate(self, recipe: str, settings: list[str]) -> None:
        """Require that no rule reports a documented run. It has one process; the first run of each recipe on a page is
        validated for eight, unless another page has one with the same settings."""
        if default_config(Path(recipe)) is None:
            return
        settings = [*settings, "compute.master_dtype=fp32"]  # compute.dtype is the one of `TINY`
        cfg, problems = config.read(*recipe_of(recipe, settings))
        assert not problems and not judge(Facts(cfg)), recipe
        more = [f"{key}={value}" for key, value in EIGHT.items() if any(each.startswith(key) for each in settings)]
        kind = Path(recipe).stem, *sorted(each.partition("=")[0] for each in settings)
        is_first = Path(recipe).stem not in [Path(each).stem for each, *_ in self.on_eight]
        if is_first and kind not in ON_EIGHT:
            ON_EIGHT.add(kind)
            self.on_eight.append([recipe, *settings, *more, f"output_dir=eight/{len(self.on_eight)}"])

    def script(self, arguments: list[str], options: argparse.Namespace) -> None:
        sys.argv = [options.training_script, *arguments]
        runpy.run_path(options.training_script, run_name="__main__")

    def read_arguments(self, arguments: list[str]) -> None:
        class Read(Exception): ...

        parse = argparse.ArgumentParser.parse_args

        def parse_only(parser: argparse.ArgumentParser) -> None:
            parse(parser)
            raise Read

        sys.argv = arguments
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Read):
            patch.syspath_prepend(
                str(ROOT / "benchmarks")
            )  # a relative path would keep pointing to the first page's folder
            patch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
            runpy.run_path(arguments[0], run_name="__main__")

    def make(self, arguments: list[str], line: str) -> None:
        subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, capture_output=True)

    def pip(self, arguments: list[str], line: str) -> None:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert arguments[0] == "install"
        for argument in [argument for argument in arguments[1:] if argument != "--editable"]:
            wanted = Requirement(argument.replace(".", "tune-recipes") if argument.startswith(".") else argument)
            assert wanted.name != "tune-recipes" or wanted.extras <= extras.keys(), line

    def echo(self, arguments: list[str], line: str) -> None:
        subprocess.run(line, shell=True, check=True, cwd=self.folder)

    def cat(self, arguments: list[str], line: str) -> None:
        self.stand_in(arguments[0].partition("/")[0])
        self.echo(arguments, line)

    def completed(self, arguments: list[str], is_run: bool = True) -> list[str]:
        """Return a tiny run: values for `...`, and settings that the command leaves open."""
        given = dict(argument.split("=", 1) for argument in arguments if "=" in argument and argument[0] != "-")
        if "--config" in arguments and (file := self.folder / arguments[arguments.index("--config") + 1]).is_file():
            data = (yaml.safe_load(file.read_text()).get("dataset") or {}).get("path", "")
            given |= {"dataset.path": data} if (self.folder / data).is_file() else {}
        tiny = TINY | ({"output_dir": f"runs/{next(self.numbers)}"} if is_run else {})
        if {"grpo", "ppo_finetune"} & {*arguments}:
            tiny = {key: value for key, value in tiny.items() if key not in ("max_seq_len", "global_batch_size")}
        if "teacher.path" in given:
            tiny["teacher.path"] = "TEACHER"
        for argument in (*arguments, given.get("model.path", "")):
            self.stand_in(argument.removeprefix("./"))
        scripts = [Path(argument) for argument in arguments if argument.endswith(".py")]
        if any(default_config(script) is None for script in scripts):  # it has no settings
            return arguments
        one_process = [re.sub(r"^(parallel\.(tp|ep|cp|pp))=\d+$", r"\1=1", argument) for argument in arguments]
        kept = [argument for argument in one_process if "..." not in argument]
        return [*kept, *(f"{key}={value}" for key, value in tiny.items() if given.get(key, "...") == "...")]

    def stand_in(self, name: str) -> None:
        """Create a stand-in for a file or model that a command names and that is missing."""
        path = self.folder / name
        if path.exists():
            return
        match name:
            case "mine.py":
                shutil.copyfile(config.find_recipe("full_finetune"), path)
            case "held_out.jsonl":
                path.symlink_to(self.folder / "chats.jsonl")
            case "runs/mine":
                path.parent.mkdir(exist_ok=True)
                path.symlink_to(self.checkpoint)
            case "pythia-160m":
                save_checkpoint(path, "GPTNeoXConfig")
            case "mamba-130m-hf":
                save_checkpoint(path, "MambaConfig")
            case "Nimbus-1B":
                self.save_nimbus(path)

    def save_nimbus(self, path: Path) -> None:
        """Save random weights of the page's own family."""
        from my_family import build

        shutil.copytree(self.checkpoint, path, ignore=shutil.ignore_patterns("*.safetensors"))
        (path / "config.json").write_text(json.dumps(NIMBUS))
        with torch.device("meta"):
            model = build(str(path))
        model.to_empty(device="cpu")
        checkpointers.Random(0).load(model)
        checkpointers.export(model, None, path.with_name("random"), source=path)
        shutil.copytree(path.with_name("random"), path, dirs_exist_ok=True)

    def trained_adapter(self) -> Path:
        run = self.folder / "runs" / "adapter"
        cli.main(["run", "lora_finetune", *self.completed([f"output_dir={run}", "model.path=BASE"])])
        return run / "adapter"

    def compare_usage(self, verb: str, line: str) -> None:
        """Require that a line with [options] matches `--help`."""
        with redirect_stdout(StringIO()) as shown, suppress(SystemExit):
            cli.main([verb, "--help"])
        assert line in " ".join(shown.getvalue().split())
