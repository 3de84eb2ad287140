"""Handle launchers that restart processes after a failure or are killed themselves."""

import ctypes
import os
import signal
import sys
import time
import uuid
from datetime import timedelta

import torch.distributed as dist


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Request this signal for when the parent process is killed; otherwise nothing would stop this one. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(number))  # PR_SET_PDEATHSIG


def launcher_store(timeout: timedelta) -> dist.Store | None:
    """Return torchrun's store if torchrun may restart processes (the store outlives them), else None."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or os.environ["TORCHELASTIC_MAX_RESTARTS"] == "0":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timeout)


def of_this_start(store: dist.Store, rank: int, size: int) -> dist.Store:
    """Return a store with a prefix that only the processes of this start share.

    torch (2.13) may read addresses of the previous start before they are replaced. So rank 0 draws a random prefix and
    answers a question of each other rank; the questions have random keys too.
    """
    if rank:
        question = uuid.uuid4().hex
        store.set(f"tune/asks/{rank}", question)
        name = store.get(f"tune/answers/{question}").decode()
        store.add(f"tune/heard/{name}", 1)
        return dist.PrefixStore(name, store)
    name, answered = uuid.uuid4().hex, set()
    while store.add(f"tune/heard/{name}", 0) < size - 1:
        for key in (f"tune/asks/{other}" for other in range(1, size)):
            if store.check([key]) and (question := store.get(key).decode()) not in answered:
                store.set(f"tune/answers/{question}", name)
                answered.add(question)
        time.sleep(0.02)
    return dist.PrefixStore(name, store)
