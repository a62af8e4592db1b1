"""One vLLM engine in this process, the weights it is given, and transformers beside it to say what is right."""

import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModelForCausalLM

from grpo_exp import assets
from grpo_exp.config.schema import Backend
from grpo_exp.precision import DTYPES
from grpo_exp.rollout.process import ENVIRONMENTS, open_memory
from grpo_exp.rollout.types import EngineSpec, Generated, Request, Rollout
from grpo_exp.sync.shm import Sender

OPTIONS = {"max_model_len": None, "kv_cache_gib": 0.0625, "enforce_eager": None}
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14], [5, 5, 6, 6, 7, 7]]
MAX_NEW = 24


def spec(path: str, dtype: str, wire: str | None = None) -> EngineSpec:
    dtypes = {"rollout": dtype, "rollout_head": dtype, "wire": wire or dtype}
    return EngineSpec("grpo_exp.rollout.vllm:VllmEngine", path, {}, False, dtypes, "cpu", 1, 64, OPTIONS)


class Served:
    """An engine with a sender, and every model that was ever sent, by version."""

    def __init__(self, dtype: str, path: str = str(assets.path("tiny"))) -> None:
        for name, value in ENVIRONMENTS[Backend.vllm].items():
            os.environ.setdefault(name, value)
        self.path, self.dtype = path, dtype
        self.fd = open_memory()
        self.sender = Sender(self.fd, DTYPES[dtype], DTYPES[dtype])
        self.models: dict[int, Any] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from grpo_exp.rollout.vllm import VllmEngine

            self.engine = VllmEngine(spec(self.path, dtype))
        self.sync(0)

    @property
    def worker(self) -> Any:
        """vLLM's worker, with the methods of the receiver."""
        return self.engine.engine.model_executor.driver_worker.worker

    def trained(self, version: int) -> nn.Module:
        """Other weights for every version, as the trainer holds them: in fp32."""
        if version not in self.models:
            model = AutoModelForCausalLM.from_pretrained(self.path)
            generator = torch.Generator().manual_seed(version)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
            self.models[version] = model
        return self.models[version]

    def sync(self, version: int) -> int:
        return self.engine.load(self.sender.write(version, self.trained(version)), self.fd)

    def next_version(self) -> int:
        return max(self.models) + 1

    def run(self, requests: list[Request], between: Callable[[int], None] | None = None) -> dict[int, Generated]:
        """Decode requests to their end; ``between`` is called after every step."""
        for request in requests:
            self.engine.add(request)
        answers: dict[int, Generated] = {}
        steps = 0
        while self.engine.num_running:
            for answer in self.engine.step():
                assert isinstance(answer, Generated)
                assert answer.problem() is None
                answers[answer.serial] = answer
            steps += 1
            if between is not None and self.engine.num_running:
                between(steps)
        return answers

    def gaps(self, request: Request, rollout: Rollout) -> NDArray[np.float32]:
        """mu minus what transformers says, in fp32, under the weights that each token's version stands for, cast as sent."""
        gaps = np.zeros(len(rollout.token_ids), np.float32)
        for version in set(rollout.versions.tolist()):
            scored = score(self.cast(version), request.prompt_ids, rollout.token_ids, request.temperature)
            chosen = rollout.versions == version
            gaps[chosen] = (rollout.mu - scored)[chosen]
        return gaps

    def cast(self, version: int) -> nn.Module:
        """The model of a version, its weights rounded to the engine's dtype, computing in fp32."""
        if self.dtype == "fp32":
            return self.models[version]
        model = AutoModelForCausalLM.from_pretrained(self.path)
        state = {name: tensor.to(DTYPES[self.dtype]) for name, tensor in self.models[version].state_dict().items()}
        model.load_state_dict(state)
        return model

    def close(self) -> None:
        self.engine.close()
        os.close(self.fd)


@torch.no_grad()
def score(model: Any, prompt: list[int], ids: list[int], temperature: float) -> NDArray[np.float32]:
    log_p = (model(torch.tensor([prompt + ids])).logits[0].float() / temperature).log_softmax(-1)
    return log_p[len(prompt) - 1 : -1].gather(-1, torch.tensor(ids)[:, None])[:, 0].numpy()


def requests(
    prompts: list[list[int]] = PROMPTS, num_completions: int = 4, temperature: float = 1.0, **changes: Any
) -> list[Request]:
    return [
        Request(serial, ids, num_completions, changes.get("max_new", MAX_NEW), temperature, seed=1000 + serial)
        for serial, ids in enumerate(prompts)
    ]


def all_gaps(served: Served, made: list[Request], answers: dict[int, Generated]) -> NDArray[np.float32]:
    by_serial = {request.serial: request for request in made}
    return np.concatenate(
        [served.gaps(by_serial[serial], rollout) for serial, one in answers.items() for rollout in one.rollouts]
    )
