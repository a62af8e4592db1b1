"""Sampling with one generator: a worker as a run has it, given the weights as a run gives them."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.schema import Config
from ..errors import ConfigError, RunFailed
from ..precision import Precision, dtype_name
from ..rollout.pool import Failed, WorkerPool
from ..rollout.process import spawn_workers
from ..rollout.sampling import derive_seed
from ..rollout.start import ENGINES, engine_spec
from ..rollout.types import Generated, Request, Rollout
from .settings import ProbeSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PATIENCE_S = 3600.0  # for the whole batch, which is one answer


@dataclass(frozen=True)
class Sampled:
    """Completions in the order of the prompts, those of one prompt together."""

    rollouts: list[Rollout]
    seconds: float
    observed: dict[str, str]

    @property
    def num_tokens(self) -> int:
        return sum(len(rollout.token_ids) for rollout in self.rollouts)


def sample(
    config: Config,
    precision: Precision,
    model: "PreTrainedModel",
    prompts: list[list[int]],
    settings: ProbeSettings,
    log_dir: Path,
    device: str,
) -> Sampled:
    """Complete all prompts under the weights of a model.

    Raises:
        ConfigError: if the engine cannot be had like this.
        RunFailed: if it fails, or serves in other dtypes than it should.
    """
    if config.rollout.backend not in ENGINES:
        raise ConfigError("probe.engine", config.rollout.backend.value, "an engine that samples")
    rollout = replace(config.rollout, request_timeout_s=max(PATIENCE_S, config.rollout.request_timeout_s))
    pool = WorkerPool(rollout, spawn_workers(rollout, log_dir), log_dir, lambda event, fields: None)
    try:
        pool.initialise(engine_spec(config, precision, device, log_dir))
        pool.sync(0, model)
        pool.wait_synced()
        start = time.monotonic()
        pool.submit(_requests(config, settings, prompts))
        answers = _collect(pool, len(prompts))
        seconds = time.monotonic() - start
        observed: dict[str, Any] = dict(pool.observed)
    finally:
        pool.close()
    for site in ("rollout", "rollout_head"):
        expected = dtype_name(getattr(precision, site))
        if observed.get(site, expected) != expected:
            raise RunFailed(f"the engine serves in another dtype than asked for: {site} is {observed[site]}")
    return Sampled([one for serial in range(len(prompts)) for one in answers[serial].rollouts], seconds, observed)


def _requests(config: Config, settings: ProbeSettings, prompts: list[list[int]]) -> list[Request]:
    return [
        Request(
            serial=serial,
            prompt_ids=ids,
            num_completions=settings.num_completions,
            max_new_tokens=settings.max_new_tokens,
            temperature=config.rollout.temperature,
            seed=derive_seed(config.seed, serial),
        )
        for serial, ids in enumerate(prompts)
    ]


def _collect(pool: WorkerPool, count: int) -> dict[int, Generated]:
    answers: dict[int, Generated] = {}
    while len(answers) < count:
        items = pool.poll()
        for item in items:
            match item:
                case Failed():
                    raise RunFailed(item.reason)
                case Generated():
                    if (problem := item.problem()) is not None:
                        raise RunFailed(f"completions that cannot be used: {problem}")
                    answers[item.serial] = item
        if not items:
            time.sleep(0.02)
    return answers
