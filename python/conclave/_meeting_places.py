"""Where ranks tell each other how they can be reached, before they are connected."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import selectors
import socket
import time
import urllib.parse
from collections.abc import Callable

from conclave.errors import ConclaveTypeError, ConclaveValueError, Error, from_code

LOST, TIMEOUT = (700, "kCommPeerLost"), (701, "kCommTimeout")
MISMATCH = (702, "kCommMismatch")
# A rank's text has some hundred letters; one that is no rank may send anything.
_LONGEST_LINE = 1 << 20
_PAUSE = 0.01


def comm_error(code: int, name: str, rank: int, text: str) -> Error:
    """Another rank is lost, late or disagrees, before ranks are connected."""
    message = f"rank {rank}, phase connect: {text}"
    error = from_code(code, name, message, "", "", "", "", "", "")
    error.peer, error.phase = rank, "connect"  # type: ignore[attr-defined]
    return error


# In a directory that a meeting has made: whoever leaves it last removes it.
_MADE = "made-by-conclave"


class Files:
    """Texts in files of a directory that all ranks see: one for each rank and round."""

    def __init__(self, path: str | os.PathLike[str], rank: int, size: int, timeout: float) -> None:
        self._path, self._rank, self._size = pathlib.Path(path), rank, size
        self._until = time.monotonic() + timeout
        self._round = 0
        self._said: list[pathlib.Path] = []

    def __call__(self, mine: str) -> list[str]:
        try:
            self._say(mine)
        except OSError as error:
            raise ConclaveValueError(f"bootstrap: {self._path}: {error.strerror}") from error
        texts = [self._read(rank) for rank in range(self._size)]
        self._round += 1
        return texts

    def clear(self) -> None:
        """Takes this rank's texts back, and with the last ones the directory, if a rank made it.

        By now every rank has read them: the next meeting may have the same path. A directory that
        was there before, or that holds anything else, stays.
        """
        for path in self._said:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            if not any(_is_text(entry.name) for entry in self._path.iterdir()):
                (self._path / _MADE).unlink()  # raises where the directory was there before
                self._path.rmdir()  # raises where something of others lies there

    def _make(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._path.mkdir()
        except FileExistsError:
            return
        (self._path / _MADE).touch()

    def _file(self, rank: int) -> pathlib.Path:
        return self._path / f"{self._round}.{rank}"

    def _say(self, mine: str) -> None:
        path = self._file(self._rank)
        while True:
            self._make()
            # A text of an earlier meeting would lead others to nobody.
            if path.exists():
                raise ConclaveValueError(
                    f"bootstrap: rank {self._rank} has spoken in {self._path} before, in a meeting "
                    "that has failed; expected a path of its own for each meeting"
                )
            part = path.with_suffix(f".{self._rank}.new")
            self._said += [part, path]
            try:
                part.write_text(mine)
                part.rename(path)
            except FileNotFoundError:
                # The last rank of an earlier meeting has just removed the directory.
                if time.monotonic() >= self._until:
                    raise
                time.sleep(_PAUSE)
                continue
            return

    def _read(self, rank: int) -> str:
        while True:
            with contextlib.suppress(FileNotFoundError):
                return self._file(rank).read_text()
            if time.monotonic() >= self._until:
                raise comm_error(*TIMEOUT, rank, f"rank {rank} did not connect in time")
            time.sleep(_PAUSE)


def _is_text(name: str) -> bool:
    number, _, rank = name.removesuffix(".new").partition(".")
    return number.isdigit() and rank.isdigit()


class _Lines:
    """Lines of JSON over a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._held = b""

    def take(self) -> object:
        """The next line; None if the rest of it is still to come. Raises OSError, ValueError."""
        while b"\n" not in self._held:
            try:
                part = self.connection.recv(1 << 16)
            except BlockingIOError:
                return None
            if not part:
                raise ConnectionError("the connection has ended")
            self._held += part
            if len(self._held) > _LONGEST_LINE:
                raise ValueError("no line of a rank is as long")
        line, _, self._held = self._held.partition(b"\n")
        return json.loads(line)

    def send(self, value: object, until: float) -> None:
        self.connection.settimeout(max(0.001, until - time.monotonic()))
        self.connection.sendall(json.dumps(value).encode() + b"\n")
        self.connection.setblocking(False)


