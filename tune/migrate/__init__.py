"""Settings of ours from configs of other libraries, whose keys are in a module of `peers/` for each library."""

from tune.migrate.leaves import leaves, show
from tune.migrate.migration import STATUSES, Migration, NotConverted, Setting
from tune.migrate.one_config import migrate, peer_of
from tune.migrate.peers import PEERS

# Other names are for the packages of `tune` alone.
__all__ = [
    "migrate",
]
