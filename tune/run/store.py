"""A run folder in an object store: written on this machine, and uploaded in the background.

The URL holds the contents of the run folder. A checkpoint there is complete once it has `digests.json`, which is
uploaded last and removed first. In a complete checkpoint only `state.json` changes, because the run records the best
step there. Then `digests.json`, which has the digests of all contents, is uploaded before `state.json`.
"""

import contextlib
import json
import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import fsspec
from fsspec.implementations.dirfs import DirFileSystem

from tune.checkpointers import DIGESTS, STORED, found_damage
from tune.distributed import World
from tune.errors import TuneError
from tune.files import CHECKPOINT, written_aside
from tune.secrets import without_secrets

PAUSE = 2.0  # seconds between checks for new files
PATIENCE = 600.0  # seconds that an ended run keeps trying to upload
WITHOUT_FOLDERS = ("s3", "gs", "gcs", "az", "abfs", "abfss", "oci", "memory")  # s3fs would make a bucket
TAKEN = "another run has begun to write there, and this one no longer does"
LATE = 30.0  # seconds that the first node waits for other nodes with a checkpoint when a newer one exists
OWNER, HELD = ".owner", ".uploading"  # in the store: the owner; the checkpoint that all nodes upload
STATE = "state.json"  # of a checkpoint
MARK = ".part-"  # with a rank: all files of its node are uploaded