class Address:
    """Texts over an address where rank 0 listens, while ranks meet."""

    def __init__(self, address: str, rank: int, size: int, timeout: float) -> None:
        self._host, self._port = _host_and_port(address)
        self._rank, self._size = rank, size
        self._until = time.monotonic() + timeout
        self._round = 0
        self._server: socket.socket | None = None
        self._of_rank: dict[int, _Lines] = {}

    def __call__(self, mine: str) -> list[str]:
        try:
            texts = self._gather(mine) if self._rank == 0 else self._ask(mine)
        except (OSError, ValueError) as error:
            if isinstance(error, Error):
                raise
            other = -1 if self._rank == 0 else 0
            raise comm_error(*LOST, other, f"{self._host}:{self._port}: {error}") from error
        self._round += 1
        return texts

    def clear(self) -> None:
        for lines in self._of_rank.values():
            lines.connection.close()
        if self._server is not None:
            self._server.close()

    def _late(self, rank: int) -> Exception:
        return comm_error(*TIMEOUT, rank, f"rank {rank} did not connect in time")

    def _gather(self, mine: str) -> list[str]:
        if self._server is None:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            self._server = socket.create_server((self._host, self._port), family=family)
            self._server.setblocking(False)
        texts = {0: mine}
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._server, selectors.EVENT_READ)
            for lines in self._of_rank.values():
                waiting.register(lines.connection, selectors.EVENT_READ, lines)
            while len(texts) < self._size:
                left = self._until - time.monotonic()
                if left <= 0:
                    raise self._late(min(set(range(self._size)) - set(texts)))
                for key, _ in waiting.select(left):
                    if key.data is None:
                        guest, _ = self._server.accept()
                        guest.setblocking(False)
                        waiting.register(guest, selectors.EVENT_READ, _Lines(guest))
                    else:
                        self._hear(key.data, texts, waiting)
        all_texts = [texts[rank] for rank in range(self._size)]
        for lines in self._of_rank.values():
            lines.send(all_texts, self._until)
        return all_texts

    def _hear(self, lines: _Lines, texts: dict[int, str], waiting: selectors.BaseSelector) -> None:
        try:
            said = lines.take()
            if said is None:
                return
            rank, size, number, text = _words_of(said)
        except (OSError, ValueError):
            # A stranger, or a rank that is lost: its next connection counts.
            waiting.unregister(lines.connection)
            lines.connection.close()
            return
        self._of_rank[rank] = lines
        if (size, number) != (self._size, self._round):
            text = f"rank {rank} meets {size} ranks where rank 0 meets {self._size}"
            raise comm_error(*MISMATCH, rank, text)
        texts[rank] = text

    def _ask(self, mine: str) -> list[str]:
        lines = self._of_rank.get(0) or self._reach()
        self._of_rank[0] = lines
        lines.send([self._rank, self._size, self._round, mine], self._until)
        with selectors.DefaultSelector() as waiting:
            waiting.register(lines.connection, selectors.EVENT_READ)
            while True:
                texts = lines.take()
                if isinstance(texts, list):
                    return texts
                left = self._until - time.monotonic()
                if left <= 0:
                    raise self._late(0)
                waiting.select(left)

    def _reach(self) -> _Lines:
        while True:
            left = self._until - time.monotonic()
            if left <= 0:
                raise self._late(0)
            try:
                return _Lines(socket.create_connection((self._host, self._port), min(left, 2.0)))
            except OSError:  # it does not listen yet
                time.sleep(_PAUSE)


def _words_of(said: object) -> tuple[int, int, int, str]:
    """Rank, size, round and text. Raises ValueError for what no rank says."""
    if isinstance(said, list) and len(said) == 4:
        rank, size, number, text = said
        numbers = all(isinstance(one, int) for one in (rank, size, number))
        if numbers and isinstance(text, str) and 0 < rank < max(size, 2):
            return rank, size, number, text
    raise ValueError("no rank says this")


def _host_and_port(address: str) -> tuple[str, int]:
    parts = urllib.parse.urlsplit(address)
    with contextlib.suppress(ValueError):
        if parts.hostname and parts.port:
            return parts.hostname, parts.port
    raise ConclaveValueError(f"bootstrap: expected tcp://host:port, found {address}")


def checked(exchange: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """The application's own, with the type of its answer made sure of."""

    def run(mine: str) -> list[str]:
        texts = exchange(mine)
        if isinstance(texts, (list, tuple)) and all(isinstance(text, str) for text in texts):
            return list(texts)
        raise ConclaveTypeError("bootstrap: expected a list of the texts of all ranks")

    return run
