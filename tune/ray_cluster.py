"""Ray's module, connected with a cluster; Ray is an extra, and imported here alone."""

import logging
import os
import socket
import sys
import time
from typing import Any
from urllib.parse import urlsplit

from tune.errors import explained
from tune.lookup import needs

PATIENCE = 20  # seconds for a cluster to answer
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # which prints every line twice
}


def connect(address: str | None, cores: int) -> tuple[Any, dict[str, float]]:
    """Ray's module and the resources of the cluster at `address`, or of a new one that has `cores` at least. Raises
    TuneError if Ray is not installed, or no cluster is reached."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    with needs("ray", "Ray"):
        import ray
    if cores:
        address = address or os.environ.get("RAY_ADDRESS")
        new = {"address": "local", "num_cpus": max(os.cpu_count() or 1, cores), "include_dashboard": False}
        hook = {"worker_process_setup_hook": quiet}
        hint = "Start one by `ray start --head`, or leave the address out for one on this machine"
        with explained(f"--address: no Ray cluster is reached at {address}. {hint}", OSError, ValueError, RuntimeError):
            if address:
                _require_answer(address)
            ray.init(**({"address": address} if address else new), logging_level="warning", runtime_env=hook)
    return ray, ray.cluster_resources() if cores else {}


def _require_answer(address: str) -> None:
    """Raises OSError if nobody listens at HOST:PORT, or ray://HOST:PORT: Ray itself tries for minutes, and silently."""
    place = urlsplit(address if "://" in address else f"//{address}")
    if not place.port:  # `auto`, of which Ray knows at once
        return
    print(f"--address: trying Ray at {address}, for {PATIENCE} seconds at most", file=sys.stderr, flush=True)
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection((place.hostname, place.port), max(1, deadline - time.monotonic())).close()
        except OSError:
            if time.monotonic() + 1 > deadline:
                raise
            time.sleep(1)  # a cluster that starts beside this


def quiet() -> None:
    """Ray Train tells every report, and twice a minute that an optional service is not installed."""
    for name in ("ray.train", "ray.train.v2._internal.execution.context"):
        logging.getLogger(name).setLevel(logging.ERROR)
