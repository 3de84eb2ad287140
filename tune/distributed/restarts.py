"""Processes that torchrun starts again (--max-restarts) share its store with those that have ended."""

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist


def launcher_store(timeout: timedelta) -> dist.Store | None:
    """torchrun's store where it may start the processes again: it outlives them."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or os.environ["TORCHELASTIC_MAX_RESTARTS"] == "0":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timeout)


def of_this_start(store: dist.Store, rank: int, size: int) -> dist.Store:
    """A part of the store that the processes of this start have to themselves.

    torch (2.13) would connect them by the addresses of the last start if these are read before they are replaced. So
    rank 0 draws a name, and tells it to those who ask by a key that is new too.
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
