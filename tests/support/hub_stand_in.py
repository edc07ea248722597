"""A stand-in for the hub's API, as far as pushing a folder of small files asks for it, and for what it refuses."""

from __future__ import annotations

import base64
import http.server
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

TOKEN = "hf_of_the_stand_in"


class Hub(http.server.ThreadingHTTPServer):
    """One repository. `refuse` answers a part of the API with a status, words and a code of the hub's; see `told`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files: dict[str, bytes] = {}
        self.private: bool | None = None  # None: there is no repository
        self.commits = 0
        self.asked: list[str] = []
        self.refuse: dict[str, Sequence[Any]] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def told(self, change: dict[str, Any]) -> dict[str, Any]:
        """Changes what the hub holds, for a rank in another process; what it holds then."""
        for name, content in change.get("files", {}).items():
            self.files[name] = content.encode()
        self.refuse = change.get("refuse", {})
        self.private = change.get("private", self.private)
        return {"files": sorted(self.files), "private": self.private, "commits": self.commits, "asked": self.asked}


class Answers(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self._answer({})

    def do_HEAD(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        lines = [json.loads(line) for line in body.splitlines()]
        self._answer(lines[0] if len(lines) == 1 else {"lines": lines})

    def _answer(self, body: dict[str, Any]) -> None:
        hub, part = self.server, self.path.partition("?")[0].removeprefix("/api/")
        if part == "told":
            return self._send(200, hub.told(body))
        hub.asked.append(part)
        for key, (status, words, *code) in hub.refuse.items():
            if key in part:
                return self._send(status, {"error": words}, *code)
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self._send(401, {"error": "Invalid username or password."})
        if part == "repos/create":
            return self._create(body)
        if part.startswith("models/") and hub.private is None:
            return self._send(404, {"error": "Repository not found"})
        if part == "validate-yaml":
            return self._send(200, {"errors": [], "warnings": []})
        action = part.removeprefix("models/me/notes").strip("/").partition("/")[0]
        return self._send(200, getattr(self, f"_{action or 'info'}")(body))

    def _create(self, body: dict[str, Any]) -> None:
        url = f"{self.server.address}/{body['organization']}/{body['name']}"
        if self.server.private is not None:
            return self._send(409, {"error": "You already created this model repo", "url": url})
        self.server.private = body["visibility"] == "private"
        return self._send(200, {"url": url})

    def _info(self, _: Any) -> dict[str, Any]:
        return {"id": "me/notes", "private": self.server.private, "sha": "0" * 40, "siblings": [], "tags": []}

    def _tree(self, _: Any) -> Any:
        return [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in self.server.files]

    def _preupload(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in body["files"]]}

    def _commit(self, body: dict[str, Any]) -> dict[str, Any]:
        for line in body["lines"]:
            if line["key"] == "file":
                self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            if line["key"] == "deletedFile":
                del self.server.files[line["value"]["path"]]
        self.server.commits += 1
        url = f"{self.server.address}/me/notes/commit/{self.server.commits:040x}"
        return {"commitUrl": url, "commitOid": f"{self.server.commits:040x}", "success": True}

    def _send(self, status: int, content: Any, code: str | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status >= 400:
            self.send_header("X-Error-Message", content["error"])
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def hub() -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
