"""Starting a vLLM server for one worker, and seeing that a server, whoever started it, serves what was declared."""

import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RunFailed
from .types import EngineSpec
from .vllm import DTYPE_ARGUMENTS, LOGPROBS, engine_arguments
from .vllm_http import Client, Refused, Unreachable
from .vllm_serve import PARENT, TOKEN

PROBE_TIMEOUT_S = 10.0
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the control paths
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class LocalServer:
    """A server of this worker: on loopback, with a token that nobody else has, gone when the worker is."""

    def __init__(self, spec: EngineSpec) -> None:
        token = secrets.token_hex(16)
        self.client = Client(f"http://127.0.0.1:{free_port()}", token)
        environment = ENVIRONMENT | dict(os.environ) | {TOKEN: token, PARENT: str(os.getpid())}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "grpo_exp.rollout.vllm_serve", *server_arguments(spec, self.client.url)],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        try:
            self._wait_until_healthy(spec.options["startup_timeout_s"])
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """Ask it to end, and see that it does."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_until_healthy(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if (code := self._process.poll()) is not None:
                raise RunFailed(f"the vLLM server ended while it was starting (exit code {code})")
            try:
                self.client.get("/health", PROBE_TIMEOUT_S)
            except (Unreachable, Refused):
                time.sleep(0.25)
            else:
                return
        raise RunFailed(f"the vLLM server was not healthy in {timeout_s:g} s (rollout.startup_timeout_s)")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def server_arguments(spec: EngineSpec, url: str | None = None) -> list[str]:
    """The command line of ``vllm serve`` that serves what a worker declares."""
    arguments = engine_arguments(spec) | {"skip_tokenizer_init": False}
    words = []
    for name, value in arguments.items():
        if value is True:
            words.append(f"--{name.replace('_', '-')}")
        elif value is not False and value is not None:
            words.append(f"--{name.replace('_', '-')}={value}")
    if url is not None:
        host, _, port = url.removeprefix("http://").partition(":")
        words += [f"--host={host}", f"--port={port}", "--disable-uvicorn-access-log"]
        words.append("--middleware=grpo_exp.rollout.vllm_serve.require_token")
    return words


def check_server(client: Client, spec: EngineSpec) -> dict[str, Any]:
    """What the manifest says of a server; ``served_as`` is the model's name there.

    Raises:
        ConfigError: if it cannot be asked, or serves another dtype, model or kind of log-probabilities than was declared.
    """
    command = f"VLLM_SERVER_DEV_MODE=1 vllm serve {shlex.join(server_arguments(spec))}"
    try:
        models = client.get("/v1/models", PROBE_TIMEOUT_S)["data"]
        config = client.get("/server_info", PROBE_TIMEOUT_S, config_format="json")["vllm_config"]["model_config"]
        client.post("/collective_rpc", PROBE_TIMEOUT_S, {"method": "grpo_dtypes"})
        version = client.get("/version", PROBE_TIMEOUT_S)["version"]
    except (Unreachable, Refused, KeyError, TypeError) as error:
        raise ConfigError("rollout.urls", client.url, f"a server started by `{command}`", str(error)) from None
    found = {
        "dtype": str(config["dtype"]).removeprefix("torch."),
        "model": str(config["model"]),
        "logprobs_mode": str(config["logprobs_mode"]),
    }
    declared = {"dtype": DTYPE_ARGUMENTS[spec.dtypes["rollout"]], "model": spec.model, "logprobs_mode": LOGPROBS}
    wrong = [f"{name} {found[name]}" for name in declared if not _same(name, found[name], declared[name])]
    if wrong:
        reason = f"it serves {', '.join(wrong)}; start it with `{command}`"
        wanted = ", ".join(f"{name} {value}" for name, value in declared.items())
        raise ConfigError("rollout.urls", client.url, f"a server of {wanted}", reason)
    return {
        "engine": f"vllm {version} (server)",
        "logprobs": found["logprobs_mode"],
        "max_model_len": config["max_model_len"],
        "enforce_eager": config["enforce_eager"],
        "served_as": models[0]["id"],
    }


def _same(name: str, found: str, declared: str) -> bool:
    """A folder may be reached by several paths."""
    return found == declared or (name == "model" and Path(found).resolve() == Path(declared).resolve())
