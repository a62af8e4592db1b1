"""A generator worker whose engine is a vLLM server: one that it starts and ends itself, or one that is there already.

    add ─▶ job ─thread─▶ POST /v1/completions ─▶ step ─▶ rollouts          load: POST /pause, /collective_rpc, /resume

A sync in flight ends running completions early; what they have so far is kept, and they go on from there under the new
weights. So each request is answered under one version, every token's version is known, and nothing old stays in the cache.
"""

import os
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from threading import Event, Lock
from typing import Any

import numpy as np

from ..errors import RunFailed
from ..precision import dtype_name
from ..sync.shm import Payload
from .loop import Unanswered
from .sampling import derive_seed
from .types import EngineSpec, Generated, Request, Rollout
from .vllm import end_tokens
from .vllm_http import Client, Refused, Unreachable
from .vllm_local import LocalServer, check_server

CONTROL_TIMEOUT_S = 120.0  # of one control call; loading the weights of a large model takes a while
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0  # between tries, doubling


@dataclass(frozen=True)
class Job:
    """Some completions of a request that go on from the same tokens, asked for together."""

    request: Request
    indices: tuple[int, ...]
    so_far: Rollout  # of all of them

    def body(self, model: str, stop_ids: list[int]) -> dict[str, Any]:
        """The request of vLLM's completions API; vLLM gives the n-th completion the seed plus n."""
        request, done = self.request, len(self.so_far.token_ids)
        return {
            "model": model,
            "prompt": [*request.prompt_ids, *self.so_far.token_ids],
            "n": len(self.indices),
            "max_tokens": request.max_new_tokens - done,
            "temperature": request.temperature,
            "seed": derive_seed(request.seed, self.indices[0], done),
            "stop_token_ids": stop_ids,
            "ignore_eos": True,  # stop_ids has it
            "logprobs": 0,
            "return_token_ids": True,
            **asdict(request.shaping),
        }


@dataclass(frozen=True)
class Part:
    """What came back for one completion of a job."""

    index: int
    rollout: Rollout
    cut_short: bool  # by a sync


@dataclass
class _Open:
    request: Request
    rollouts: dict[int, Rollout] = field(default_factory=dict)


