"""Call a recipe's `main(cfg)` with the settings of its command line, and print explanations instead of tracebacks."""

import errno
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tune.config.load import parse, read, read_file, require_none, settle
from tune.config.paths import find_default
from tune.errors import TuneError
from tune.lookup import in_shell, quiet_torchao
from tune.rules import Facts

PATIENCE = 10.0  # seconds
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_COMPILER = (
    "torch.compile found no C++ compiler, which compile=true and torchao's optimizers need. Install g++ (or set the "
    "environment variable CXX to a compiler), or set compile=false and use one of torch's optimizers"
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

# Settings that reduce memory, in the order to try: the advice, and the value that needs the least.
LOWER: dict[str, tuple[str, Any]] = {
    "micro_batch_size": ("lower micro_batch_size", 1),
    "max_seq_len": ("lower max_seq_len", 1),
    "memory.activation_checkpointing": ("set memory.activation_checkpointing=full", "full"),
    "memory.loss_chunk_tokens": ("lower memory.loss_chunk_tokens", 1),
}

Main = Callable[[DictConfig], None]


def entrypoint(default: str) -> Callable[[Main], Callable[..., None]]:
    """Make a recipe's `main(cfg)` callable without `cfg`; its settings then come from the command line.

    `default` names the YAML with all keys of the recipe: one of the library's configs, or a file next to the recipe.
    """

    def decorate(main: Main) -> Callable[..., None]:
        @functools.wraps(main)
        def run(cfg: DictConfig | None = None) -> None:
            if cfg is not None:
                cfg = cfg.copy()
                settle(_facts(cfg, main))
                return main(cfg)
            with explained_errors():
                cfg = _settings(main, default)
            if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set by `tune run` until here
                signal.signal(signal.SIGINT, signal.default_int_handler)
            with explained_errors(cfg), quiet_torchao():
                return main(cfg)

        run.settings_of_recipe = default  # type: ignore[attr-defined]  # how `tune` finds it in a module
        return run

    return decorate


@contextmanager
def explained_errors(cfg: DictConfig | None = None) -> Iterator[None]:
    """Print the error of a user, or advice on a full disk or memory, and exit. `--debug` shows the traceback.

    Without `cfg`, the settings are being read. Then all processes find the same error, and only
    the first one prints it.
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
        if rank != "0" or message in (LOST, LATE):
            _let_torchrun_end_this()
        if rank == "0":
            _print_error(message)
        elif cfg is not None:
            _print_error(f"[rank {rank}] {message.splitlines()[0]}")
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
    return Path(getattr(main, "__globals__", {}).get("__file__", ""))


def _rank() -> str:
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))


def _print_error(message: str) -> None:
    red, plain = ("\033[1;31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    sys.stderr.write(f"{red}error:{plain} {message}\n")  # one write, so that lines of several processes do not mix


def _let_torchrun_end_this() -> None:
    """Wait for torchrun to end this process, because another process has already reported the error."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        interrupt = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        if getattr(interrupt, "signalled", False):  # it was already asked to end, and has reported that
            raise SystemExit(1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(PATIENCE)


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
        return f"deterministic: {text.split()[0]} has no deterministic kernel on this device. Set deterministic=false"
    if "No working C++ compiler" in text or "Failed to find C compiler" in text:
        return NO_COMPILER
    if name == "OutOfMemoryError" or isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate" in text:
        settings = ((what, OmegaConf.select(cfg, key, default=least), least) for key, (what, least) in LOWER.items())
        advice = [f"{what} (now {'null' if now is None else now})" for what, now, least in settings if now != least]
        reason = (text or "no memory left").splitlines()[0].rpartition("DefaultCPUAllocator: ")[2]
        return "\n  ".join([f"out of memory: {reason}", *advice, "or use more devices"])
    return None
