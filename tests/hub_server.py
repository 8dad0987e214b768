"""A hub on the loopback interface that answers as Hugging Face's does, as far as downloads of its real clients go.

It knows the revisions of a repository (a commit, or `main` for the newest), lists files, and serves their bytes with
the headers that the clients keep in their cache. Everything else is 404.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.loopback import Handler, LoopbackServer

Files = dict[str, bytes]


@dataclass
class Repository:
    """`kind` is `models` or `datasets`."""

    kind: str
    name: str
    commits: dict[str, Files] = field(default_factory=dict)
    """Commit -> its files, the newest last."""

    def commit(self, files: Files) -> str:
        """The new commit."""
        sha = hashlib.sha1(repr((len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits[sha] = files
        return sha

    def resolved(self, revision: str) -> str | None:
        return list(self.commits)[-1] if revision == "main" else revision if revision in self.commits else None


class HubServer(LoopbackServer):
    def __init__(self, *repositories: Repository) -> None:
        self.repositories = repositories
        self.requests: list[str] = []
        """Method and path of each, in order."""
        super().__init__(_handler(self))

    def api(self, path: str, body: bytes, *, is_recursive: bool) -> Any:
        """What a path below /api says; None: there is no such thing."""
        for repository in self.repositories:
            prefix = f"{repository.kind}/{repository.name}"
            if path == prefix or path.startswith(f"{prefix}/"):
                what, _, rest = path[len(prefix) + 1 :].partition("/")
                revision, _, folder = rest.partition("/")
                commit = repository.resolved(revision or "main")
                return (
                    None
                    if commit is None
                    else _described(repository, commit, what, folder, body, is_recursive=is_recursive)
                )
        return None

    def file(self, path: str) -> tuple[str, bytes] | None:
        """Commit and content of `OWNER/NAME/resolve/REVISION/FILE`."""
        for repository in self.repositories:
            prefix = ("datasets/" if repository.kind == "datasets" else "") + f"{repository.name}/resolve/"
            if path.startswith(prefix):
                revision, _, name = path.removeprefix(prefix).partition("/")
                commit = repository.resolved(revision)
                if commit is not None and name in repository.commits[commit]:
                    return commit, repository.commits[commit][name]
        return None


def _described(repository: Repository, commit: str, what: str, folder: str, body: bytes, *, is_recursive: bool) -> Any:
    files = repository.commits[commit]
    if what in ("", "revision"):
        siblings = [{"rfilename": name} for name in files]
        return {
            "id": repository.name,
            "sha": commit,
            "siblings": siblings,
            "private": False,
            "gated": False,
            "tags": [],
        }
    if what == "tree":
        return _entries(files, _children(files, f"{folder}/" if folder else "", is_recursive=is_recursive))
    if what == "paths-info":
        wanted = parse_qs(body.decode())["paths"] if not body.startswith(b"{") else json.loads(body)["paths"]
        return _entries(files, set(wanted))
    return None


def _children(files: Files, below: str, *, is_recursive: bool) -> set[str]:
    """Files and folders in the folder `below`, or in those that are in it, too."""
    rests = [name.removeprefix(below) for name in files if name.startswith(below)]
    if is_recursive:
        return {below + rest for rest in rests}
    return {below + rest.split("/", 1)[0] for rest in rests}


def _entries(files: Files, wanted: set[str]) -> list[dict[str, Any]]:
    folders = {name.rsplit("/", 1)[0] for name in files if "/" in name}
    return [
        *({"type": "directory", "path": name, "oid": _digest(name.encode()), "size": 0} for name in folders & wanted),
        *(
            {"type": "file", "path": name, "oid": _digest(content), "size": len(content)}
            for name, content in files.items()
            if name in wanted
        ),
    ]


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _handler(server: HubServer) -> type[Handler]:
    class HubHandler(Handler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            address = urlsplit(self.path)
            path = unquote(address.path).lstrip("/")
            server.requests.append(f"{self.command} {path}")
            if path.startswith("api/"):
                answer = server.api(
                    path.removeprefix("api/"), body, is_recursive="recursive=true" in address.query.lower()
                )
                headers, content = {"Content-Type": "application/json"}, json.dumps(answer).encode()
            else:
                answer = server.file(path)
                commit, content = answer or ("", b"")
                headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": commit}
            self._send(404 if answer is None else 200, headers, content)

        def _send(self, status: int, headers: dict[str, str], content: bytes) -> None:
            if status == 404:
                headers, content = {"X-Error-Code": "EntryNotFound"}, b""
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_POST = _serve

    return HubHandler
