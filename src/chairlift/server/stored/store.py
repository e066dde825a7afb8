"""The stored responses and conversations, by owner.

An object that was not used for as long as the store keeps them is gone. If an owner's quota is full, what was used
longest ago makes room. What belongs to another owner does not exist for anyone else.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from chairlift.errors import InvalidParameter
from chairlift.server.openai.types import MAX_MESSAGES
from chairlift.server.responses.input import NOTHING, Earlier, Item
from chairlift.server.stored.database import Connection, Database
from chairlift.server.wire.errors import APIError, too_busy
from chairlift.server.wire.limits import Limits

PARAMETER = "responses_dir"
PUBLIC = "public"  # the owner of what clients without a key create
OVERHEAD = 256  # bytes that an object or an item counts beside its content
MAX_EARLIER_BYTES = Limits().max_body_bytes  # What is sent all again may have as many, too.
TOUCH_SECONDS = 3600.0  # An object that is read counts as used if its last use was longer ago.
MAX_UNFINISHED = 100  # background responses of one owner
REMOVED_AT_ONCE = 200  # objects, so that others can write in between
UNFINISHED = ("queued", "in_progress")

Kind = Literal["response", "conversation"]
_encode = msgspec.json.encode
_decode = msgspec.json.decode


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list is asked for."""

    limit: int = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


