"""One module per library whose configs are converted, and what the modules share."""

from tune.migrate.peers.axolotl import AXOLOTL
from tune.migrate.peers.llama_factory import LLAMA_FACTORY
from tune.migrate.peers.torchtune import TORCHTUNE
from tune.migrate.peers.trl import TRL

PEERS = {"torchtune": TORCHTUNE, "axolotl": AXOLOTL, "llama_factory": LLAMA_FACTORY, "trl": TRL}
