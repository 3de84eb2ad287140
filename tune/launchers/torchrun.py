"""torchrun: several processes on this node, or on several nodes with `--nnodes`. Options are torchrun's own."""

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tune.errors import TuneError
from tune.lookup import in_shell

# Seconds from SIGTERM until processes are killed: a step and a checkpoint take longer than torchrun's default, 30.
SHUTDOWN_SECONDS = "600"


def launch(options: Sequence[str], recipe: Path, settings: Sequence[str], folder: Path) -> None:
    """Run the recipe under torchrun's agent in this process."""
    import torch
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Each process has already printed its error; the agent's report would only hide it.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS)
    try:
        chosen = torchrun.parse_args([*options, str(recipe), *settings])
        if (count := chosen.nproc_per_node) == "0" or count.startswith("-"):
            raise TuneError(f"torchrun: --nproc-per-node {count} starts no process. Use 1 or more, or auto")
        if count.isdecimal():  # divide torch's threads; torchrun would give each process only one
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // int(count))))
        if chosen.master_port == 0:
            raise TuneError("torchrun: --master-port must not be 0. Leave it out: a free port is chosen")
        if ":" in chosen.nnodes:  # elastic
            # An agent that shares its store (torch 2.13) announces its address only once, so agents that join later
            # fail.
            os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        if chosen.rdzv_backend == "static" and int(chosen.node_rank) > 0:
            wait_for_first_node(chosen.master_addr, chosen.master_port)
            # torch waits for an answer without running Python's handlers. The agent sets its own when nodes have met.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        torchrun.run(chosen)
    except torch.distributed.DistError as error:
        reason = str(error).splitlines()[0]
        if "EADDRINUSE" in reason:
            raise TuneError(
                f"torchrun: port {chosen.master_port or 29500} is in use on this machine, perhaps by another run. Use "
                f"another one with --master-port, the same on all nodes, or leave it out on a single node: {reason}"
            ) from error
        raise TuneError(f"torchrun: the nodes could not connect: {reason}") from error
    except ValueError as error:  # an invalid option
        raise TuneError(f"torchrun: {error}") from error
    except SignalException:  # passed on to the processes, which have saved a checkpoint
        sys.exit(130)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            sys.exit(failure.exitcode)
        raise TuneError(
            f"process {rank} was killed by signal {-failure.exitcode}; if nobody killed it, the machine probably ran "
            f"out of memory. The same command with output_dir={in_shell(folder)} continues after the last checkpoint."
        ) from error


def wait_for_first_node(address: str, port: int | None, patience: float = 900.0) -> None:
    """Wait until the first node listens. torch would wait too, but could not be interrupted.

    Raises TuneError after `patience` seconds.
    """
    place, start, is_told = (address, port or 29500), time.monotonic(), False
    while True:
        try:
            return socket.create_connection(place, timeout=5).close()
        except OSError as error:
            reason, waited = error.strerror or str(error), time.monotonic() - start
        where = f"the first node ({place[0]}, port {place[1]}): {reason}"
        if waited > patience:
            raise TuneError(
                f"torchrun: could not reach {where}. Start it, and check --master-addr, --master-port and firewalls"
            )
        if waited > 5 and not is_told:
            print(
                f"waiting for {where}. This ends after {patience / 60:.0f} minutes. Start the first node, or check "
                "--master-addr, --master-port and firewalls",
                file=sys.stderr,
                flush=True,
            )
            is_told = True
        time.sleep(min(1.0, patience))
