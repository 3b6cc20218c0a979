"""Finds out within seconds whether the hub can be reached.

A machine without a network can spend a minute in a name lookup or in a connection attempt, and the hub's library sets no limit to some of
its requests. So the first request of a process is preceded by one bounded attempt to connect. Knows sockets and proxies; sends nothing.
"""

from __future__ import annotations

import queue
import socket
import threading
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from mlxspec.errors import ModelError

PATIENCE = 4.0  # seconds for the name lookup and the connection together

_reached: set[tuple[str, int]] = set()


def check_reachable(what: str) -> None:
    """Raise ModelError within PATIENCE seconds where nothing answers at the hub's address, or at the proxy's that leads there.

    what: what is to be fetched, for the sentence. A hub that has answered once is not asked again.
    """
    from huggingface_hub import constants

    host, port = _place(constants.ENDPOINT)
    if (host, port) in _reached:
        return
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    # a name lookup has no time limit of its own: the thread is left behind where it hangs
    threading.Thread(target=lambda: answers.put(_attempt(host, port)), daemon=True).start()
    try:
        why = answers.get(timeout=PATIENCE)
    except queue.Empty:
        why = f"no answer within {PATIENCE:g} seconds"
    if why is not None:
        raise ModelError(f"{what} cannot be fetched: {host} cannot be reached ({why}).")
    _reached.add((host, port))


def _place(endpoint: str) -> tuple[str, int]:
    """Host and port that a request to `endpoint` connects to: its own, or a proxy's."""
    url = urlsplit(endpoint)
    host = url.hostname or endpoint
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(host):
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        host = url.hostname or host
    return host, url.port or (80 if url.scheme == "http" else 443)


def _attempt(host: str, port: int) -> str | None:
    """Why there is no connection, None where there is one."""
    try:
        with socket.create_connection((host, port), timeout=PATIENCE):
            return None
    except TimeoutError:
        return f"no answer within {PATIENCE:g} seconds"
    except (OSError, UnicodeError, ValueError) as error:
        return (getattr(error, "strerror", None) or str(error)).rstrip(".").lower()
