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
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"  # gRPC answers it with a frame of the last one's kind, 4
# Ray Train's own printing would print every line twice.
VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1", "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}
REPORTS = "ray.train.v2._internal.execution.context"  # the module whose logger tells of reports
LIMIT = "RAY_gcs_rpc_server_reconnect_timeout_s"  # after which Ray's processes end without its tables (gcs_server)
# Of a cluster of this machine alone: nobody starts its tables again. Ray's niceness, 15, leaves workers little time.
ITS_OWN = {LIMIT: "30", "RAY_worker_niceness": "0"}


def connect(address: str | None, cores: int) -> tuple[Any, dict[str, float]]:
    """Ray's module and the resources of the cluster at `address`, or of a new one that has `cores` at least. Raises
    TuneError if Ray is not installed, or no cluster is reached."""
    address = address or os.environ.get("RAY_ADDRESS")
    for name, value in (VARIABLES if address else VARIABLES | ITS_OWN).items():
        os.environ.setdefault(name, value)
    with needs("ray", "Ray"):
        import ray
    if cores:
        here = {"address": "local", "num_cpus": max(os.cpu_count() or 1, cores), "include_dashboard": False}
        hint = "Start one by `ray start --head`, or leave it out; if it wants a token, set RAY_AUTH_MODE=token"
        unreached = f"--address: no Ray cluster is reached at {address}. {hint}"
        with explained(unreached if address else "Ray does not start on this machine", Exception):
            if address:
                print(f"--address: trying Ray at {address}, for {PATIENCE} seconds at most", file=sys.stderr)
                require_answer(address, PATIENCE)
            where, hook = {"address": address} if address else here, {"worker_process_setup_hook": quiet}
            ray.init(**where, logging_level="warning", runtime_env=hook)
    return ray, ray.cluster_resources() if cores else {}


def require_answer(address: str, patience: float) -> None:
    """Raises OSError if nobody answers in time at HOST:PORT, or ray://HOST:PORT: Ray itself tries for minutes, and
    silently; RuntimeError if it is not Ray. `auto` has no port, and Ray knows at once."""
    place, deadline = urlsplit(address if "://" in address else f"//{address}"), time.monotonic() + patience
    while place.port:
        try:
            with socket.create_connection((place.hostname, place.port), max(1, deadline - time.monotonic())) as server:
                server.sendall(HELLO)
                if server.recv(4)[3:] == b"\4" or os.environ.get("RAY_USE_TLS", "0") != "0":
                    return
            raise RuntimeError("what answers there is not Ray")
        except OSError:
            if time.monotonic() + 1 > deadline:
                raise
            time.sleep(1)  # a cluster that starts beside this


def quiet() -> None:
    """Ray Train tells every report, and twice a minute that an optional service is not installed."""
    for name in ("ray.train", getattr(sys.modules.get(REPORTS), "__file__", REPORTS)):  # the name it has in Ray 2.60
        logging.getLogger(name).setLevel(logging.ERROR)
