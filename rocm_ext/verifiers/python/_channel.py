"""Frames of JSON over pipes. This runs inside the sandboxes with the standard library alone."""

import json
import os

MAX_FRAME = 16 << 20  # bytes


class Malformed(Exception):
    """An invalid message."""


class Unsendable(Exception):
    """A value that no message can hold."""


class TooMuch(Unsendable):
    """A value that is too large or nested too deeply for a message."""


class Closed(Exception):
    """The other process has ended."""


class Channel:
    """Frames over two pipes: four bytes of length, then JSON."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    def send(self, message):
        """Send a dict.

        Raises:
            TooMuch: it is larger than MAX_FRAME.
            Closed: the other process has ended.
        """
        data = json.dumps(message, separators=(",", ":")).encode()
        if len(data) > MAX_FRAME:
            raise TooMuch(f"a value of {len(data)} bytes is larger than {MAX_FRAME}")
        data = memoryview(len(data).to_bytes(4, "big") + data)
        while data:
            try:
                data = data[os.write(self.writer, data) :]
            except OSError:
                raise Closed from None

    def receive(self):
        """The next dict.

        Raises:
            Malformed: the message is not a JSON object, or too large.
            Closed: the other process has ended.
        """
        size = int.from_bytes(self._exactly(4), "big")
        if size > MAX_FRAME:
            raise Malformed(f"a message of {size} bytes")
        try:
            message = json.loads(self._exactly(size))
        except (ValueError, RecursionError) as error:
            raise Malformed(str(error)) from None
        if type(message) is not dict:
            raise Malformed("no object")
        return message

    def _exactly(self, count):
        parts = []
        while count:
            data = os.read(self.reader, min(count, 1 << 20))
            if not data:
                raise Closed
            parts.append(data)
            count -= len(data)
        return b"".join(parts)
