"""Call a recipe's `main(cfg)` with the settings of its command line, and print explanations instead of tracebacks."""

import errno
import functools
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tune import rehearsal
from tune.config.less_memory import less_memory
from tune.config.load import parse, read, read_file, require_none, settle
from tune.config.paths import find_default
from tune.errors import TuneError
from tune.lookup import in_shell, quiet_torchao
from tune.rules import Facts
from tune.terminal import visible
from tune.types import as_given

PATIENCE = 10.0  # seconds
PLANNING = 60.0  # seconds
OF_LAUNCHERS = ("RANK", "WORLD_", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_COMPILER = (
    "torch.compile found no C++ compiler, which compute.compile=true and torchao's optimizers need. Install g++ (or "
    "set the environment variable CXX to a compiler), or set compute.compile=false and use one of torch's optimizers"
)
LOST = (
    "lost the connection to another process of this run: it exited or was killed (often out of memory). See the output "
    "of its node. The same command with this run's output_dir continues from the last checkpoint"
)
LATE = (
    "another process of this run did not answer within parallel.timeout: it was stopped, hangs or is very slow. "
    "stacks/ in the run folder shows where each process was. The same command with this output_dir continues from the "
    "last checkpoint"
)
APART = (
    "the processes of this run could not connect. Check that all nodes have started, that MASTER_ADDR is the first "
    "node, and that the other nodes can reach its MASTER_PORT:"
)
CUT_SHORT = (
    "torch's cache of compiled code has an incomplete file. Set the environment variable TORCHINDUCTOR_CACHE_DIR to "
    "an empty folder, or remove the file, and start again:"
)

Main = Callable[[DictConfig], None]


def entrypoint(default: str) -> Callable[[Main], Callable[..., None]]:
    """Make a recipe's `main(cfg)` callable without `cfg`; its settings then come from the command line.

    `default` names the YAML with all keys of the recipe: one of the library's configs, or a file next to the recipe.
    """

    def decorate(main: Main) -> Callable[..., None]:
        @functools.wraps(main)
        def run(cfg: DictConfig | None = None) -> None:
            if _globals(main).get("__name__") == rehearsal.MODULE:  # rules were applied to these settings already
                if cfg is None:
                    raise rehearsal.MainCalled
                return main(cfg)
            if cfg is not None:
                cfg = cfg.copy()
                settle(_facts(cfg, main))
                return main(cfg)
            with explained_errors():
                cfg = _settings(main, default)
            if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set by `tune run` until here
                signal.signal(signal.SIGINT, signal.default_int_handler)
            with explained_errors(cfg, _file(main)), quiet_torchao():
                return main(cfg)

        run.settings_of_recipe = default  # type: ignore[attr-defined]  # how `tune` finds it in a module
        return run

    return decorate


@contextmanager
def explained_errors(cfg: DictConfig | None = None, recipe: Path | None = None) -> Iterator[None]:
    """Print the error of a user, or advice on a full disk or memory, and exit. `--debug` shows the traceback.

    With `recipe`, advice on memory says what each setting saves. Without `cfg`, the settings are being read. Then all
    processes find the same error, and only the first one prints it.
    """
    rank, debug = _rank(), "--debug" in sys.argv[1:]
    try:
        yield
    except KeyboardInterrupt:
        if debug:
            raise
        if rank == "0":
            _print_error("interrupted")
        raise SystemExit(130) from None
    except Exception as error:
        message = _explanation(error, cfg or OmegaConf.create())
        if debug or message is None:
            raise
        is_planned = recipe is not None and _is_out_of_memory(error)
        if rank != "0" or message in (LOST, LATE):
            _let_torchrun_end_this(PATIENCE)
        if rank == "0":
            _print_error(message)
            if recipe is not None and is_planned:
                _print_savings(recipe)
        elif cfg is not None:
            _print_error(f"[rank {rank}] {message.splitlines()[0]}")
            if is_planned:  # this exit would end the first process, which may still compute what other settings save
                _let_torchrun_end_this(PLANNING)
        raise SystemExit(1 if message in (LOST, LATE) else 2) from None


def _settings(main: Main, default: str) -> DictConfig:
    """Return the settings of the command line: loaded, merged, checked and changed by rules."""
    file = find_default(_file(main), default)
    if parse(sys.argv[1:]).help:
        if _rank() == "0":
            print(main.__globals__["__doc__"] or "", file.read_text(encoding="utf-8"), sep="\n")
        raise SystemExit(0)
    cfg, problems = read(str(file), sys.argv[1:], recipe=_file(main))
    try:
        facts = _facts(cfg, main, read_file(file))
    except TuneError as error:  # an unknown device is listed with the other problems, if any
        require_none([*problems, f"{error}."] if problems else [])
        raise
    settle(facts, problems)
    return cfg


def _facts(cfg: DictConfig, main: Main, defaults: Mapping[str, Any] = MappingProxyType({})) -> Facts:
    """Return the facts for the rules about a run that starts now."""
    if "torch" not in sys.modules:  # no training follows, and importing torch takes seconds
        return Facts(cfg, defaults=defaults)
    from tune import processor

    kind = processor.device_type(cfg.get("device", "auto"))
    return Facts(
        cfg, kind, processor.count_processes(), processor.capability(kind), recipe=_file(main), defaults=defaults
    )  # fmt: skip


def _file(main: Main) -> Path:
    return Path(_globals(main).get("__file__", ""))


def _globals(main: Main) -> dict[str, Any]:
    """Return the names of the recipe's module, also if `main` has decorators of another one."""
    return getattr(inspect.unwrap(main), "__globals__", {})


def _rank() -> str:
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))


