"""A parser for tool calls that are bare JSON objects."""

from __future__ import annotations

from chairlift.text.tools.call_parser import CallParser
from chairlift.text.tools.reader import SPACES, Reading


class BareJSONParser(CallParser):
    """Parses calls that are JSON objects without any marker."""

    arguments_optional = False  # only the arguments distinguish {"name": …} from any other JSON

    def read_objects(self) -> Reading[None]:
        """One object, or several with ; or , between them."""
        while True:
            yield from self.read_object()
            yield from self.reader.run(SPACES)
            if (yield from self.reader.peek()) not in (";", ","):
                return
            self.reader.at += 1
            yield from self.reader.run(SPACES)
