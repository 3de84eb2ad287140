"""Connect to a Ray cluster. Ray is an extra, and only this module imports it."""

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
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"  # HTTP/2 preface and SETTINGS; gRPC replies with type 4
# Ray Train's print patch would print every line twice.
VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1", "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}
REPORTS = "ray.train.v2._internal.execution.context"  # the module whose logger reports checkpoints
LIMIT = "RAY_gcs_rpc_server_reconnect_timeout_s"  # seconds after which Ray's processes exit without the gcs_server
# For a new cluster on this machine: nothing restarts its gcs_server. Ray's niceness, 15, gives workers little CPU time.
ITS_OWN = {LIMIT: "30", "RAY_worker_niceness": "0"}


def connect(address: str | None, cores: int) -> tuple[Any, dict[str, float]]:
    """Return Ray's module and the resources of the cluster at `address`, or of a new one with at least `cores`. Raises
    TuneError if Ray is not installed or the cluster cannot be reached."""
    address = address or os.environ.get("RAY_ADDRESS")
    for name, value in (VARIABLES if address else VARIABLES | ITS_OWN).items():
        os.environ.setdefault(name, value)
    with needs("ray", "Ray"):
        import ray
    if cores:
        here = {"address": "local", "num_cpus": max(os.cpu_count() or 1, cores), "include_dashboard": False}
        hint = "Start one with `ray start --head`, or leave out --address; if it needs a token, set RAY_AUTH_MODE=token"
        unreached = f"--address: cannot reach a Ray cluster at {address}. {hint}"
        with explained(unreached if address else "Ray does not start on this machine", Exception):
            if address:
                print(f"--address: connecting to Ray at {address} (at most {PATIENCE} seconds)", file=sys.stderr)
                require_answer(address, PATIENCE)
            where, hook = {"address": address} if address else here, {"worker_process_setup_hook": quiet}
            ray.init(**where, logging_level="warning", runtime_env=hook)
    return ray, ray.cluster_resources() if cores else {}


def require_answer(address: str, patience: float) -> None:
    """Raise OSError if nothing answers in time at HOST:PORT or ray://HOST:PORT, since Ray itself would retry silently
    for minutes. Raise RuntimeError if the answer is not Ray's. `auto` has no port and fails at once in Ray."""
    place, deadline = urlsplit(address if "://" in address else f"//{address}"), time.monotonic() + patience
    while place.port:
        try:
            with socket.create_connection((place.hostname, place.port), max(1, deadline - time.monotonic())) as server:
                server.sendall(HELLO)
                if server.recv(4)[3:] == b"\4" or os.environ.get("RAY_USE_TLS", "0") != "0":
                    return
            raise RuntimeError("the server at this address is not Ray")
        except OSError:
            if time.monotonic() + 1 > deadline:
                raise
            time.sleep(1)  # the cluster may be starting


def quiet() -> None:
    """Silence Ray Train's log lines for every report, and its twice-a-minute note on a missing optional service."""
    for name in ("ray.train", getattr(sys.modules.get(REPORTS), "__file__", REPORTS)):  # Ray 2.60 uses the file name
        logging.getLogger(name).setLevel(logging.ERROR)
