"""The settings of a server, checked when they are made."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field

from mlxspec.config import MAX_CONTEXT, SamplingParams
from mlxspec.errors import ConfigError
from mlxspec.option import check_options, option
from mlxspec.server.http.limits import ServerLimits

DEFAULT_MAX_TOKENS = MAX_CONTEXT  # no limit but the context
KEY_VARIABLE = "MLXSPEC_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The settings of a server. host: an address other than this machine's own needs an api_key. allowed_origins: web pages and
    extensions that may use the server, in addition to pages and programs of this machine; `scheme://*` means all origins of a scheme
    other than http and https. limits: bounds on the work that a client may cause. idle_unload: seconds without a request after which
    the model leaves memory. keepalive_seconds: the longest time without any bytes in a stream. params: the sampling of requests where
    neither the request nor the model sets it; its max_tokens is the limit of an answer to a request that sets none. Raises
    ConfigError."""

    # fmt: off
    host: str = option(str, "127.0.0.1", "address to listen on; all but this machine's own need a key", metavar="ADDRESS")
    port: int = option(int, 8080, "port to listen on, 0 for any that is free", 0, 65535, "N")
    api_key: str | None = option(
        str, None, "what clients must send, @FILE to read it from a file", metavar="KEY", unset=f"{KEY_VARIABLE} of the environment"
    )
    allowed_origins: tuple[str, ...] = option(list, (), "an origin that may call, like https://example.com", metavar="ORIGIN")
    allowed_hosts: tuple[str, ...] = option(list, (), "another host name of this machine that requests may use", metavar="NAME")
    idle_unload: float | None = option(
        float, None, "unload the model after this time without a request", 0.1, 1e9, "SECONDS", unset="never"
    )
    strict_models: bool = option(bool, False, "answer 404 to a request for a model that is not served, not by the one that is")
    record: str | None = option(str, None, "append each answer with its prompt to this file, for `mlxspec prove`", metavar="FILE")
    # fmt: on
    limits: ServerLimits = field(default_factory=ServerLimits)
    keepalive_seconds: float = 5.0
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=DEFAULT_MAX_TOKENS))

    def __post_init__(self) -> None:
        check_options(self)
        if self.api_key is not None and len(self.api_key) < 4:
            raise ConfigError("The API key must have at least 4 characters.")
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(
                r"https?://[^/*]+|(?!https?:)[a-z][a-z0-9+.-]*://[^/]+", origin
            ):
                raise ConfigError(
                    f"An allowed origin looks like https://example.com or chrome-extension://ID, not {origin!r}."
                )
        if self.api_key is None and (not self.is_local or "*" in self.allowed_origins):
            what = f"Listening on {self.host}" if not self.is_local else "Letting every web page in"
            raise ConfigError(f"{what} needs an API key: give one with --api-key or in MLXSPEC_API_KEY.")

    @property
    def is_local(self) -> bool:
        """Return whether only this machine can reach the server."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
