"""The memory of failures: bundles that every runner tries first.

A memory is a folder of bundles or a Redis server. Like Hypothesis' databases it forgets nothing that still fails and
never makes a run fail by itself: what cannot be read or written becomes a note.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from specverify.reports import bundle
from specverify.reports.format import cut, plural
from specverify.reports.writing import Unwritable, write_whole
from specverify.setup.errors import UnusableInput
from specverify.setup.files import make_folder

NAME = re.compile(r"[0-9a-f]{12}\.json")
"""The file name of a bundle: the id of its case."""

MOST_BUNDLES = 200
"""Most bundles that a folder keeps and that a run tries, where the profile names no other number."""

KEEP_S = 8 * 24 * 3600
"""Seconds after which Redis forgets a bundle that no run has seen fail: eight days, as Hypothesis' database does."""

PREFIX = "specverify:bundle:1:"
"""The beginning of a bundle's key in Redis; the number is the version of the bundle format."""

REDIS = ("redis://", "rediss://", "unix://")
"""The beginnings of addresses of a Redis server."""


class Memory(Protocol):
    """Where bundles of failures are kept."""

    def bundles(self) -> Iterator[tuple[str, Path | bytes]]:
        """The kept bundles, latest first, each with a name for messages: a file, or its content."""
        ...

    def keep(self, file: Path) -> list[str]:
        """Keep the bundle in `file`; the names of the bundles that left the memory for it.

        Raises:
            Unwritable, OSError: It could not be kept.
        """
        ...

    @property
    def num_left_out(self) -> int:
        """The number of kept bundles that `bundles` leaves out."""
        ...


class Folder:
    """A folder of bundles, which is made when the first bundle is kept.

    Args:
        folder: The folder.
        most: Most bundles that it keeps.
    """

    def __init__(self, folder: Path, most: int = MOST_BUNDLES) -> None:
        self._folder = folder
        self._most = most

    def bundles(self) -> Iterator[tuple[str, Path | bytes]]:
        """See `Memory`."""
        yield from ((str(file), file) for file in self._in_order_of_worth()[: self._most])

    @property
    def num_left_out(self) -> int:
        """See `Memory`."""
        return max(0, len(self._latest()) - self._most)

    def keep(self, file: Path) -> list[str]:
        """See `Memory`."""
        make_folder(self._folder)
        write_whole(self._folder / file.name, file.read_bytes())
        dropped = self._in_order_of_worth()[self._most :]
        for old in dropped:
            old.unlink(missing_ok=True)
        return [old.name for old in dropped]

    def _in_order_of_worth(self) -> list[Path]:
        """The latest bundle of each cause, then the second latest of each, and so on: few bundles show many causes."""
        files = self._latest()
        if len(files) <= self._most:
            return files
        num_seen: Counter[str] = Counter()
        turns = []
        for file in files:
            cause = cause_of(file)
            turns.append((num_seen[cause], file))
            num_seen[cause] += 1
        # The sort is stable: within a turn the latest stay first.
        return [file for _, file in sorted(turns, key=lambda turn: turn[0])]

    def _latest(self) -> list[Path]:
        # Below the folder too: an artefact of CI may be unpacked into a folder of its own.
        files = [file for file in self._folder.rglob("*.json") if NAME.fullmatch(file.name) and file.is_file()]
        return sorted(files, key=lambda file: (-file.stat().st_mtime, str(file)))


def cause_of(file: Path) -> str:
    """The backend, invariant and stage of a bundle, as one text; its name where it cannot be read."""
    try:
        content = json.loads(file.read_text())
        finding = content["finding"]
        return f"{content['backend']} {finding['invariant']} {finding['stage']}"
    except (OSError, ValueError, KeyError, TypeError):
        return file.name


