"""A SQLite database that threads and processes share. Each thread has a connection of its own."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from chairlift.errors import InvalidParameter, StorageFull, TemporaryFailure

T = TypeVar("T")
Connection = sqlite3.Connection

log = logging.getLogger("chairlift.server")

NAME = "responses.sqlite3"
THREADS = 4
LOCK_SECONDS = 20.0  # A transaction waits so long for that of another process.
VACUUM_PAGES = 2000  # Free pages that are given back at a time.
FULL_BYTES = 2**20  # A disk with less free space is full.
VERSION = 1

# A change of the tables needs a new version, and a step from the last one in `_create`.
_TABLES = """
CREATE TABLE objects (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    kind TEXT NOT NULL,  -- response or conversation
    previous TEXT,  -- the response that this one continues
    conversation TEXT,  -- the conversation that this response belongs to
    status TEXT NOT NULL,
    runner TEXT,  -- the process that generates a background response, until its last event is written
    used REAL NOT NULL,
    size INTEGER NOT NULL,  -- bytes, with all that belongs to it
    body BLOB NOT NULL
);
CREATE INDEX objects_by_use ON objects (owner, used);
CREATE INDEX objects_by_runner ON objects (runner) WHERE runner IS NOT NULL;
CREATE TABLE items (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    object TEXT NOT NULL REFERENCES objects (id) ON DELETE CASCADE,
    id TEXT NOT NULL,
    is_output INTEGER NOT NULL,
    size INTEGER NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (object, id)
);
CREATE INDEX items_by_id ON items (id);
CREATE INDEX items_by_object ON items (object, position);
CREATE TABLE events (
    object TEXT NOT NULL REFERENCES objects (id) ON DELETE CASCADE,
    first INTEGER NOT NULL,  -- number of the first event in the body
    body BLOB NOT NULL,
    PRIMARY KEY (object, first)
);
CREATE TABLE usage (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TRIGGER object_added AFTER INSERT ON objects BEGIN
    INSERT INTO usage VALUES (new.owner, new.size)
        ON CONFLICT (owner) DO UPDATE SET bytes = bytes + new.size;
END;
CREATE TRIGGER object_changed AFTER UPDATE OF size ON objects BEGIN
    UPDATE usage SET bytes = bytes + new.size - old.size WHERE owner = new.owner;
END;
CREATE TRIGGER object_removed AFTER DELETE ON objects BEGIN
    UPDATE usage SET bytes = bytes - old.size WHERE owner = old.owner;
END;
"""


class Database:
    def __init__(self, folder: Path, parameter: str) -> None:
        """Open the database in a folder, or create both; errors name `parameter`."""
        self.path = folder / NAME
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="responses")
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # SQLite gives its other files the permissions of this one.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
            connection = self._open()
            try:
                _create(connection, self.path, parameter)
            finally:
                connection.close()
        except OSError as error:
            raise InvalidParameter(parameter, f"cannot write {str(folder)!r} ({error.strerror})") from None
        except sqlite3.Error as error:
            raise InvalidParameter(parameter, f"cannot use {str(self.path)!r} ({error})") from None

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a thread, within one transaction."""
        return await self._run(work, "BEGIN")

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a thread, within one transaction that may write; it is undone if `work` raises."""
        return await self._run(work, "BEGIN IMMEDIATE")

    async def tidy(self) -> None:
        """Give the space of what was removed back to the disk, and empty the log, which has copies of it."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._tidy)

    def close(self) -> None:
        """Close the connections, whose threads end."""
        self._threads.shutdown(wait=True)

    async def _run(self, work: Callable[[Connection], T], begin: str) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._transaction, work, begin)

    def _transaction(self, work: Callable[[Connection], T], begin: str) -> T:
        with self._errors():
            connection = self._connection()
            connection.execute(begin)
            try:
                result = work(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # A full disk has undone it already.
                    connection.execute("ROLLBACK")
                raise
            return result

    def _tidy(self) -> None:
        with self._errors():
            connection = self._connection()
            connection.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _connection(self) -> Connection:
        found: Connection | None = getattr(self._own, "connection", None)
        if found is None:
            found = self._own.connection = self._open()
        return found

    def _open(self) -> Connection:
        connection = sqlite3.connect(self.path, timeout=LOCK_SECONDS, isolation_level=None)
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")  # What is deleted cannot be read from the file.
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn SQLite's errors into those that clients can read."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            is_io = code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
            if code == sqlite3.SQLITE_FULL or (is_io and shutil.disk_usage(self.path.parent).free < FULL_BYTES):
                raise StorageFull("no responses can be stored") from None
            if is_io:
                raise OSError(errno.EIO, f"{error} in the database of responses") from None
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise TemporaryFailure("the database of responses is busy") from None
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                log.error("%s is damaged (%s); stop the server and move it away", self.path, error)
            raise


def _create(connection: Connection, path: Path, parameter: str) -> None:
    """Create the tables, unless they are there."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == VERSION:
        return
    if version > VERSION:
        problem = f"{str(path)!r} was written by a later version of Chairlift (its tables have version {version})"
        raise InvalidParameter(parameter, problem)
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # This and the next have an effect outside of transactions.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("BEGIN IMMEDIATE")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == 0:  # Otherwise another process has just created them.
        for statement in _TABLES.split(";\nCREATE"):
            text = statement.strip().rstrip(";")
            connection.execute(text if text.startswith("CREATE") else f"CREATE {text}")
        connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute("COMMIT")