@dataclass(frozen=True, slots=True)
class Continued:
    """What a response continues."""

    earlier: Earlier = NOTHING
    objects: Sequence[str] = ()  # They are used: a conversation, or the response before and all before that.
    conversation: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A background response and its process."""

    id: str
    owner: str
    runner: str


class ResponseStore:
    def __init__(self, folder: Path, quota: int, seconds: float) -> None:
        """`quota`: bytes of all that one owner has; `seconds`: how long an object is kept after its last use."""
        self.folder = folder
        self.quota = quota
        self.seconds = seconds
        self._database = Database(folder, PARAMETER)

    def close(self) -> None:
        self._database.close()

    # ---- responses ---------------------------------------------------------------------------------------------

    async def keep(
        self, owner: str, response: dict[str, Any], items: Sequence[Item], continued: Continued, *, store: bool
    ) -> None:
        """Keep a finished response, and add its items to its conversation."""
        body, outputs = _without_output(response)

        def write(connection: Connection) -> None:
            new = [*items, *outputs]
            copies = (1 if store else 0) + (1 if continued.conversation else 0)
            needed = (OVERHEAD + len(body) if store else 0) + copies * sum(
                OVERHEAD + len(_encode(item)) for item in new
            )
            self._make_room(connection, owner, needed, continued.objects)
            if store:
                columns = (response["previous_response_id"], continued.conversation, response["status"], None)
                self._insert(connection, owner, "response", response["id"], body, columns, continued.objects)
                self._add_items(connection, owner, response["id"], items, is_output=False)
                self._add_items(connection, owner, response["id"], outputs, is_output=True)
            self._end_turn(connection, owner, continued, new)

        await self._database.write(write)

    async def response(self, owner: str, response_id: str) -> dict[str, Any]:
        return await self._database.read(lambda connection: self._response(connection, owner, response_id))

    async def delete(self, owner: str, kind: Kind, object_id: str) -> None:
        def write(connection: Connection) -> None:
            self._find(connection, owner, kind, object_id)
            connection.execute("DELETE FROM objects WHERE id = ?", (object_id,))

        await self._database.write(write)

    async def list_items(self, owner: str, kind: Kind, object_id: str, page: Page) -> dict[str, Any]:
        """Return a part of the input of a response, or of a conversation; a shorter one if its items are large."""

        def read(connection: Connection) -> dict[str, Any]:
            self._find(connection, owner, kind, object_id)
            place: int | None = None
            if page.after is not None:
                given = (object_id, page.after)
                row = connection.execute("SELECT position FROM items WHERE object = ? AND id = ?", given).fetchone()
                if row is None:
                    raise InvalidParameter("after", "is not an id of this list")
                place = row[0]
            sign, direction = (">", "ASC") if page.order == "asc" else ("<", "DESC")
            query = f"""SELECT id, body FROM items WHERE object = ? AND (is_output = 0 OR ? = 'conversation')
                AND (? IS NULL OR position {sign} ?) ORDER BY position {direction}"""
            found: list[tuple[str, bytes]] = []
            size = 0
            for item_id, body in connection.execute(query, (object_id, kind, place, place)):
                size += len(body)
                if len(found) == page.limit or (found and size > MAX_EARLIER_BYTES):
                    return _item_list(found, has_more=True)
                found.append((item_id, body))
            return _item_list(found)

        return await self._database.read(read)

    async def items_by_id(self, owner: str, ids: Sequence[str]) -> dict[str, Item]:
        """Return those items with these ids that the owner has anywhere, of those with the same id the last one. An id
        that is named several times counts as often."""

        def read(connection: Connection) -> dict[str, Item]:
            query = f"""SELECT items.id, max(position), items.size FROM items JOIN objects ON objects.id = items.object
                WHERE items.id IN ({_marks(ids)}) AND owner = ? AND used > ? GROUP BY items.id"""
            rows = connection.execute(query, (*ids, owner, self._since())).fetchall()
            counts = Counter(ids)
            size = sum(counts[item_id] * each for item_id, _, each in rows)
            if size > MAX_EARLIER_BYTES:
                problem = f"names items with {size} bytes; the limit is {MAX_EARLIER_BYTES}"
                raise InvalidParameter("input", problem, "conversation_too_long")
            query = "SELECT body FROM items WHERE position = ?"
            return {item_id: _decode(connection.execute(query, (place,)).fetchone()[0]) for item_id, place, _ in rows}

        return await self._database.read(read)

    async def after_response(self, owner: str, response_id: str) -> Continued:
        """Return the items of a response and of all that it continues."""
        parameter = "previous_response_id"

        def read(connection: Connection) -> tuple[Continued, bool]:
            columns = "objects.id, objects.previous, objects.conversation, objects.status, objects.used"
            own = "objects.owner = :owner AND objects.kind = 'response' AND objects.used > :since"
            query = f"""WITH RECURSIVE chain AS (SELECT {columns} FROM objects WHERE id = :id AND {own}
                UNION ALL SELECT {columns} FROM chain JOIN objects ON objects.id = chain.previous AND {own})
                SELECT * FROM chain LIMIT :most"""
            given = {"id": response_id, "owner": owner, "since": self._since(), "most": MAX_MESSAGES}
            rows = connection.execute(query, given).fetchall()
            if not rows:
                raise InvalidParameter(parameter, "there is no such response", "previous_response_not_found")
            _check_can_be_continued(*rows[0][2:4])
            if rows[-1][1] is not None and len(rows) < MAX_MESSAGES:
                problem = f"continues {rows[-1][1]!r}, which was deleted or has expired"
                raise InvalidParameter(parameter, problem, "previous_response_not_found")
            ids = [row[0] for row in rows]
            earlier = _load_items(connection, ids, parameter)
            return Continued(earlier, ids), min(row[4] for row in rows) < time.time() - TOUCH_SECONDS

        return await self._touched(await self._database.read(read))

    async def after_conversation(self, owner: str, conversation_id: str) -> Continued:
        def read(connection: Connection) -> tuple[Continued, bool]:
            row = self._find(connection, owner, "conversation", conversation_id, "conversation")
            earlier = _load_items(connection, [conversation_id], "conversation")
            return Continued(earlier, [conversation_id], conversation_id), row[3] < time.time() - TOUCH_SECONDS

        return await self._touched(await self._database.read(read))

    # ---- background responses ----------------------------------------------------------------------------------

    async def queue(self, run: Run, response: dict[str, Any], items: Sequence[Item], continued: Continued) -> None:
        """Add a response that is not generated yet."""
        body, _ = _without_output(response)

        def write(connection: Connection) -> None:
            # The plus sign keeps SQLite from the index of owners, which is longer than that of runners.
            query = "SELECT count(*) FROM objects WHERE +owner = ? AND runner IS NOT NULL"
            if connection.execute(query, (run.owner,)).fetchone()[0] >= MAX_UNFINISHED:
                raise too_busy(f"{MAX_UNFINISHED} background responses are not finished yet; wait for one of them")
            columns = (response["previous_response_id"], continued.conversation, "queued", run.runner)
            self._insert(connection, run.owner, "response", run.id, body, columns, continued.objects)
            self._add_items(connection, run.owner, run.id, items, is_output=False)

        await self._database.write(write)

    async def begin(self, run: Run) -> bool:
        """Note that a response is being generated; False if it was cancelled or deleted before."""
        query = "UPDATE objects SET status = 'in_progress' WHERE id = ? AND status IN ('queued', 'in_progress')"
        return await self._database.write(lambda connection: connection.execute(query, (run.id,)).rowcount == 1)

    async def finish(self, run: Run, response: dict[str, Any], items: Sequence[Item], continued: Continued) -> None:
        """Keep a response that was generated in the background, unless it was cancelled or deleted meanwhile."""
        body, outputs = _without_output(response)

        def write(connection: Connection) -> None:
            if self._replace(connection, run, body, response["status"]):
                self._add_items(connection, run.owner, run.id, outputs, is_output=True)
                self._end_turn(connection, run.owner, continued, [*items, *outputs])

        await self._database.write(write)

    async def fail(self, run: Run, code: str, message: str) -> None:
        """Note why a response could not be generated."""
        await self._database.write(lambda connection: self._fail(connection, run, code, message))

    async def fail_all(self, runner: str, message: str) -> int:
        """Note that a process has ended before its responses were generated; return how many there were."""

        def write(connection: Connection) -> int:
            rows = connection.execute("SELECT id, owner FROM objects WHERE runner = ?", (runner,)).fetchall()
            for object_id, owner in rows:
                self._fail(connection, Run(object_id, owner, runner), "server_error", message)
            connection.execute("UPDATE objects SET runner = NULL WHERE runner = ?", (runner,))
            return len(rows)

        return await self._database.write(write)

    async def runners(self) -> set[str]:
        query = "SELECT DISTINCT runner FROM objects WHERE runner IS NOT NULL"
        return {name for (name,) in await self._database.read(lambda connection: connection.execute(query).fetchall())}

    async def end(self, run: Run) -> None:
        """Note that no further events follow."""
        # One whose end could not be noted is left to `fail_all`.
        query = f"UPDATE objects SET runner = NULL WHERE id = ? AND status NOT IN ({_marks(UNFINISHED)})"
        await self._database.write(partial(_execute, query, (run.id, *UNFINISHED)))

    async def add_events(self, run: Run, first: int, events: bytes) -> bool:
        """Keep further events of a response; False if it was cancelled or deleted."""

        def write(connection: Connection) -> bool:
            row = connection.execute("SELECT status FROM objects WHERE id = ?", (run.id,)).fetchone()
            if row is None or row[0] == "cancelled":
                return False
            if events:
                self._grow(connection, run.owner, run.id, OVERHEAD + len(events))
                connection.execute("INSERT INTO events VALUES (?, ?, ?)", (run.id, first, events))
            return True

        return await (self._database.write if events else self._database.read)(write)

    async def events(self, owner: str, response_id: str, first: int) -> tuple[list[tuple[int, bytes]], bool]:
        """Return the events that are kept from the piece on that has the event `first`, each piece with its first
        number, and whether there may be more later."""

        def read(connection: Connection) -> tuple[list[tuple[int, bytes]], bool]:
            row = self._find(connection, owner, "response", response_id)
            query = """SELECT first, body FROM events WHERE object = :id AND first >= coalesce(
                (SELECT max(first) FROM events WHERE object = :id AND first <= :first), 0) ORDER BY first LIMIT 100"""
            return connection.execute(query, {"id": response_id, "first": first}).fetchall(), row[2] is not None

        return await self._database.read(read)

    async def cancel(self, owner: str, response_id: str) -> dict[str, Any]:
        def write(connection: Connection) -> dict[str, Any]:
            response = self._response(connection, owner, response_id)
            if not response["background"]:
                problem = "only a response with background: true can be cancelled; close the connection of others"
                raise InvalidParameter("response_id", problem)
            query = f"UPDATE objects SET status = 'cancelled' WHERE id = ? AND status IN ({_marks(UNFINISHED)})"
            if connection.execute(query, (response_id, *UNFINISHED)).rowcount:
                response["status"] = "cancelled"
            return response

        return await self._database.write(write)

    # ---- conversations -----------------------------------------------------------------------------------------

    async def create_conversation(self, owner: str, metadata: dict[str, str], items: Sequence[Item]) -> dict[str, Any]:
        about = {"created_at": int(time.time()), "metadata": metadata}
        conversation: dict[str, Any] = {"id": f"conv_{uuid.uuid4().hex}", "object": "conversation", **about}

        def write(connection: Connection) -> None:
            body, columns = _encode(conversation), (None, None, "completed", None)
            self._insert(connection, owner, "conversation", conversation["id"], body, columns, ())
            self._add_items(connection, owner, conversation["id"], items, is_output=False)

        await self._database.write(write)
        return conversation

    async def conversation(self, owner: str, conversation_id: str) -> dict[str, Any]:
        return await self._database.read(lambda connection: self._conversation(connection, owner, conversation_id))

    async def update_conversation(self, owner: str, conversation_id: str, metadata: dict[str, str]) -> dict[str, Any]:
        def write(connection: Connection) -> dict[str, Any]:
            conversation = self._conversation(connection, owner, conversation_id)
            more = len(_encode(metadata)) - len(_encode(conversation["metadata"]))
            conversation["metadata"] = metadata
            self._grow(connection, owner, conversation_id, more)
            given = (_encode(conversation), time.time(), conversation_id)
            connection.execute("UPDATE objects SET body = ?, used = ? WHERE id = ?", given)
            return conversation

        return await self._database.write(write)

    async def add_to_conversation(self, owner: str, conversation_id: str, items: Sequence[Item]) -> dict[str, Any]:
        """Add items, and return the list of them with the ids that they have."""

        def write(connection: Connection) -> dict[str, Any]:
            self._find(connection, owner, "conversation", conversation_id)
            added = self._add_items(connection, owner, conversation_id, items, is_output=False)
            _touch(connection, [conversation_id])
            return _item_list(added)

        return await self._database.write(write)

    async def conversation_item(self, owner: str, conversation_id: str, item_id: str) -> msgspec.Raw:
        def read(connection: Connection) -> msgspec.Raw:
            self._find(connection, owner, "conversation", conversation_id)
            return msgspec.Raw(_item(connection, conversation_id, item_id)[0])

        return await self._database.read(read)

    async def remove_from_conversation(self, owner: str, conversation_id: str, item_id: str) -> dict[str, Any]:
        def write(connection: Connection) -> dict[str, Any]:
            conversation = self._conversation(connection, owner, conversation_id)
            _, size = _item(connection, conversation_id, item_id)
            connection.execute("DELETE FROM items WHERE object = ? AND id = ?", (conversation_id, item_id))
            self._grow(connection, owner, conversation_id, -size)
            return conversation

        return await self._database.write(write)

    # ---- what has expired --------------------------------------------------------------------------------------

    async def remove_expired(self) -> None:
        query = f"""DELETE FROM objects WHERE id IN
            (SELECT id FROM objects WHERE used <= ? AND runner IS NULL LIMIT {REMOVED_AT_ONCE})"""
        remove = partial(_execute, query, (self._since(),))
        removed = await self._database.write(remove)
        while removed == REMOVED_AT_ONCE:
            removed = await self._database.write(remove)
        await self._database.write(partial(_execute, "DELETE FROM usage WHERE bytes = 0", ()))
        await self._database.tidy()

    async def tidy(self) -> None:
        await self._database.tidy()

    def _since(self) -> float:
        """What was used at this time or before has expired."""
        return time.time() - self.seconds

    # ---- within a transaction ----------------------------------------------------------------------------------

    def _find(
        self, connection: Connection, owner: str, kind: Kind, object_id: str, parameter: str | None = None
    ) -> tuple[bytes, str, str | None, float]:
        """Return the body, the status, the runner and the last use of an object."""
        query = "SELECT body, status, runner, used FROM objects WHERE id = ? AND owner = ? AND kind = ? AND used > ?"
        row: tuple[bytes, str, str | None, float] | None
        row = connection.execute(query, (object_id, owner, kind, self._since())).fetchone()
        if row is None:
            raise APIError(404, f"there is no such {kind}", param=parameter or f"{kind}_id", code="not_found")
        return row

    def _response(self, connection: Connection, owner: str, response_id: str) -> dict[str, Any]:
        body, status, _, _ = self._find(connection, owner, "response", response_id)
        query = "SELECT body FROM items WHERE object = ? AND is_output = 1 ORDER BY position"
        output = [msgspec.Raw(item) for (item,) in connection.execute(query, (response_id,))]
        return {**_decode(body), "status": status, "output": output}

    def _conversation(self, connection: Connection, owner: str, conversation_id: str) -> dict[str, Any]:
        conversation: dict[str, Any] = _decode(self._find(connection, owner, "conversation", conversation_id)[0])
        return conversation

    def _insert(
        self,
        connection: Connection,
        owner: str,
        kind: Kind,
        object_id: str,
        body: bytes,
        columns: tuple[str | None, str | None, str, str | None],
        in_use: Sequence[str],
    ) -> None:
        """Add an object without items; `columns` are previous, conversation, status and runner."""
        self._make_room(connection, owner, OVERHEAD + len(body), in_use)
        now = time.time()
        values = (object_id, owner, kind, *columns, now, OVERHEAD + len(body), body)
        connection.execute(f"INSERT INTO objects VALUES ({_marks(values)})", values)

    def _add_items(
        self, connection: Connection, owner: str, object_id: str, items: Sequence[Item], *, is_output: bool
    ) -> list[tuple[str, bytes]]:
        """Add items to an object; return the id and the JSON of each. An id that the object has already is replaced."""
        ids = [item["id"] for item in items]
        query = f"SELECT id FROM items WHERE object = ? AND id IN ({_marks(ids)})"
        taken = {item_id for (item_id,) in connection.execute(query, (object_id, *ids))}
        added = [item | {"id": _other_id(item["id"])} if item["id"] in taken else item for item in items]
        bodies = [(item["id"], _encode(item)) for item in added]
        self._grow(connection, owner, object_id, sum(OVERHEAD + len(body) for _, body in bodies))
        rows = ((object_id, item_id, is_output, OVERHEAD + len(body), body) for item_id, body in bodies)
        connection.executemany("INSERT INTO items (object, id, is_output, size, body) VALUES (?, ?, ?, ?, ?)", rows)
        return bodies

    def _end_turn(self, connection: Connection, owner: str, continued: Continued, items: Sequence[Item]) -> None:
        """Add the items of a finished response to its conversation, and note the use of what it continues."""
        if continued.conversation is not None:
            self._find(connection, owner, "conversation", continued.conversation, "conversation")
            self._add_items(connection, owner, continued.conversation, items, is_output=False)
        _touch(connection, continued.objects)

    def _replace(self, connection: Connection, run: Run, body: bytes, status: str) -> bool:
        """Replace the body of a response that is not finished; False if it was cancelled or deleted."""
        query = f"SELECT length(body) FROM objects WHERE id = ? AND status IN ({_marks(UNFINISHED)})"
        row = connection.execute(query, (run.id, *UNFINISHED)).fetchone()
        if row is None:
            return False
        # The quota does not apply: every response must be able to end.
        given = (status, body, len(body) - row[0], time.time(), run.id)
        connection.execute("UPDATE objects SET status = ?, body = ?, size = size + ?, used = ? WHERE id = ?", given)
        return True

    def _fail(self, connection: Connection, run: Run, code: str, message: str) -> None:
        row = connection.execute("SELECT body FROM objects WHERE id = ?", (run.id,)).fetchone()
        if row is not None:
            response = _decode(row[0]) | {"status": "failed", "error": {"code": code, "message": message}}
            self._replace(connection, run, _encode(response), "failed")

    def _grow(self, connection: Connection, owner: str, object_id: str, amount: int) -> None:
        """Let an object count more bytes, or fewer."""
        if amount > 0:
            self._make_room(connection, owner, amount, [object_id])
        connection.execute("UPDATE objects SET size = size + ? WHERE id = ?", (amount, object_id))

    def _make_room(self, connection: Connection, owner: str, amount: int, in_use: Sequence[str]) -> None:
        """Remove what the owner has used longest ago until there is room for so many bytes. What `in_use` names stays,
        and so does what a response continues that is not finished."""
        row = connection.execute("SELECT bytes FROM usage WHERE owner = ?", (owner,)).fetchone()
        missing = (row[0] if row else 0) + amount - self.quota
        if missing <= 0:
            return
        query = f"""WITH RECURSIVE continued (id) AS (
                SELECT coalesce(previous, conversation) FROM objects WHERE +owner = ? AND runner IS NOT NULL
                UNION SELECT previous FROM continued JOIN objects USING (id))
            SELECT id, size FROM objects WHERE owner = ? AND runner IS NULL AND id NOT IN ({_marks(in_use)})
                AND id NOT IN (SELECT id FROM continued WHERE id IS NOT NULL) ORDER BY used, rowid"""
        removed = []
        for object_id, size in connection.execute(query, (owner, owner, *in_use)):
            removed.append((object_id,))
            missing -= size
            if missing <= 0:
                break
        else:
            problem = f"all responses and conversations would exceed the limit of {self.quota} bytes; delete some"
            raise InvalidParameter("store", problem, "quota_exceeded")
        connection.executemany("DELETE FROM objects WHERE id = ?", removed)

    async def _touched(self, found: tuple[Continued, bool]) -> Continued:
        continued, is_old = found
        if is_old:
            await self._database.write(lambda connection: _touch(connection, continued.objects))
        return continued


def _item_list(items: Sequence[tuple[str, bytes]], *, has_more: bool = False) -> dict[str, Any]:
    """Return OpenAI's list of items, given the id and the JSON of each."""
    ends = {"first_id": items[0][0], "last_id": items[-1][0]} if items else {"first_id": "", "last_id": ""}
    return {"object": "list", "data": [msgspec.Raw(body) for _, body in items], **ends, "has_more": has_more}