class Redis:
    """Bundles in a Redis server, one key each, which expires.

    Args:
        address: `redis://HOST:PORT/DB`, `rediss://` or `unix://`.
        client: A connected client; by default one to `address`.
        most: Most bundles that a run tries; the server itself forgets by age alone.

    Raises:
        UnusableInput: The package `redis` is not installed, or the address is none.
    """

    def __init__(self, address: str, client: Any = None, most: int = MOST_BUNDLES) -> None:
        self._most = most
        self.num_left_out = 0
        self._address = re.sub(r"//[^/@]*@", "//", address)  # a password stays out of messages
        try:
            import redis
        except ImportError:
            raise UnusableInput(f"memory {self._address} needs `pip install 'specverify-decoding[redis]'`") from None
        self._errors = redis.RedisError
        try:
            self._client = client or redis.Redis.from_url(address, socket_timeout=10, socket_connect_timeout=5)
        except ValueError as why:
            raise UnusableInput(f"memory {self._address}: {why}") from None

    def bundles(self) -> Iterator[tuple[str, Path | bytes]]:
        """See `Memory`.

        Raises:
            OSError: The server cannot be asked.
        """
        try:
            keys = sorted(self._client.scan_iter(f"{PREFIX}*", count=500))
            latest_keys = sorted(keys, key=lambda key: -self._client.ttl(key))[: self._most]
            self.num_left_out = len(keys) - len(latest_keys)
            for key in latest_keys:
                content = self._client.get(key)
                if content is not None:  # it may have expired since
                    yield f"{self._address} {key.decode(errors='replace')}", content
        except self._errors as why:
            raise OSError(f"{self._address}: {cut(str(why), 160)}") from None

    def keep(self, file: Path) -> list[str]:
        """See `Memory`."""
        try:
            self._client.set(f"{PREFIX}{file.stem}", file.read_bytes(), ex=KEEP_S)
            return []
        except self._errors as why:
            raise OSError(f"{self._address}: {cut(str(why), 160)}") from None


def open_memory(place: str, folder: Path, most: int = MOST_BUNDLES) -> Memory:
    """The memory at `place`: a Redis server, or a folder, which is relative to `folder`; at most `most` are tried.

    Raises:
        UnusableInput: Redis is asked for and not installed.
    """
    return Redis(place, most=most) if place.startswith(REDIS) else Folder(folder / place, most)


class RememberedBundles:
    """The bundles of several memories, each case once, as files that a replay can name.

    The memories `read_only`, such as the artefact of an earlier run, are read after the others and never written.

    Attributes:
        found: File and bundle of each case.
        notes: One line for each bundle or memory that could not be used, with the reason.
    """

    def __init__(self, memories: list[Memory], folder: Path, read_only: Sequence[Memory] = ()) -> None:
        self._memories = memories
        self._folder = folder
        self.saved_bundles: list[tuple[Path, bundle.Bundle]] = []
        self.notes: list[str] = []
        case_ids: set[str] = set()
        for memory in (*memories, *read_only):
            self._read(memory, case_ids)

    def _read(self, memory: Memory, case_ids: set[str]) -> None:
        try:
            for name, content in memory.bundles():
                self._take(name, content, case_ids)
            if memory.num_left_out:
                left_out = plural(memory.num_left_out, "remembered bundle")
                self.notes.append(f"{left_out} not tried: memory-size is smaller than the memory")
        except OSError as why:
            self.notes.append(f"memory not tried: {cut(str(why), 200)}")

    def _take(self, name: str, content: Path | bytes, case_ids: set[str]) -> None:
        try:
            file = content if isinstance(content, Path) else self._fetch(name, content)
            saved = bundle.load(file)
        except (bundle.Unreadable, Unwritable) as why:
            self.notes.append(f"bundle not tried: {why}")
            return
        if saved.case.id in case_ids:
            return
        case_ids.add(saved.case.id)
        # A planted fault is no fault of the engine: its bundle would only be told as fixed.
        if saved.fault is None:
            self.saved_bundles.append((file, saved))

    def _fetch(self, name: str, content: bytes) -> Path:
        """The content of a remote bundle as a file of the reports' folder."""
        make_folder(self._folder)
        stem = re.sub(r"[^0-9a-f]", "", name.rpartition(":")[2])[:12] or "unnamed"
        file = self._folder / f"{stem}.json"
        write_whole(file, content)
        return file

    def keep(self, file: Path) -> str | None:
        """Keep the bundle in `file` in every memory that takes it; the reason if one does not, else None."""
        try:
            for memory in self._memories:
                dropped = memory.keep(file)
                if dropped:
                    names = cut(", ".join(dropped), 120)
                    self.notes.append(f"{plural(len(dropped), 'bundle')} left the memory (memory-size): {names}")
        except OSError as why:
            return f"bundle {file.name} is not in the memory: {cut(str(why), 160)}"
        return None
