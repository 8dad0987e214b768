"""A W&B server on the loopback interface that keeps what the real client sends, as far as runs and their files go.

It speaks the part of GraphQL and of the file stream that `wandb.init`, `wandb sync` and a resume use. Lines of a file
stream go to their offset, as W&B's server puts them: a client that begins again at 0 overwrites.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
from dataclasses import dataclass, field
from typing import Any

from rl.loggers.wandb import WandbLogger
from tests.loopback import Handler, LoopbackServer
from tests.processes import wait_until


@dataclass
class StoredRun:
    """One run, as the server knows it."""

    name: str
    project: str
    fields: dict[str, Any] = field(default_factory=dict)
    """displayName, groupName, tags, config and so on of the last upsert that gave them."""
    history: dict[int, str] = field(default_factory=dict)
    """JSON lines by offset."""
    summary: str = "{}"
    exit_code: int | None = None
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(self.history[offset]) for offset in sorted(self.history)]

    @property
    def config(self) -> dict[str, Any]:
        return {key: entry["value"] for key, entry in json.loads(self.fields["config"]).items() if "value" in entry}


class WandbServer(LoopbackServer):
    def __init__(self) -> None:
        self.runs: dict[str, StoredRun] = {}
        self.received = b""
        """Every byte of every request, for tests that look for what must not be sent."""
        self._lock = threading.Lock()
        super().__init__(_handler(self))

    def answer(self, method: str, path: str, body: bytes) -> dict[str, Any]:
        with self._lock:
            self.received += path.encode() + b"\n" + body + b"\n"
            if path == "/graphql":
                request = json.loads(body)
                found = re.search(r"(?:query|mutation) (\w+)", request["query"])
                return {"data": self._graphql(found[1] if found else "", request.get("variables") or {})}
            if path.endswith("/file_stream"):
                self._take_stream(self.runs[path.split("/")[-2]], json.loads(body))
                return {"limits": {}}
            if method == "PUT" and path.startswith("/upload/"):
                _, _, run, name = path.split("/", 3)
                self.runs[run].files[name] = body
            return {}

    def _graphql(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:  # noqa: PLR0911
        match operation:
            case "UpsertBucket":
                return {"upsertBucket": self._upsert(variables)}
            case "RunResumeStatus":
                return {"model": self._resume_status(variables)}
            case "CreateRunFiles":
                return {"createRunFiles": self._upload_places(variables)}
            case "CreateArtifact":  # as if the server had it already: nothing more is uploaded of it
                return {"createArtifact": {"artifact": {"id": "QQ==", "state": "COMMITTED", "artifactSequence": {}}}}
            case "ArtifactType":
                return {"project": None}
            case "Viewer":
                return {"viewer": {"id": "VQ==", "entity": "team", "username": "user", "flags": "{}", "teams": None}}
            case _:
                return {"serverInfo": {"features": []}}

    def _upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables["name"]
        is_new = name not in self.runs
        run = self.runs.setdefault(name, StoredRun(name, variables["project"]))
        run.fields |= {key: value for key, value in variables.items() if value is not None}
        bucket = {
            "id": "Ug==",
            "name": name,
            "displayName": run.fields.get("displayName", name),
            "description": None,
            "config": run.fields.get("config", "{}"),
            "sweepName": None,
            "historyLineCount": len(run.history),
            "project": {"id": "UA==", "name": run.project, "entity": {"id": "RQ==", "name": "team"}},
        }
        return {"bucket": bucket, "inserted": is_new}

    def _resume_status(self, variables: dict[str, Any]) -> dict[str, Any] | None:
        run = self.runs.get(variables["name"])
        if run is None:
            return None
        tail = [run.history[offset] for offset in sorted(run.history)[-1:]]
        bucket = {
            "id": "Ug==",
            "notes": None,
            "name": run.name,
            "displayName": run.fields.get("displayName"),
            "summaryMetrics": run.summary,
            "historyLineCount": len(run.history),
            "logLineCount": 0,
            "eventsLineCount": 0,
            "historyTail": json.dumps(tail),
            "eventsTail": "[]",
            "config": run.fields.get("config", "{}"),
            "tags": run.fields.get("tags"),
            "wandbConfig": json.dumps({"t": 1}),
        }
        return {
            "id": "UA==",
            "name": run.project,
            "entity": {"id": "RQ==", "name": "team"},
            "bucket": bucket | {"id": "Ug==", "notes": None},
        }

    def _upload_places(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = variables["run"]
        files = [{"name": name, "uploadUrl": f"{self.url}/upload/{run}/{name}"} for name in variables["files"]]
        return {"runID": "Ug==", "uploadHeaders": [], "files": files}

    def _take_stream(self, run: StoredRun, request: dict[str, Any]) -> None:
        files = request.get("files") or {}
        for name, chunk in files.items():
            if name == "wandb-history.jsonl":
                run.history |= {chunk["offset"] + index: line for index, line in enumerate(chunk["content"])}
            elif name == "wandb-summary.json":
                run.summary = chunk["content"][-1]
        if request.get("complete"):
            run.exit_code = request.get("exitcode")


def wait_until_sent(tracker: WandbLogger) -> None:
    """Starting W&B takes longer on a busy machine than `close` waits for it."""
    wait_until(lambda: tracker.num_waiting == 0 or not tracker.is_on, "W&B has taken every row")


def _handler(server: WandbServer) -> type[Handler]:
    class WandbHandler(Handler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            answer = json.dumps(server.answer(self.command, self.path, body)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = do_PUT = _serve

    return WandbHandler