def _check_can_be_continued(conversation: str | None, status: str) -> None:
    if conversation is not None:
        problem = f"belongs to the conversation {conversation!r}; give that as conversation instead"
        raise InvalidParameter("previous_response_id", problem)
    if status not in ("completed", "incomplete"):
        raise InvalidParameter("previous_response_id", f"cannot be continued: it is {status}")


def _load_items(connection: Connection, ids: Sequence[str], parameter: str) -> Earlier:
    """Load the items of objects. Those of an object were added before those of an object that continues it."""
    counted = f"SELECT count(*), coalesce(sum(size), 0) FROM items WHERE object IN ({_marks(ids)})"
    count, size = connection.execute(counted, ids).fetchone()
    if count > MAX_MESSAGES or size > MAX_EARLIER_BYTES:
        problem = f"has {count} items with {size} bytes; the limits are {MAX_MESSAGES} and {MAX_EARLIER_BYTES}"
        raise InvalidParameter(parameter, problem, "conversation_too_long")
    query = f"SELECT body FROM items WHERE object IN ({_marks(ids)}) ORDER BY position"
    return Earlier([_decode(body) for (body,) in connection.execute(query, ids)], parameter, size)


def _item(connection: Connection, object_id: str, item_id: str) -> tuple[bytes, int]:
    query = "SELECT body, size FROM items WHERE object = ? AND id = ?"
    row: tuple[bytes, int] | None = connection.execute(query, (object_id, item_id)).fetchone()
    if row is None:
        raise APIError(404, "there is no such item", param="item_id", code="not_found")
    return row


def _touch(connection: Connection, ids: Sequence[str]) -> None:
    connection.execute(f"UPDATE objects SET used = ? WHERE id IN ({_marks(ids)})", (time.time(), *ids))


def _execute(query: str, values: Sequence[Any], connection: Connection) -> int:
    return connection.execute(query, values).rowcount


def _marks(values: Iterable[Any]) -> str:
    """Return SQL's placeholders for values."""
    return ", ".join("?" for _ in values)


def _other_id(item_id: str) -> str:
    return f"{item_id.partition('_')[0][:20]}_{uuid.uuid4().hex}"


def _without_output(response: dict[str, Any]) -> tuple[bytes, list[Item]]:
    return _encode({name: value for name, value in response.items() if name != "output"}), response["output"]
