"""What a command says before it ends without success: one line, and an exit code."""

from __future__ import annotations


class CommandError(Exception):
    """The command cannot do what was asked. `exit_code` is 2 where the way it was called is wrong, else 1."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(one_line(message))
        self.exit_code = exit_code


def one_line(message: str) -> str:
    return " ".join(message.split())
