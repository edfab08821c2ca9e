"""API keys, kept as hashes. A key's name is its tenant; several may have one name, so that one can replace another.

A key is random and long, so that it cannot be searched for by its plain SHA-256. A slow hash guards words that people
choose; here it would only let anybody who sends wrong keys keep the server busy.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

SHORTEST_SOUND = 16
"""Characters; a shorter key can be searched for, whatever the hash."""

HEAVIEST = 1000.0
"""The largest weight; the smallest is one over it."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-fA-F]{64}", re.ASCII)
_WEIGHT = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Key:
    """What is known of a key: whose it is, its SHA-256, and the tenant's weight among others that wait."""

    name: str
    digest: bytes
    weight: float = 1.0

    @classmethod
    def of(cls, name: str, secret: str, weight: float = 1.0) -> Key:
        """Raises ValueError, without repeating the key, for one that a header cannot carry or a name that is none."""
        if not _NAME.fullmatch(name):
            raise ValueError("the name of a key is 1 to 64 letters, digits, dots, dashes or underscores")
        if not (secret.isascii() and secret.isprintable() and secret and " " not in secret):
            raise ValueError("a key is printable ASCII without spaces")
        if not HEAVIEST >= weight >= 1 / HEAVIEST:
            raise ValueError(f"a weight is {1 / HEAVIEST:g} to {HEAVIEST:g}")
        return cls(name, sha256(secret.encode()).digest(), weight)

    @classmethod
    def parse(cls, line: str) -> Key:
        """`name:sha256hex` or `name:sha256hex:weight`. Raises ValueError, without repeating the line: it may be a key
        itself."""
        name, _, rest = line.strip().partition(":")
        digest, colon, weight = rest.partition(":")
        if not _NAME.fullmatch(name) or not _DIGEST.fullmatch(digest):
            raise ValueError("not name:sha256, the SHA-256 of the key in 64 hexadecimal digits")
        if colon and not (_WEIGHT.fullmatch(weight) and HEAVIEST >= float(weight) >= 1 / HEAVIEST):
            raise ValueError(f"the weight after the SHA-256 is {1 / HEAVIEST:g} to {HEAVIEST:g}")
        return cls(name, bytes.fromhex(digest), float(weight) if colon else 1.0)

    def __str__(self) -> str:
        return f"{self.name}:{self.digest.hex()}" + ("" if self.weight == 1 else f":{self.weight:g}")


def new_secret() -> str:
    """A key of 256 random bits."""
    return f"sf-{secrets.token_urlsafe(32)}"


def parse_keys(value: Any) -> tuple[Key, ...]:
    """Lines, or one text of them with commas. Raises ValueError."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, Iterable):
        raise ValueError("not a list of name:sha256")
    return tuple(item if isinstance(item, Key) else Key.parse(str(item)) for item in items)


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys of a file, one `name:sha256` or `name:sha256:weight` a line. Blank lines and those that begin with # do
    not count.

    Raises ValueError, in one line with the line's number, for a file that cannot be read, has a wrong line, or none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    keys = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            keys.append(Key.parse(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not keys:
        raise ValueError(f"{path} has no keys")
    weights: dict[str, float] = {}
    for key in keys:
        if weights.setdefault(key.name, key.weight) != key.weight:
            raise ValueError(f"{path}: the keys of {key.name} have different weights")
    return tuple(keys)


def known(secret: bytes, keys: Iterable[Key]) -> Key | None:
    """The key that it is. The time that this takes does not tell how much of a hash was right, nor which key it was."""
    digest = sha256(secret).digest()
    found = None
    for key in keys:
        if hmac.compare_digest(digest, key.digest):
            found = key
    return found
