"""A server that speaks the part of vLLM's HTTP interface that a worker uses, and a network that can be made faulty.

Completions are counted out: one token every ``pace_s`` seconds, ``n`` choices alike, cut short by a pause as vLLM does it.
"""

import json
import socket
import threading
import time
from collections import deque
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from grpo_exp.rollout.vllm import LOGPROBS


class Fault(Enum):
    """What may become of a request, or of its answer."""

    dropped = "dropped"
    delayed = "delayed"
    status_500 = "status_500"
    garbage = "garbage"
    another_form = "another_form"
    too_few_logprobs = "too_few_logprobs"
    refused = "refused"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer_with(None)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self.answer_with(self.rfile.read(length))

    def answer_with(self, body: bytes | None) -> None:
        path = urlsplit(self.path).path
        server: Any = self.server.owner  # type: ignore[attr-defined]
        fault = server.next_fault(path)
        match fault:
            case Fault.dropped:
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            case Fault.delayed:
                time.sleep(server.delay_s)
            case Fault.status_500:
                return self.send(500, b"the engine is upset")
            case Fault.refused:
                return self.send(400, b"the prompt is too long")
            case Fault.garbage:
                return self.send(200, b"<html>Bad gateway</html>")
            case Fault.another_form:
                return self.send(200, b'{"choices": [{"text": "hello"}]}')
        status, answer = server.respond(self.command, self.path, body, self.headers.get("Authorization"))
        if fault is Fault.too_few_logprobs:
            answer["choices"][0]["logprobs"]["token_logprobs"].pop()
        self.send(status, answer if isinstance(answer, bytes) else json.dumps(answer).encode())

    def send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        try:
            self.wfile.write(data)
        except OSError:
            pass


class Faulty:
    """An HTTP server some of whose answers to ``path`` go wrong, as ``faults`` says."""

    def __init__(self) -> None:
        self.faults: deque[Fault] = deque()
        self.path, self.delay_s = "/v1/completions", 1.0
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.owner = self  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self._thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def next_fault(self, path: str) -> Fault | None:
        return self.faults.popleft() if self.faults and path == self.path else None

    def respond(self, method: str, path: str, body: bytes | None, authorization: str | None) -> tuple[int, Any]:
        raise NotImplementedError

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self._thread.join()


class FaultyProxy(Faulty):
    """In front of a real server."""

    def __init__(self, target: str) -> None:
        self.target = target
        super().__init__()

    def respond(self, method: str, path: str, body: bytes | None, authorization: str | None) -> tuple[int, Any]:
        headers = {"Authorization": authorization or "", "Content-Type": "application/json"}
        try:
            with urlopen(Request(self.target + path, body, headers, method=method), timeout=120) as answer:
                return answer.status, answer.read()
        except HTTPError as error:
            return error.code, error.read()


class FakeVllm(Faulty):
    """Weights are a version; a log-probability is minus that version minus a thousandth of the position."""

    def __init__(self, model: str, dtype: str = "float32", logprobs_mode: str = LOGPROBS) -> None:
        self.config = {
            "dtype": f"torch.{dtype}", "model": model, "logprobs_mode": logprobs_mode, "max_model_len": 128,
            "enforce_eager": True,
        }  # fmt: skip
        self.log: list[str] = []
        self.version, self.pace_s = -1, 0.0
        self.running, self.aborts = 0, 0
        self.load_error: dict[str, Any] | None = None
        self.gate = threading.Event()
        self.gate.set()
        super().__init__()

    def respond(self, method: str, path: str, body: bytes | None, authorization: str | None) -> tuple[int, Any]:
        given = json.loads(body) if body else {}
        match urlsplit(path).path:
            case "/v1/models":
                return 200, {"data": [{"id": "served"}]}
            case "/server_info":
                return 200, {"vllm_config": {"model_config": self.config}}
            case "/version":
                return 200, {"version": "0"}
            case "/health":
                return 200, b""
            case "/pause":
                self.log.append("pause" + ("+clear" if "clear_cache=true" in path else ""))
                self.gate.clear()
                self.aborts += 1
                return 200, {"status": "paused"}
            case "/abort_requests":
                self.aborts += 1
                return 200, {}
            case "/resume":
                self.log.append("resume")
                self.gate.set()
                return 200, {"status": "resumed"}
            case "/collective_rpc":
                return 200, {"results": [self.call(given["method"], *given.get("args", ()))]}
            case "/v1/completions":
                return 200, self.complete(given)
        return 404, b"no such path"

    def call(self, method: str, *args: Any) -> Any:
        if method == "grpo_dtypes":
            return dict.fromkeys(("rollout", "rollout_head", "kv_cache"), "fp32")
        payload, source = args
        self.log.append(f"load {payload['version']} with {self.running} running")
        with open(source, "rb") as file:
            self.received = file.read()
        if self.load_error is not None:
            return self.load_error
        self.version = payload["version"]
        return {"checksum": payload["checksum"]}

    def complete(self, given: dict[str, Any]) -> dict[str, Any]:
        self.running += 1
        aborts, tokens, mu, reason = self.aborts, [], [], "length"
        while len(tokens) < given["max_tokens"]:
            if self.aborts != aborts:
                reason = "abort"
                break
            if not self.gate.is_set():
                time.sleep(0.001)
                continue
            position = len(given["prompt"]) + len(tokens)
            tokens.append(10 + position)
            mu.append(-self.version - position / 1000)
            time.sleep(self.pace_s)
        self.running -= 1
        choice = {"token_ids": tokens, "logprobs": {"token_logprobs": mu}, "finish_reason": reason}
        return {"choices": [choice | {"index": index} for index in range(given["n"])]}
