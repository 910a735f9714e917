"""Who calls: bearer tokens from a file, the tenant that each stands for, and what it may do.

The file is TOML, one `[[token]]` table each, and is read again when it changes. Knows no RPC (server/auth.py asks)
and does not count what a caller uses (server/limits.py does).
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engine.errors import ConfigError, PermissionDeniedError, UnauthenticatedError
from server.reload import Reloaded

MIN_TOKEN_CHARS = 16  # a token is a random string, never a word
SECONDS_BETWEEN_LOOKS = 1.0  # at the file
SEPARATOR = "/"  # no tenant's name has one


@dataclass(frozen=True)
class Caller:
    """The one who sent a call. Without a token file everybody is the nameless tenant, without limits."""

    tenant: str = ""
    key: str = ""  # names the token in memory, not its value: limits are counted by it
    max_concurrent_requests: int | None = None
    tokens_per_minute: int | None = None
    min_priority: int | None = None  # the most urgent one that it may ask for; lower is sooner
    is_admin: bool = True

    def scoped(self, name: str) -> str:
        """A name that a client chose (request id, cache salt), as the engine has it: no tenant can name that of another
        one.
        """
        return f"{self.tenant}{SEPARATOR}{name}" if self.tenant else name

    def require_admin(self) -> None:
        if not self.is_admin:
            raise PermissionDeniedError("the token is not one of an administrator (`admin = true`)")


def unscoped(tenant: str, name: str) -> str:
    """The name as its client chose it."""
    return name.removeprefix(f"{tenant}{SEPARATOR}") if tenant else name


ANYBODY = Caller()
GATEWAY = Caller(
    tenant="@gateway", key="@gateway", min_priority=0, is_admin=False
)  # no token has this tenant
current_caller: ContextVar[Caller] = ContextVar("current_caller", default=ANYBODY)


class _TokenEntry(BaseModel):
    """One `[[token]]` of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    tenant: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    value: str | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None  # instead of the value
    max_concurrent_requests: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    min_priority: int = 0
    admin: bool = False

    @model_validator(mode="after")
    def _check_value(self) -> _TokenEntry:
        if (self.value is None) == (self.sha256 is None):
            raise ValueError("expected either value or sha256")
        if self.value is not None and not re.fullmatch(rf"[!-~]{{{MIN_TOKEN_CHARS},}}", self.value):
            raise ValueError(
                f"expected a value of at least {MIN_TOKEN_CHARS} printable ASCII characters, no spaces"
            )
        return self

    def to_caller(self) -> Caller:
        digest = self.sha256 if self.value is None else hashlib.sha256(self.value.encode()).hexdigest()
        assert digest is not None
        return Caller(
            tenant=self.tenant,
            key=digest,
            max_concurrent_requests=self.max_concurrent_requests,
            tokens_per_minute=self.tokens_per_minute,
            min_priority=self.min_priority,
            is_admin=self.admin,
        )


class _TokenFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    token: tuple[_TokenEntry, ...]


class Callers:
    """The tokens of a file."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the file cannot be used."""
        self._source = Reloaded([path], lambda: read_tokens(path), min_interval=SECONDS_BETWEEN_LOOKS)

    def authenticate(self, metadata: Mapping[str, str | bytes]) -> Caller:
        """Raises UnauthenticatedError. Takes the same time whichever tokens there are and however much of one is
        right: digests are compared, all of them, none of them only in part.
        """
        scheme, _, token = str(metadata.get("authorization", "")).partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise UnauthenticatedError("got no bearer token, expected metadata `authorization: Bearer TOKEN`")
        digest = hashlib.sha256(token.strip().encode()).hexdigest()
        found: Caller | None = None
        for caller in self._source.current():
            if hmac.compare_digest(digest, caller.key):
                found = caller
        if found is None:
            raise UnauthenticatedError("got a bearer token that this server does not know")
        return found


Authenticate = Callable[[Mapping[str, str | bytes]], Caller]


def read_tokens(path: Path) -> tuple[Caller, ...]:
    """Raises ConfigError, which never quotes a token."""
    try:
        entries = _TokenFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).token
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"auth_tokens: cannot read {path}: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"auth_tokens: {path}: {_describe(error)}") from None
    callers = tuple(entry.to_caller() for entry in entries)
    keys = [caller.key for caller in callers]
    if len(set(keys)) < len(keys):
        raise ConfigError(f"auth_tokens: {path}: got a token twice, expected each once")
    return callers


def _describe(error: ValidationError) -> str:
    """Which field and what is expected; not what was got, as that may be a token."""
    return "; ".join(
        f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_input=False)
    )
