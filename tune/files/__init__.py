"""Write files and folders atomically, hash their contents, choose weight files, and lock run folders.

`lock` is used as a module: `lock.hold(folder)`.
"""

from tune.files import lock
from tune.files.atomic import CHECKPOINT, INDEX, exported, require_replaceable, written_aside
from tune.files.contents import cache_folder, content_digest, remembered
from tune.files.links import require_inside
from tune.files.weight_files import ADAPTER_CONFIG, WHOLE, is_adapter, weight_files

# The imported names are for the packages of `tune` only.
__all__ = []
