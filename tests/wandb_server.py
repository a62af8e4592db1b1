"""A stand-in for wandb's server: the part of its interface that ``wandb sync`` and online runs use, on loopback.

GraphQL for who one is, what the server can do and the making of a run; the stream of rows of a run; uploads of its files.
What is sent is kept, so that a test sees it as the server would.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote

KEY = "0" * 40  # the form of a key; a server of one's own decides what it is worth


@dataclass
class Received:
    """By id of the run."""

    runs: dict[str, dict[str, Any]] = field(default_factory=dict)  # variables of the mutation that made it
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    summary: dict[str, dict[str, Any]] = field(default_factory=dict)
    exit_codes: dict[str, int] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    artifacts: dict[str, dict[str, bytes]] = field(default_factory=dict)  # by type/collection
    is_gone: bool = False  # it answers nobody any more
    committed: list[str] = field(default_factory=list)  # the artifacts of which all has come


class Handler(BaseHTTPRequestHandler):
    received: Received
    dies: bool

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        if self.dies and self.path.endswith("/file_stream"):
            self.received.is_gone = True
        self.close_connection |= self.received.is_gone
        return not self.received.is_gone

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/graphql":
            body = json.loads(data)
            self.answer({"data": self.graphql(body["query"], body.get("variables") or {})})
        elif match := re.fullmatch(r"/files/\w+/\w+/(\w+)/file_stream", self.path):
            self.file_stream(match[1], json.loads(data))
            self.answer({})
        else:  # measurements of wandb's own
            self.answer({})

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if match := re.fullmatch(r"/upload/(\w+)/(.+)", self.path):
            self.received.files.setdefault(match[1], {})[unquote(match[2])] = data
        elif match := re.fullmatch(r"/artifact/([^/]+/[^/]+)/(.+)", self.path):
            self.received.artifacts[match[1]][unquote(match[2])] = data
        self.answer({})

    def do_GET(self) -> None:
        match = re.fullmatch(r"/upload/(\w+)/(.+)", self.path)
        data = None if match is None else self.received.files.get(match[1], {}).get(unquote(match[2]))
        self.send_response(200 if data is not None else 404)
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        self.wfile.write(data or b"")

    def graphql(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        team = {"name": "team"}
        if "upsertBucket" in query:
            name = variables["name"]
            inserted = name not in self.received.runs
            self.received.runs.setdefault(name, {}).update({k: v for k, v in variables.items() if v is not None})
            bucket = {
                "id": f"id-{name}", "name": name, "displayName": variables.get("displayName"), "description": None,
                "config": variables.get("config") or "{}", "sweepName": None, "historyLineCount": 0,
                "project": {"id": "project", "name": variables.get("project") or "lab", "entity": team},
            }  # fmt: skip
            return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}
        if "createRunFiles" in query:
            base = f"http://{self.headers['Host']}/upload/{variables['run']}"
            files = [{"name": name, "uploadUrl": f"{base}/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": files}}
        if "rtifact" in query and (answer := self.artifact(query, variables)):
            return answer
        if "query RunFiles(" in query:
            files = self.received.files.get(variables["name"], {})
            found = [self.file(variables["name"], name) for name in files if name in variables["fileNames"]]
            run = {
                "fileCount": len(files),
                "files": {"edges": found, "pageInfo": {"endCursor": "", "hasNextPage": False}},
            }
            return {"project": {"internalId": "UHJvamVjdDox", "run": run}}
        if "query Runs(" in query:
            return {"project": self.project(variables)}
        if "RunResumeStatus" in query:
            known = self.received.runs.get(variables["name"])
            bucket = None if known is None else self.bucket(variables["name"], known)
            return {"model": {"id": "project", "name": "lab", "entity": team, "bucket": bucket}}
        viewer = {"id": "me", "entity": "team", "username": "me", "email": "", "flags": "{}", "teams": {"edges": []}}
        return {"viewer": viewer, "serverInfo": None, "model": None, "project": None, "__type": None}

    def artifact(self, query: str, variables: dict[str, Any]) -> dict[str, Any] | None:
        """Those of ours are taken; of wandb's own it is said that they are there, and nothing of them is uploaded."""
        if "createArtifact(" in query:
            made = variables["input"]
            name = f"{made['artifactTypeName']}/{made['artifactCollectionName']}"
            is_ours = made["artifactTypeName"] in ("model", "report")
            if is_ours:
                self.received.artifacts[name] = {}
            state = "PENDING" if is_ours else "COMMITTED"
            sequence = {"id": "sequence", "latestArtifact": None}
            return {"createArtifact": {"artifact": {"id": name, "state": state, "artifactSequence": sequence}}}
        if "createArtifactManifest(" in query:
            file = self.target(variables["artifactID"], variables["name"]) | {"id": "file"}
            return {"createArtifactManifest": {"artifactManifest": {"id": "manifest", "file": file}}}
        if "createArtifactFiles(" in query:
            files = variables["input"]["artifactFiles"]
            nodes = [self.target(file["artifactID"], file["name"]) | {"storagePath": file["name"]} for file in files]
            return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}
        if "commitArtifact(" in query:
            self.received.committed.append(variables["artifactID"])
            return {"commitArtifact": {"artifact": {"id": variables["artifactID"], "digest": ""}}}
        return None

    def target(self, artifact: str, name: str) -> dict[str, Any]:
        url = f"http://{self.headers['Host']}/artifact/{artifact}/{name}"
        return {"uploadUrl": url, "uploadHeaders": [], "uploadMultipartUrls": None, "artifact": {"id": artifact}}

    def project(self, variables: dict[str, Any]) -> dict[str, Any] | None:
        """The runs of a project, of one group if the filter asks for it; None where there is no such project."""
        group = json.loads(variables["filters"]).get("group")
        runs = {n: run for n, run in self.received.runs.items() if run.get("project", "lab") == variables["project"]}
        if not runs:
            return None
        edges = [
            {"node": self.run(name, run), "cursor": name}
            for name, run in runs.items()
            if group in (None, run.get("groupName"))
        ]
        page = {"endCursor": "", "hasNextPage": False}
        return {
            "internalId": "1",
            "runCount": len(edges),
            "readOnly": False,
            "runs": {"edges": edges, "pageInfo": page},
        }

    def bucket(self, name: str, run: dict[str, Any]) -> dict[str, Any]:
        """What a client that goes on with a run has to know of it."""
        rows, wandb = self.received.rows.get(name, []), {"t": 1}
        return {
            "name": name, "displayName": run.get("displayName"), "id": f"id-{name}", "config": run.get("config") or "{}",
            "summaryMetrics": json.dumps(self.received.summary.get(name, {})), "historyLineCount": len(rows),
            "logLineCount": 0, "eventsLineCount": 0, "historyTail": json.dumps([json.dumps(row) for row in rows[-1:]]),
            "eventsTail": "[]", "notes": None, "tags": [], "group": run.get("groupName"), "jobType": None,
            "wandbConfig": json.dumps(wandb),
        }  # fmt: skip

    def run(self, name: str, run: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"id-{name}", "projectId": "1", "name": name, "displayName": run.get("displayName"), "tags": [],
            "sweepName": None, "state": "finished", "config": run.get("config") or "{}", "group": run.get("groupName"),
            "jobType": None, "commit": None, "readOnly": False, "createdAt": "2026-01-01T00:00:00", "heartbeatAt": None,
            "description": None, "notes": None, "systemMetrics": "{}", "summaryMetrics": "{}", "historyLineCount": 0,
            "user": {"name": "me", "username": "me"}, "historyKeys": None,
        }  # fmt: skip

    def file(self, run: str, name: str) -> dict[str, Any]:
        url = f"http://{self.headers['Host']}/upload/{run}/{name}"
        size = len(self.received.files[run][name])
        node = {"id": name, "name": name, "url": url, "directUrl": url, "sizeBytes": size, "mimetype": "", "md5": ""}
        return {"node": node | {"updatedAt": "2026-01-01T00:00:00"}, "cursor": name}

    def file_stream(self, run: str, body: dict[str, Any]) -> None:
        for name, part in (body.get("files") or {}).items():
            rows = [json.loads(line) for line in part["content"]]
            if name == "wandb-history.jsonl":
                self.received.rows.setdefault(run, []).extend(rows)
            elif name == "wandb-summary.json":
                self.received.summary[run] = rows[-1]
        if body.get("complete"):
            self.received.exit_codes[run] = body["exitcode"]

    def answer(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def wandb_server(dies: bool = False) -> Iterator[tuple[str, Received]]:
    """Its address, and what it has been sent.

    Args:
        dies: answer nobody any more from the first rows on, which are lost.
    """
    received = Received()
    handler = type("Handler", (Handler,), {"received": received, "dies": dies})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