class VllmServerEngine:
    """Requests go out in threads of their own; whatever is decided is decided in the worker's only other thread."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec, self.version, self.num_running = spec, -1, 0
        self.options = spec.options
        self._threads = ThreadPoolExecutor(spec.batch_size, thread_name_prefix="request")
        self._running: dict[Future[list[Part]], Job] = {}
        self._open: dict[int, _Open] = {}
        self._gate, self._lock, self._under_way = Event(), Lock(), 0
        self._sync_file: str | None = None
        self._closed = False
        self._seen: dict[str, str] = {}
        self.retries: list[str] = []
        url = self.options.get("url")
        self.server = None if url else LocalServer(spec)
        try:
            self.client = self.server.client if self.server else Client(str(url), self._token())
            self.about = check_server(self.client, spec)
        except BaseException:
            self.close()
            raise
        self.model = self.about.pop("served_as")
        self.stop_ids = end_tokens(spec)

    def _token(self) -> str:
        return os.environ.get(self.options["token_variable"], "")

    def observed(self) -> dict[str, str]:
        """Dtypes, as the server reads them from its live objects."""
        return dict(self._seen or {"rollout": self._rpc("grpo_dtypes")["rollout"]})

    def load(self, payload: Payload, fd: int) -> int:
        """Have the server take over new weights; an error leaves the old ones serving."""
        source = self._source(fd)
        self._gate.clear()
        try:
            self.client.post("/pause", CONTROL_TIMEOUT_S, mode="abort", clear_cache="true")
            self._wait_until_quiet()
            before, self.version = self.version, -1  # unknown, should no answer come
            answer = self._rpc("grpo_load", payload.to_json(), source)
            if "error" in answer:
                self.version = before if answer["serving"] else -1
                raise RunFailed(answer["error"])
            self.version = payload.version
        finally:
            self.client.post("/resume", CONTROL_TIMEOUT_S)
            if self.version >= 0:
                self._gate.set()
        self._seen = self._rpc("grpo_dtypes") | {"wire": dtype_name(payload.dtype)}
        return int(answer["checksum"])

    def add(self, request: Request) -> None:
        if self.version < 0:
            raise RuntimeError("the engine has no weights")
        self._open[request.serial] = _Open(request)
        self.num_running += request.num_completions
        nothing = Rollout([], np.zeros(0, np.float32), np.zeros(0, np.int32), False)  # mu is fp32 always
        self._submit(Job(request, tuple(range(request.num_completions)), nothing))

    def step(self) -> list[Generated | Unanswered]:
        """What has come in within a moment. Raises RunFailed where the server is gone for good."""
        done, _ = wait(self._running, timeout=0.05, return_when=FIRST_COMPLETED)
        answers: list[Generated | Unanswered] = []
        for future in done:
            job = self._running.pop(future)
            opened = self._open.get(job.request.serial)
            if opened is None or opened.request is not job.request:  # another part has failed; it may have come again
                continue
            try:
                parts = future.result()
            except (Refused, Unreachable) as error:
                answers.append(self._give_up(job, error))
            else:
                answers += self._take(job, parts)
        return answers

    def close(self) -> None:
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self.server is not None:
            self.server.stop()
        if self._sync_file is not None:
            os.unlink(self._sync_file)

    def _submit(self, job: Job) -> None:
        self._running[self._threads.submit(self._ask, job)] = job

    def _take(self, job: Job, parts: list[Part]) -> list[Generated | Unanswered]:
        """Keep what is finished and send what was cut short out again; a whole group is an answer."""
        opened = self._open[job.request.serial]
        for part in parts:
            if part.cut_short:
                self._submit(replace(job, indices=(part.index,), so_far=part.rollout))
            else:
                opened.rollouts[part.index] = part.rollout
                self.num_running -= 1
        if len(opened.rollouts) < opened.request.num_completions:
            return []
        del self._open[job.request.serial]
        rollouts = [opened.rollouts[index] for index in range(opened.request.num_completions)]
        return [Generated(job.request.serial, rollouts, min(int(rollout.versions[0]) for rollout in rollouts))]

    def _give_up(self, job: Job, error: Exception) -> Unanswered:
        opened = self._open.pop(job.request.serial)
        self.num_running -= opened.request.num_completions - len(opened.rollouts)
        if isinstance(error, Unreachable):
            try:
                self.client.get("/health", min(10.0, self.options["http_timeout_s"]))
            except (Refused, Unreachable) as gone:
                raise RunFailed(f"the server is gone: {gone}") from None
        return Unanswered(job.request.serial, str(error))

    def _ask(self, job: Job) -> list[Part]:
        """One job, tried again with growing pauses. Runs in a thread of its own."""
        tries, pause_s = 0, FIRST_WAIT_S
        while True:
            while not self._gate.wait(0.5):
                if self._closed:
                    raise Unreachable("the worker is ending")
            try:
                parts = self._attempt(job)
            except Unreachable as error:
                tries += 1
                if tries > self.options["http_retries"] or self._closed:
                    raise
                self.retries.append(str(error))
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_WAIT_S)
            else:
                if parts is not None:
                    return parts

    def _attempt(self, job: Job) -> list[Part] | None:
        """None if a sync came in between and nobody can say which weights answered."""
        with self._lock:
            version = self.version
            if version < 0:
                return None
            self._under_way += 1
        try:
            body = job.body(self.model, self.stop_ids)
            answer = self.client.post("/v1/completions", self.options["http_timeout_s"], body)
            same = self.version == version
        finally:
            with self._lock:
                self._under_way -= 1
        return read_answer(job, answer, version) if same else None

    def _wait_until_quiet(self) -> None:
        """Until nobody waits for an answer: also what reached the server after the pause is sent back, unbegun."""
        deadline = time.monotonic() + CONTROL_TIMEOUT_S
        while self._under_way:
            if time.monotonic() > deadline:
                raise Unreachable(f"{self.client.url}: requests do not end though it is paused")
            self.client.post("/abort_requests", CONTROL_TIMEOUT_S, {})
            time.sleep(0.005)

    def _rpc(self, method: str, *args: Any) -> Any:
        body = {"method": method, "args": list(args), "timeout": CONTROL_TIMEOUT_S}
        results = self.client.post("/collective_rpc", CONTROL_TIMEOUT_S, body)["results"]
        return results[0]

    def _source(self, fd: int) -> str:
        """A path under which the server finds the trainer's memory: on this machine the descriptor itself."""
        if self.options["sync"] == "shm":
            return f"/proc/{os.getpid()}/fd/{fd}"
        os.makedirs(self.options["sync_dir"], exist_ok=True)
        path = self._sync_file = f"{self.options['sync_dir']}/weights-{os.getpid()}.bin"
        size, done = os.fstat(fd).st_size, 0
        with open(path, "r+b" if os.path.exists(path) else "w+b") as file:
            while done < size:  # in place: the half that is being served stays where it is
                done += os.sendfile(file.fileno(), fd, done, size - done)
        return path


def read_answer(job: Job, answer: Any, version: int) -> list[Part]:
    """The completions of an answer, each with what it had before.

    Raises:
        Unreachable: if it does not have the right form: what is in it cannot be believed.
    """
    try:
        choices = {choice["index"]: choice for choice in answer["choices"]}
        return [_part(job, index, choices[place], version) for place, index in enumerate(job.indices)]
    except (KeyError, TypeError, ValueError) as error:
        raise Unreachable(f"the server's answer is garbage: {type(error).__name__}: {error}") from None


def _part(job: Job, index: int, choice: dict[str, Any], version: int) -> Part:
    ids, reason = [int(token) for token in choice["token_ids"]], choice["finish_reason"]
    mu = np.array((choice["logprobs"] or {"token_logprobs": []})["token_logprobs"], dtype=np.float32)  # fp32 always
    if reason not in ("stop", "length", "abort") or len(mu) != len(ids):
        raise ValueError(f"{len(ids)} tokens, {len(mu)} log-probs, finished by {reason}")
    so_far = job.so_far
    rollout = Rollout(
        [*so_far.token_ids, *ids],
        np.concatenate([so_far.mu, mu]),
        np.concatenate([so_far.versions, np.full(len(ids), version, np.int32)]),
        reason == "stop",
    )
    return Part(index, rollout, cut_short=reason == "abort")
