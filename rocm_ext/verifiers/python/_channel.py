"""Messages over pipes. This runs inside the sandboxes with the standard library alone.

The program's messages are JSON. Those to the program come from trusted code, so marshal carries them, which needs no
import. The program imports nothing at its start that the interpreter has not loaded already: that time counts for every
verdict. ``os`` is not loaded, ``posix`` is.
"""

import marshal
import posix

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
    """Frames over two pipes: four bytes of length, then a message.

    Args:
        reader, writer: descriptors.
        dumps: makes bytes of a message; it raises ValueError for one that is nested too deeply.
        loads: makes a message of bytes.
    """

    def __init__(self, reader, writer, dumps, loads):
        self.reader, self.writer, self.dumps, self.loads = reader, writer, dumps, loads
        self.ahead = b""

    def send(self, message):
        """Send a dict.

        Raises:
            TooMuch: it is larger than MAX_FRAME.
            Closed: the other process has ended.
        """
        try:
            data = self.dumps(message)
        except ValueError as error:
            raise TooMuch(str(error)) from None
        if len(data) > MAX_FRAME:
            raise TooMuch(f"a value of {len(data)} bytes is larger than {MAX_FRAME}")
        data = memoryview(len(data).to_bytes(4, "big") + data)
        while data:
            try:
                data = data[posix.write(self.writer, data) :]
            except OSError:
                raise Closed from None

    def receive(self):
        """The next dict.

        Raises:
            Malformed: the message is no object, or too large.
            Closed: the other process has ended.
        """
        size = int.from_bytes(self._exactly(4), "big")
        if size > MAX_FRAME:
            raise Malformed(f"a message of {size} bytes")
        try:
            message = self.loads(self._exactly(size))
        except (ValueError, RecursionError) as error:
            raise Malformed(str(error)) from None
        if type(message) is not dict:
            raise Malformed("no object")
        return message

    def _exactly(self, count):
        parts = [self.ahead]
        have = len(self.ahead)
        while have < count:
            data = posix.read(self.reader, 1 << 16)
            if not data:
                raise Closed
            parts.append(data)
            have += len(data)
        data = b"".join(parts)
        self.ahead = data[count:]
        return data[:count]


def program_channel(reader, writer):
    """The program's end."""
    return Channel(reader, writer, json_writer(), marshal.loads)


def judge_channel(reader, writer):
    """The judge's end. It never gives the program's bytes to marshal, which is unsafe for them."""
    import json

    return Channel(reader, writer, marshal.dumps, json.loads)


def json_writer():
    """A function from a value to its JSON in bytes: ``json.dumps`` without its module, which imports re and enum."""
    try:
        from _json import encode_basestring_ascii, make_encoder

        encode = make_encoder(None, refuse, encode_basestring_ascii, None, ":", ",", False, False, True)
        return lambda value: "".join(encode(value, 0)).encode()
    except (ImportError, TypeError):  # another implementation of Python
        import json

        return lambda value: json.dumps(value, separators=(",", ":")).encode()


def refuse(value):
    """What the encoder calls for a value that JSON does not have."""
    raise TypeError(f"a {type(value).__name__} is not JSON")
