"""Talking to a vLLM server: JSON over HTTP with a token, a time limit for everything, and errors that say what to do next.

Only what a retry can mend is :class:`Unreachable`: no connection, a time-out, a 5xx, an answer that is none.
"""

import json
import socket
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlencode, urlsplit


class Unreachable(RuntimeError):
    """Nothing usable came back; the same request may succeed later."""


class Refused(RuntimeError):
    """The server understood and said no."""


@dataclass(frozen=True)
class Client:
    """One server. Every call opens a connection of its own, so any number of threads may use it."""

    url: str
    token: str

    @property
    def is_local(self) -> bool:
        return (urlsplit(self.url).hostname or "") in ("127.0.0.1", "localhost", "::1")

    def get(self, path: str, timeout_s: float, **query: str) -> Any:
        return self._call("GET", path, None, timeout_s, query)

    def post(self, path: str, timeout_s: float, body: Any = None, **query: str) -> Any:
        return self._call("POST", path, body, timeout_s, query)

    def _call(self, method: str, path: str, body: Any, timeout_s: float, query: dict[str, str]) -> Any:
        """The parsed answer, None where it is empty.

        Raises:
            Unreachable, Refused: with the server's words.
        """
        parts = urlsplit(self.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        target = parts.path.rstrip("/") + path + (f"?{urlencode(query)}" if query else "")
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        try:
            connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
        except HTTPException as error:
            raise Unreachable(f"{self.url}: {error}") from None
        try:
            connection.request(method, target, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read()
        except TimeoutError:
            raise Unreachable(f"{self.url}{path}: no answer in {timeout_s:g} s") from None
        except (OSError, HTTPException, socket.gaierror) as error:
            raise Unreachable(f"{self.url}{path}: {type(error).__name__}: {error}") from None
        finally:
            connection.close()
        if response.status >= 500:
            raise Unreachable(f"{self.url}{path}: status {response.status}: {_short(text)}")
        if response.status >= 400:
            raise Refused(f"{self.url}{path}: status {response.status}: {_short(text)}")
        return _parsed(text, f"{self.url}{path}")


def _parsed(text: bytes, where: str) -> Any:
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except ValueError:
        raise Unreachable(f"{where}: the answer is not JSON: {_short(text)}") from None


def _short(text: bytes) -> str:
    return " ".join(text.decode(errors="replace").split())[:300]
