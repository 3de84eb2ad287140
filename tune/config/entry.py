"""From a recipe's command line to its `main(cfg)`, with mistakes explained instead of traced back."""

import errno
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tune.config.load import load, parse
from tune.config.paths import find_default
from tune.errors import TuneError

PATIENCE = 10.0  # seconds
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

NO_COMPILER = (
    "torch.compile found no C++ compiler, which compile=true and torchao's optimizers need: install g++ (or name one "
    "in the environment variable CXX), or set compile=false and one of torch's optimizers"
)

LOST = (
    "the connection to another process of this run is lost: it has ended or was killed, often for want of memory. What "
    "its node prints says more. The same command with this run's output_dir continues after the last checkpoint"
)

Main = Callable[[DictConfig], None]

# What needs less memory, in the order to try, and where no less is possible.
LOWER: dict[str, tuple[str, Any]] = {
    "micro_batch_size": ("lower micro_batch_size", 1),
    "max_seq_len": ("lower max_seq_len", 1),
    "memory.activation_checkpointing": ("set memory.activation_checkpointing=full", "full"),
    "memory.loss_chunk_tokens": ("lower memory.loss_chunk_tokens", 1),
}


def entrypoint(default: str) -> Callable[[Main], Callable[..., None]]:
    """Make a recipe's `main(cfg)` callable without `cfg`: its settings then come from the command line.

    `default` names the YAML with every key of the recipe: one of the library's configs, or a file next to the recipe.
    """

    def decorate(main: Main) -> Callable[..., None]:
        @functools.wraps(main)
        def run(cfg: DictConfig | None = None) -> None:
            if cfg is not None:
                return main(cfg)
            with explained_errors():
                cfg = _settings(main.__globals__, default)
            with explained_errors(cfg):
                return main(cfg)

        return run

    return decorate


@contextmanager
def explained_errors(cfg: DictConfig | None = None) -> Iterator[None]:
    """Print a user's mistake, or what to do about a full disk or memory, and exit; `--debug` shows the traceback.

    Without `cfg` it is the settings that are read: every process finds the same, and only the first one tells.
    """
    debug = "--debug" in sys.argv[1:]
    try:
        yield
    except KeyboardInterrupt:
        if debug:
            raise
        if _is_first_process():
            _tell("interrupted")
        raise SystemExit(130) from None
    except TuneError as error:
        if debug:
            raise
        if cfg is not None or _is_first_process():
            _tell(str(error))
        else:
            _let_torchrun_end_this()
        raise SystemExit(2) from None
    except OSError as error:
        if debug or error.errno not in NO_ROOM:
            raise
        _tell(
            f"the disk is full ({error.strerror}): make room and run the same command with "
            f"output_dir={(cfg and cfg.get('output_dir')) or '<the folder of this run>'}, it continues where it can"
        )
        raise SystemExit(2) from None
    except (RuntimeError, MemoryError) as error:
        if not debug and _is_of_a_lost_process(error):
            _let_torchrun_end_this()
            if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
                _tell(LOST)  # else torchrun, which started the lost one too, tells of it
            raise SystemExit(1) from None
        if debug or not (_is_out_of_memory(error) or _is_without_compiler(error)):
            raise
        _tell(NO_COMPILER if _is_without_compiler(error) else _out_of_memory(error, cfg or OmegaConf.create()))
        raise SystemExit(2) from None


def _settings(recipe: dict[str, Any], default: str) -> DictConfig:
    file = find_default(Path(recipe.get("__file__", "")), default)
    if parse(sys.argv[1:]).help:
        if _is_first_process():
            print(recipe["__doc__"] or "", file.read_text(encoding="utf-8"), sep="\n")
        raise SystemExit(0)
    return load(str(file), sys.argv[1:])


def _rank() -> str:
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))


def _is_first_process() -> bool:
    return _rank() == "0"


def _tell(message: str) -> None:
    """One message on stderr; of a process other than the first, one line that says whose it is."""
    if not _is_first_process():
        _let_torchrun_end_this()
        message = f"[rank {_rank()}] {message.splitlines()[0]}"
    red, plain = ("\033[1;31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    print(f"{red}error:{plain} {message}", file=sys.stderr, flush=True)


def _let_torchrun_end_this() -> None:
    """Where one process has told what is wrong, the others have nothing to add: torchrun ends them once it has left."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(PATIENCE)


def _is_of_a_lost_process(error: Exception) -> bool:
    names = ("DistBackendError", "DistNetworkError", "DistStoreError")
    return type(error).__name__ in names or "gloo/transport" in str(error)


def _is_out_of_memory(error: Exception) -> bool:
    by_name = type(error).__name__ == "OutOfMemoryError"  # torch's own, without importing torch
    return by_name or isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def _is_without_compiler(error: Exception) -> bool:
    return "No working C++ compiler" in str(error) or "Failed to find C compiler" in str(error)


def _out_of_memory(error: Exception, cfg: DictConfig) -> str:
    settings = ((what, OmegaConf.select(cfg, key, default=least), least) for key, (what, least) in LOWER.items())
    advice = [f"{what} (now {'null' if now is None else now})" for what, now, least in settings if now != least]
    reason = (str(error).splitlines() or ["no memory left"])[0].rpartition("DefaultCPUAllocator: ")[2]
    return "\n  ".join([f"out of memory: {reason}", *advice, "or use more devices"])
