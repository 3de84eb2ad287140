"""Files and folders: written whole or not at all, known by a hash of what is in them, and locked.

`lock` is a module of its own name: `lock.hold(folder)`.
"""

from tune.files import lock
from tune.files.atomic import CHECKPOINT, INDEX, exported, require_replaceable, written_aside
from tune.files.contents import cache_folder, content_digest

# Other names are for the packages of `tune` alone.
__all__ = []
