"""Write files and folders atomically, hash their contents, and lock run folders.

`lock` is used as a module: `lock.hold(folder)`.
"""

from tune.files import lock
from tune.files.atomic import CHECKPOINT, INDEX, exported, require_replaceable, written_aside
from tune.files.contents import cache_folder, content_digest

# The imported names are for the packages of `tune` only.
__all__ = []
