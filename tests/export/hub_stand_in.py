"""A stand-in of the hub's HTTP interface on loopback: what huggingface_hub's client asks for when it uploads and loads.

Repositories are created, files are announced, large ones go through the LFS batch interface, a commit joins them, and
`resolve/main/FILE` gives them back. It keeps everything in memory and notes every request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_stand_in"
COMMIT = "1" * 40
LARGE = (".safetensors", ".onnx")


@dataclass
class Hub:
    """What the stand-in holds, and what it was asked."""

    address: str = ""
    private: dict[str, bool] = field(default_factory=dict)  # repository → whether it is private
    files: dict[str, bytes] = field(default_factory=dict)  # ORG/NAME/FILE → content
    blobs: dict[str, bytes] = field(default_factory=dict)  # SHA-256 → content
    requests: list[tuple[str, str]] = field(default_factory=list)  # method, path


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that listens on a free port of loopback."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        """Be quiet."""

    def do_POST(self) -> None:
        path, body = self._begin(), self._body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif path.endswith("/preupload/main"):
            self._announce(json.loads(body))
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._batch(json.loads(body))
        elif path.endswith("/commit/main"):
            self._commit(path.removeprefix("/api/models/").removesuffix("/commit/main"), body)
        else:
            self._answer(404, {"error": f"no such place: {path}"})

    def do_PUT(self) -> None:
        self._begin()
        body = self._body()
        self.hub.blobs[hashlib.sha256(body).hexdigest()] = body
        self._answer(200, {})

    def do_GET(self) -> None:
        path = self._begin()
        if path.startswith("/api/models/"):
            repo = path.removeprefix("/api/models/")
            if repo in self.hub.private:
                siblings = [{"rfilename": name.removeprefix(f"{repo}/")} for name in self.hub.files]
                about = {"id": repo, "private": self.hub.private[repo], "sha": COMMIT, "siblings": siblings}
                return self._answer(200, about)
            return self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        repo, _, name = path.removeprefix("/").partition("/resolve/")
        content = self.hub.files.get(f"{repo}/{name.partition('/')[2]}")
        if content is None:
            missing = "EntryNotFound" if repo in self.hub.private else "RepoNotFound"
            return self._answer(404, {"error": "not found"}, {"X-Error-Code": missing})
        return self._send(200, content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def _create(self, wanted: dict[str, Any]) -> None:
        repo = f"{wanted['organization']}/{wanted['name']}"
        if repo in self.hub.private:
            return self._answer(
                409, {"error": "You already created this model repo", "url": f"{self.hub.address}/{repo}"}
            )
        self.hub.private[repo] = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        return self._answer(200, {"url": f"{self.hub.address}/{repo}"})

    def _announce(self, wanted: dict[str, Any]) -> None:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                "shouldIgnore": False,
            }
            for file in wanted["files"]
        ]
        self._answer(200, {"files": files})

    def _batch(self, wanted: dict[str, Any]) -> None:
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.hub.address}/upload/{one['oid']}"}}}
            for one in wanted["objects"]
        ]
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _commit(self, repo: str, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.hub.files[f"{repo}/{value['path']}"] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.hub.files[f"{repo}/{value['path']}"] = self.hub.blobs[value["oid"]]
        self._answer(200, {"commitUrl": f"{self.hub.address}/{repo}/commit/{COMMIT}", "commitOid": COMMIT})

    def _begin(self) -> str:
        path = self.path.partition("?")[0]
        self.hub.requests.append((self.command, path))
        return path

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