class Store:
    """The copy of the run folder `folder` at `url`.

    On each node, one process uploads the node's files. The first process of all decides what is complete. The last run
    to start owns the store; older runs stop uploading.

    Raises:
        TuneError: on all processes, the store cannot be read or written.
    """

    def __init__(self, url: str, folder: Path, world: World):
        self.name, self.folder, self.world = without_secrets(url), folder, world
        self.keep: int | None = None
        self.owner: bytes = world.broadcast(uuid.uuid4().bytes)
        first = int(os.environ.get("LOCAL_RANK", world.rank)) == 0
        self.nodes = [rank for rank, is_first in enumerate(world.from_all_ranks(first)) if is_first]
        self.held, self.since = "", 0.0  # the checkpoint being uploaded, and since when
        self.sent: dict[str, tuple[int, int, int]] = {}  # state of each file when it was uploaded
        self.there, self.next_files = set[str](), 0.0
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None
        mark, mine = folder / STORED, self.owner.hex()

        def write_mark() -> None:
            if world.is_main:
                folder.mkdir(parents=True, exist_ok=True)
                mark.write_text(mine, encoding="utf-8")

        self._on_each_node(write_mark)
        if any(
            world.from_all_ranks(
                world.rank in self.nodes[1:] and mark.exists() and mark.read_text(encoding="utf-8") == mine
            )
        ):
            raise TuneError(  # else nodes would remove each other's files
                f"output_dir: with a URL, each node writes to its own disk, but {folder} is shared. Set TUNE_LOCAL to "
                "a folder on each node's disk, or set output_dir to a shared folder"
            )
        self._on_each_node(lambda: self._fetch(url))

    def _on_each_node(self, action: Callable[[], None]) -> None:
        why = ""
        try:
            if self.world.rank in self.nodes:
                action()
        except Exception as error:  # each file system has its own
            why = f"{error}" or repr(error)
        if whys := [each for each in self.world.from_all_ranks(why) if each]:
            hint = "Is the address right, and may you read and write there?"
            raise TuneError(f"output_dir: {self.name} cannot be used: {whys[0]}. {hint}")

    def _fetch(self, url: str) -> None:
        """Update the folder from the store. A single node keeps checkpoints that are newer than the store's."""
        files, root = fsspec.url_to_fs(url)
        self.files, self.needs_folders = DirFileSystem(root, files), url.partition("://")[0] not in WITHOUT_FOLDERS
        self._make_parent(probe := f".access-{self.world.rank}")
        self.files.pipe_file(probe, b"")
        self.files.rm_file(probe)
        stored, several = self._complete(), len(self.nodes) > 1
        newest, here = max(stored, default=""), max(self._steps(), default="")
        for step in self._steps() if several else ():
            if step > newest:
                shutil.rmtree(self.folder / "checkpoints" / step)
        if here < newest and self.world.is_main:
            for name in self._listed():
                if not name.startswith((".", "checkpoints/")):
                    with written_aside(self.folder / name) as unfinished:
                        self.files.get_file(name, str(unfinished))
        if newest and (here <= newest or several):
            state = json.loads((self._fetch_checkpoint(newest) / "state.json").read_text(encoding="utf-8"))
            if (best := f"step-{state.get('best', {}).get('step', 0):08d}") in stored:
                self._fetch_checkpoint(best)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / STORED).touch()

    def _fetch_checkpoint(self, step: str) -> Path:
        final, names = self.folder / "checkpoints" / step, self._listed(f"checkpoints/{step}")
        if all((self.folder / name).exists() for name in names) and not found_damage(final):
            here, there = self._digests(step)
            if _is_renewed(there, here):
                return final
            if here | {STATE: ""} == there | {STATE: ""}:
                for name in (DIGESTS, STATE):
                    with written_aside(final / name) as unfinished:
                        self.files.get_file(f"checkpoints/{step}/{name}", str(unfinished))
                return final
        with written_aside(final, folder=True) as unfinished:
            for name in names:
                self.files.get_file(name, str(unfinished / Path(name).name))
            if damage := found_damage(unfinished):
                raise TuneError(f"checkpoints/{step} in the store is damaged: {damage}. Remove it from the store")
        return final

    def _listed(self, below: str = "") -> list[str]:
        """Return the files below, as paths relative to the run folder."""
        self.files.invalidate_cache()
        found: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            found = self.files.find(below)
        if outside := [name for name in found if name.startswith("/") or ".." in name.split("/")]:
            raise TuneError(f"{outside[0]!r} in the store is a path outside the run folder. Remove it from the store")
        return found

    def _digests(self, step: str) -> tuple[dict[str, str], dict[str, str]]:
        """Return the digests of a complete checkpoint, on this disk and in the store."""
        name = f"checkpoints/{step}/{DIGESTS}"
        return json.loads((self.folder / name).read_text(encoding="utf-8")), json.loads(self.files.cat_file(name))

    def _complete(self) -> set[str]:
        return {name.split("/")[1] for name in self._listed("checkpoints") if name.endswith(f"/{DIGESTS}")}

    def _steps(self) -> list[str]:
        """Return the checkpoints on this disk, newest first."""
        return sorted((path.name for path in self.folder.glob(f"checkpoints/{CHECKPOINT}")), reverse=True)

    def start(self, tell: Callable[[str], None], keep: int | None = None) -> None:
        """Start the upload thread, and keep the newest `keep` checkpoints in the store (None: all). All processes must
        call it."""
        self.keep = keep

        def begin() -> None:
            if self.world.is_main:
                self.files.pipe_file(OWNER, self.owner)
                self.files.pipe_file(HELD, b"")
                self.there = self._complete()
                self._remove({name.split("/")[1] for name in self._listed("checkpoints")} - self.there)

        def run() -> None:
            told = ""
            while not self.ended.wait(PAUSE):
                if (failure := self._try()) != told:
                    behind = f"warning: {self.name} is behind: {failure}. The run goes on and tries again"
                    tell(behind if failure else f"{self.name} is reached again")
                told = failure

        self._on_each_node(begin)
        if self.world.rank in self.nodes:
            self.thread = threading.Thread(target=run, daemon=True)
            self.thread.start()

    def finish(self, error: BaseException | None) -> None:
        """Upload the rest; after an `error`, try only once. Raises TuneError if it keeps failing."""
        if self.thread is None:
            return
        self.ended.set()
        self.thread.join()
        is_wanted = error is None or getattr(error, "code", None) == 130  # interrupted, with a saved checkpoint
        deadline, told = time.monotonic() + PATIENCE * is_wanted, ""
        while failure := self._try(is_last=True):
            behind = f"{self.name} is behind {self.folder}: {failure}"
            if time.monotonic() > deadline or failure == TAKEN:
                if error is None:
                    raise TuneError(f"output_dir: {behind}. The same command on this machine uploads the rest")
                print(f"warning: {behind}", file=sys.stderr, flush=True)
                return
            if failure != told:
                print(f"{behind}. Trying for ten minutes", file=sys.stderr, flush=True)
            told = failure
            time.sleep(1)

    def _try(self, is_last: bool = False) -> str:
        """Upload new files. Return why the store is incomplete, or ""."""
        try:
            return self._upload(is_last)
        except Exception as error:  # each file system has its own
            return without_secrets(f"{error}" or repr(error))

    def _upload(self, is_last: bool) -> str:
        if self.files.cat_file(OWNER) != self.owner:
            return TAKEN
        if not self.world.is_main:
            asked = self.files.cat_file(HELD).decode()
            if asked and asked not in self.there and self._upload_part(asked):
                self.files.pipe_file(f"checkpoints/{asked}/{MARK}{self.world.rank}", b"")
                self.there.add(asked)
            last = max(self._steps(), default="")
            return f"{last} is not complete yet" if is_last and last > max(self._complete(), default="") else ""
        while step := self.held or self._next():
            if self._upload_part(step) and not self._is_over():
                break
        self._renew()
        kept = {*sorted(self.there)[-(self.keep or 0) :], *self._steps()}
        self._remove(self.there - kept)
        self.there &= kept
        self._upload_files(is_last)
        return f"{self.held} of another node is missing" if self.held and is_last else ""

    def _next(self) -> str:
        """Return the newest checkpoint that is not in the store.

        With several nodes, it must be newer than all in the store, because nodes remove old ones at different times.
        """
        least = max(self.there, default="") if len(self.nodes) > 1 else ""
        return next((step for step in self._steps() if step not in self.there and step > least), "")

    def _upload_part(self, step: str) -> bool:
        """Upload this node's part of a checkpoint, without the file that makes it complete.

        The checkpoint is held until all of it is in the store, even if the run removes it. The first node chooses the
        checkpoint.
        """
        held, path = self.folder / HELD, self.folder / "checkpoints" / step
        if self.held != step:
            shutil.rmtree(held, ignore_errors=True)
            try:
                shutil.copytree(path, held / step, copy_function=os.link)
            except (shutil.Error, FileNotFoundError):  # it may be being removed
                if path.exists():
                    raise
                return False
            if self.world.is_main and len(self.nodes) > 1:
                self.files.pipe_file(HELD, step.encode())
            self.held, self.since = step, time.monotonic()
        for file in sorted((held / step).iterdir()):
            if file.name != DIGESTS:
                self._send(file, f"checkpoints/{step}/{file.name}")
        return True

    def _renew(self) -> None:
        """Upload the run's changes in complete checkpoints."""
        for step in self.there.intersection(self._steps()):
            digests = self.folder / "checkpoints" / step / DIGESTS
            notes = digests.with_name(STATE)
            try:
                # Noted before reading, so that later changes are seen the next time. The notes follow their digests.
                seen = {f"checkpoints/{step}/{file.name}": _state_of(file) for file in (digests, notes)}
                of_digests, of_notes = seen
                if seen.items() <= self.sent.items():
                    continue
                here, there = self._digests(step)
                if _is_renewed(there, here) and (here != there or of_notes in self.sent):
                    self._send(digests, of_digests)
                    self._send(notes, of_notes)
                self.sent |= seen
            except FileNotFoundError:
                if digests.exists():  # else it is being removed
                    raise

    def _is_over(self) -> bool:
        """Return whether the held checkpoint is complete in the store, or given up because another node removed it."""
        folder = f"checkpoints/{self.held}"
        marks = {f"{folder}/{MARK}{rank}" for rank in self.nodes if rank}
        if marks <= {*self._listed(folder)}:
            self._upload_files(is_due=True)  # first, because a resumed run needs these files
            self._send(self.folder / HELD / self.held / DIGESTS, f"{folder}/{DIGESTS}")
            self.there.add(self.held)
            for mark in marks:
                self.files.rm_file(mark)
        elif time.monotonic() - self.since > LATE and max(self._steps(), default="") > self.held:
            self._remove({self.held})
            self.sent = {name: state for name, state in self.sent.items() if not name.startswith(folder)}
        else:
            return False
        self.held = ""
        shutil.rmtree(self.folder / HELD)
        return True

    def _upload_files(self, is_due: bool) -> None:
        """Upload all files except checkpoints, in at most a twentieth of the time."""
        began = time.monotonic()
        if is_due or began > self.next_files:
            for file in sorted(self.folder.rglob("*")):
                inside = file.relative_to(self.folder).parts
                if inside[0] != "checkpoints" and not any(part.startswith(".") for part in inside) and file.is_file():
                    self._send(file, "/".join(inside))
            self.next_files = time.monotonic() + 20 * (time.monotonic() - began)

    def _send(self, file: Path, name: str) -> None:
        try:
            state = _state_of(file)
            if self.sent.get(name) != state:
                self._make_parent(name)
                self.files.put_file(str(file), name)
                self.sent[name] = state
        except FileNotFoundError:
            if file.exists():  # else it was replaced meanwhile
                raise TuneError(f"{name} cannot be written") from None

    def _make_parent(self, name: str) -> None:
        if self.needs_folders:
            self.files.makedirs(os.path.dirname(name), exist_ok=True)

    def _remove(self, steps: set[str]) -> None:
        for step in steps:
            with contextlib.suppress(FileNotFoundError):
                self.files.rm_file(f"checkpoints/{step}/{DIGESTS}")
            with contextlib.suppress(FileNotFoundError):
                self.files.rm(f"checkpoints/{step}", recursive=True)


def _is_renewed(before: dict[str, str], after: dict[str, str]) -> bool:
    """Return whether the digests belong to one checkpoint, with `after` not older than `before`."""
    old, new = before.get(STATE, "").split(), after.get(STATE, "").split()
    return before | {STATE: ""} == after | {STATE: ""} and new[: len(old)] == old


def _state_of(file: Path) -> tuple[int, int, int]:
    about = file.stat()  # two quick replacements may have equal times and sizes
    return about.st_mtime_ns, about.st_size, about.st_ino
