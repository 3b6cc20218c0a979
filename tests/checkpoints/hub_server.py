"""A stand-in of the hub on this machine: the endpoints that Hugging Face's library asks, over folders of files, counting what it serves.

Knows HTTP and the hub's headers; knows nothing of mlxspec.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import prod
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c0ffee" + 34 * "0"


class HubServer:
    """repos: id -> folder. gated: ids whose files need `Bearer TOKEN`, while everybody may ask about them. served: bytes of content by file
    name, GET only. cards: id -> what the front matter of its README says.

    stall_after: a GET of a file in it sends so many bytes of that file, sets `stalled` and then nothing more. break_after: as that, but the
    connection is closed there, every time. ignores_ranges: files that are sent whole whatever range was asked for.
    """

    TOKEN = "hf_for_the_tests"

    def __init__(self) -> None:
        self.repos: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.served: Counter[str] = Counter()
        self.requests: list[str] = []
        self.cards: dict[str, dict[str, Any]] = {}
        self.stall_after: dict[str, int] = {}
        self.break_after: dict[str, int] = {}
        self.ignores_ranges: set[str] = set()
        self.stalled, self.released = threading.Event(), threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                hub._answer(self, body=False)

            def do_GET(self) -> None:
                hub._answer(self, body=True)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        url = urlsplit(request.path)
        path = unquote(url.path)
        self.requests.append(f"{request.command} {path}")
        if path == "/api/models":
            return self._search(request, parse_qs(url.query))
        api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models/").strip("/").split("/")
        repo = "/".join(parts[:2])
        if repo not in self.repos:
            return self._error(request, 401, "RepoNotFound")
        if repo in self.gated and not api and request.headers.get("authorization") != f"Bearer {self.TOKEN}":
            return self._error(request, 401, "GatedRepo")
        revision = parts[3] if len(parts) > 3 else "main"
        if revision not in ("main", COMMIT):
            return self._error(request, 404, "RevisionNotFound")
        files = sorted(p for p in self.repos[repo].rglob("*") if p.is_file())
        if api and (len(parts) == 2 or parts[2] == "revision"):
            entries = [
                {
                    "rfilename": str(p.relative_to(self.repos[repo])),
                    "size": p.stat().st_size,
                    **_oid(p, "blobId", "sha256"),
                }
                for p in files
            ]
            return self._json(
                request,
                {"id": repo, "sha": COMMIT, "siblings": entries, "cardData": self.cards.get(repo, {})},
            )
        if api and parts[2] == "tree":
            entries = [
                {
                    "type": "file",
                    "path": str(p.relative_to(self.repos[repo])),
                    "size": p.stat().st_size,
                    **_oid(p, "oid", "oid"),
                }
                for p in files
            ]
            return self._json(request, entries)
        file = self.repos[repo] / "/".join(parts[4:])
        if not file.is_file():
            return self._error(request, 404, "EntryNotFound")
        return self._file(request, file, body=body)

    def _file(self, request: BaseHTTPRequestHandler, file: Path, *, body: bool) -> None:
        content, ids = file.read_bytes(), _oid(file, "oid", "oid")
        start, end, asked = 0, len(content), request.headers.get("range")
        asked = None if file.name in self.ignores_ranges else asked
        if asked is not None:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1, end) if last else end
        request.send_response(206 if asked is not None else 200)
        if asked is not None:
            request.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        request.send_header("Content-Length", str(end - start if body else len(content)))
        request.send_header("Accept-Ranges", "bytes")
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("ETag", f'"{ids.get("lfs", {}).get("oid") or ids["oid"]}"')
        if "lfs" in ids:
            request.send_header("X-Linked-Etag", f'"{ids["lfs"]["oid"]}"')
            request.send_header("X-Linked-Size", str(len(content)))
        request.end_headers()
        if not body:
            return
        rest = content[start:end]
        if len(rest) > self.break_after.get(file.name, len(rest)):
            rest = rest[: self.break_after[file.name]]
            request.wfile.write(rest)
            self.served[file.name] += len(rest)
            request.close_connection = True
            return
        if file.name in self.stall_after:
            rest = rest[: self.stall_after.pop(file.name)]
            request.wfile.write(rest)
            request.wfile.flush()
            self.served[file.name] += len(rest)
            self.stalled.set()
            self.released.wait(120)
            request.close_connection = True
            return
        request.wfile.write(rest)
        self.served[file.name] += len(rest)

    def _search(self, request: BaseHTTPRequestHandler, query: dict[str, list[str]]) -> None:
        """What the hub's list of models says, of the repositories whose ids hold all words, each with its config."""
        words = query.get("search", [""])[0].lower().split()
        found = []
        for repo, folder in self.repos.items():
            if not all(word in repo.lower() for word in words) or not (folder / "config.json").is_file():
                continue
            config = json.loads((folder / "config.json").read_text())
            counts: Counter[str] = Counter()
            for path in folder.glob("*.safetensors"):
                raw = path.read_bytes()
                header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
                for name, tensor in header.items():
                    if name != "__metadata__":
                        counts[tensor["dtype"]] += prod(tensor["shape"])
            entry: dict[str, Any] = {
                "id": repo,
                "config": _excerpt(config),
            }
            entry |= {"downloads": 7 * len(found), "gated": repo in self.gated and "manual"}
            entry |= {"cardData": self.cards.get(repo, {})}
            entry |= {"safetensors": {"parameters": counts, "total": sum(counts.values())}}
            found.append(entry)
        return self._json(request, found[: int(query.get("limit", ["100"])[0])])

    def _json(self, request: BaseHTTPRequestHandler, data: Any) -> None:
        content = json.dumps(data).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)

    def _error(self, request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        request.send_response(status)
        request.send_header("X-Error-Code", code)
        request.send_header("X-Error-Message", code)
        request.send_header("Content-Length", "0")
        request.end_headers()


def _oid(path: Path, name: str, sha_name: str) -> dict[str, Any]:
    """As the hub has it: weights are large files under their sha256, others are git blobs."""
    content = path.read_bytes()
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    if path.suffix != ".safetensors":
        return {name: git}
    sha = hashlib.sha256(content).hexdigest()
    return {name: git, "lfs": {sha_name: sha, "size": len(content), "pointerSize": 134}}


def _excerpt(config: dict[str, Any]) -> dict[str, Any]:
    """What the hub's list tells of a config.json: of a quantization of others the method alone, and the bits."""
    found = {k: config.get(k) for k in ("model_type", "quantization")}
    told = config.get("quantization_config")
    if isinstance(told, dict) and "quant_method" in told:
        found["quantization_config"] = {k: told[k] for k in ("quant_method", "bits") if k in told}
    return found
