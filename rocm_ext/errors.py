"""What goes wrong for reasons a user can mend."""


class UserError(Exception):
    """One line for the user: what was found, what was expected and what to do.

    The recipes and ``rocm-ext`` print it without a traceback and exit with ``code``.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code
