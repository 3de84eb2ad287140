"""Settings of ours from configs of other libraries, whose words are tables in `peers/`."""

from tune.migrate.migration import PEERS, STATUSES, Migration, NotConverted, Setting, leaves, peer_of, show
from tune.migrate.one_config import migrate

# Other names are for the packages of `tune` alone.
__all__ = [
    "migrate",
]
