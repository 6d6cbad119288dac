"""The program's standard streams: what it prints goes to the tests with its answers, what it reads comes from them."""

import io

LIMIT = 1 << 20  # bytes between two messages; the rest is dropped


class Capture(io.TextIOWrapper):
    """An output stream that keeps what is written."""

    def __init__(self):
        super().__init__(io.BytesIO(), "utf-8", "surrogatepass", newline="", write_through=True)

    def write(self, text):
        """Keep ``text`` if there is room."""
        return super().write(text) if self.buffer.tell() < LIMIT or type(text) is not str else len(text)

    def take(self):
        """What was written since the last time."""
        try:
            if not self.buffer.tell():
                return ""
            said = self.buffer.getvalue()[:LIMIT].decode("utf-8", "replace")
            self.buffer.seek(0)
            self.buffer.truncate()
            return said
        except ValueError:  # the code has closed it
            return ""


class Input(io.TextIOBase):
    """The tests' ``sys.stdin``; empty while the code is loaded."""

    def __init__(self, program):
        self.program = program

    def readable(self):
        """True."""
        return True

    def read(self, size=-1):
        """The rest, or ``size`` characters."""
        return self.program.request({"op": "read"}, [-1 if size is None else size]) if self.program.serving else ""

    def readline(self, size=-1):
        """The next line."""
        return self.program.request({"op": "readline"}, [size]) if self.program.serving else ""

    @property
    def buffer(self):
        """The rest as bytes."""
        return io.BytesIO(self.read().encode())