def _print_error(message: str) -> None:
    red, plain = ("\033[1;31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    sys.stderr.write(
        f"{red}error:{plain} {visible(message)}\n"
    )  # one write, so that lines of several processes do not mix


def _let_torchrun_end_this(patience: float) -> None:
    """Wait for torchrun to end this process, because another process has already reported the error."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        interrupt = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        if getattr(interrupt, "signalled", False):  # it was already asked to end, and has reported that
            raise SystemExit(1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(patience)


def _explanation(error: Exception, cfg: DictConfig) -> str | None:
    """Return the text to print instead of a traceback, or None to show the traceback."""
    # torch's errors are matched by name, because importing torch takes seconds.
    name, text = type(error).__name__, str(error)
    if isinstance(error, TuneError):
        return text
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        folder = in_shell(cfg.get("output_dir") or "THE_FOLDER_OF_THIS_RUN")
        full = f"the disk is full ({error.strerror})"
        return f"{full}. Free some space and run the same command with output_dir={folder} to continue"
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{error.filename}: {error.strerror}. Use another name"
    if name in ("DistBackendError", "DistNetworkError", "DistStoreError") or "gloo/transport" in text:
        if "trying to connect" in text or "waiting for clients" in text:
            return f"{APART} {text.splitlines()[0]}"
        return LATE if "timed out" in text.lower() or "operation timeout" in text else LOST
    if "torchinductor" in text and "file too short" in text:
        return f"{CUT_SHORT} {text}"
    if "does not have a deterministic implementation" in text:
        return f"parallel.deterministic: {text.split()[0]} has no deterministic kernel on this device. Set it to false"
    if "No working C++ compiler" in text or "Failed to find C compiler" in text:
        return NO_COMPILER
    if _is_out_of_memory(error):
        reason = (text or "no memory left").splitlines()[0].rpartition("DefaultCPUAllocator: ")[2]
        has_gpu = "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()
        changes = [f"{key}={as_given(value)}" for key, value in less_memory(cfg, has_gpu)]
        return f"out of memory: {reason}\n  try {', '.join([*changes, 'or more devices'])}"
    return None


def _is_out_of_memory(error: Exception) -> bool:
    return (
        type(error).__name__ == "OutOfMemoryError"
        or isinstance(error, MemoryError)
        or "DefaultCPUAllocator: can't allocate" in str(error)
    )


def _print_savings(recipe: Path) -> None:
    """Print the GiB that other settings save, as `tune plan` computes them for this command and this device.

    The plan runs in a process of its own, because in this one the memory is full, and collectives may hang. Nothing is
    printed if it fails.
    """
    import torch

    from tune import processor

    here = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")
    outside = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
    with TemporaryDirectory() as folder, suppress(TuneError, OSError, ValueError, subprocess.SubprocessError):
        device = Path(folder) / "device.json"
        device.write_text(json.dumps(asdict(processor.described(here))), encoding="utf-8")
        options = [
            "--world-size",
            os.environ.get("WORLD_SIZE", "1"),
            "--device",
            str(device),
            "--less-memory",
            "--json",
        ]
        command = [sys.executable, "-m", "tune.cli", "plan", str(recipe), *sys.argv[1:], *options]
        done = subprocess.run(command, env=outside, capture_output=True, text=True, timeout=PLANNING, check=True)
        plan = json.loads(done.stdout)
        sizes = [f"{change}: {size:,.2f} GiB" for change, size in plan["less_memory_gib"].items()]
        needs = f"  tune plan computes {plan['memory_gib']['total']:,.2f} GiB for this command, and with"
        sys.stderr.write("\n    ".join([needs, *sizes]) + "\n" if sizes else "")
