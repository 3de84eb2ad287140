"""Convert configs of other libraries (peers) to settings of a recipe. `peers/` has one module per library."""

from tune.migrate.leaves import leaves, show
from tune.migrate.migration import STATUSES, Migration, NotConverted, Setting
from tune.migrate.one_config import LAUNCH, migrate, peer_of, require_training
from tune.migrate.peers import PEERS

# Other names are internal to `tune`.
__all__ = [
    "migrate",
]
