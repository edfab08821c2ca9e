"""Where a command's words go: results to standard output, progress to standard error, no library's between."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from deploy.errors import CommandError


class Output:
    """With `as_json`, standard output carries JSON only: what libraries and their processes print goes to standard
    error instead, by file descriptor, since some of them do not print through Python."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.results: TextIO = sys.stdout
        if as_json:
            sys.stdout.flush()
            self.results = os.fdopen(os.dup(1), "w", encoding="utf-8")
            os.dup2(2, 1)

    def progress(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def text(self, line: str) -> None:
        """A line for a person; says nothing where a machine reads."""
        if not self.as_json:
            print(line, file=self.results, flush=True)

    def json(self, content: dict[str, Any]) -> None:
        """One line for a machine; says nothing where a person reads."""
        if self.as_json:
            print(json.dumps(content), file=self.results, flush=True)


def check_file(option: str, file: Path | None) -> None:
    """Raises CommandError where nobody could write the file that an option names, if it names one: nothing is to run
    for minutes whose results have nowhere to go."""
    if file is None:
        return
    if not file.absolute().parent.is_dir():
        raise CommandError(f"{option}: there is no folder {file.absolute().parent}", 2)
    if file.is_dir():
        raise CommandError(f"{option}: {file} is a folder, where a file is needed", 2)


def mute() -> None:
    """Nothing more from this process and those that write through it: for the last moments, in which libraries report
    as errors that what they watch is being stopped."""
    sys.stdout.flush()
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)
