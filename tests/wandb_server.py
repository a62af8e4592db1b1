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

KEY = "0" * 40  # the form of a key; a server of one's own decides what it is worth


@dataclass
class Received:
    """By id of the run."""

    runs: dict[str, dict[str, Any]] = field(default_factory=dict)  # variables of the mutation that made it
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    summary: dict[str, dict[str, Any]] = field(default_factory=dict)
    exit_codes: dict[str, int] = field(default_factory=dict)


class Handler(BaseHTTPRequestHandler):
    received: Received

    def log_message(self, format: str, *args: Any) -> None:
        pass

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
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer({})

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
            base = f"http://{self.headers['Host']}/upload"
            files = [{"name": name, "uploadUrl": f"{base}/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": files}}
        if "createArtifact(" in query:  # one that is there already: then nothing of it is uploaded
            sequence = {"id": "sequence", "latestArtifact": None}
            return {
                "createArtifact": {"artifact": {"id": "artifact", "state": "COMMITTED", "artifactSequence": sequence}}
            }
        if "RunResumeStatus" in query:
            return {"model": {"id": "project", "name": "lab", "entity": team, "bucket": None}}
        viewer = {"id": "me", "entity": "team", "username": "me", "email": "", "flags": "{}", "teams": {"edges": []}}
        return {"viewer": viewer, "serverInfo": None, "model": None, "project": None, "__type": None}

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
def wandb_server() -> Iterator[tuple[str, Received]]:
    """Its address, and what it has been sent."""
    received = Received()
    handler = type("Handler", (Handler,), {"received": received})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
