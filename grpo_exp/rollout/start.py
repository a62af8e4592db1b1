"""Starting the rollout side of a run: pool, engines and source from a configuration."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from ..assets import locate
from ..config.rollouts import engine_problems
from ..config.schema import Backend, Config
from ..errors import ConfigErrors
from ..precision import Precision, dtype_name
from ..tasks import Task
from .pool import OnEvent, WorkerPool
from .process import Spawned, spawn_workers
from .source import Codec, RolloutSource
from .types import EngineSpec

ENGINES = {
    Backend.hf: "grpo_exp.rollout.hf:HFEngine",
    Backend.vllm: "grpo_exp.rollout.vllm:VllmEngine",
    Backend.vllm_server: "grpo_exp.rollout.vllm_server:VllmServerEngine",
}
"""Backend → factory, a callable that takes an :class:`EngineSpec` and is imported in the worker."""


def start_source(
    config: Config,
    precision: Precision,
    task: Task,
    codec: Codec,
    spawned: Spawned | None,
    log_dir: Path,
    device: str,
    on_event: OnEvent,
    should_stop: Callable[[], bool],
) -> RolloutSource:
    """Workers with their engines built, and the source over them. Nothing is left running if that fails."""
    pool = WorkerPool(config.rollout, spawned or spawn_workers(config.rollout, log_dir), log_dir, on_event)
    try:
        pool.initialise(engine_spec(config, precision, device), should_stop)
        return RolloutSource(config, task, codec, pool, on_event, should_stop)
    except BaseException:
        pool.close()
        raise


def engine_spec(config: Config, precision: Precision, device: str) -> EngineSpec:
    """What workers build their engine from; dtypes are explicit names, never ``auto``."""
    inline = config.rollout.num_workers == 0
    dtypes = {site: dtype_name(getattr(precision, site)) for site in ("rollout", "rollout_head", "wire")}
    problems = engine_problems(config.rollout.backend, dtypes)
    if problems:
        raise ConfigErrors(problems)
    return EngineSpec(
        factory=ENGINES[config.rollout.backend],
        model=locate(config.model.name_or_path),
        init_kwargs=dict(config.model.init_kwargs),
        trust_remote_code=config.model.trust_remote_code,
        dtypes=dtypes,
        device=device,
        num_threads=config.trainer.num_threads if inline else config.rollout.num_threads,
        batch_size=config.rollout.batch_size,
        options={} if config.rollout.backend is Backend.hf else asdict(config.rollout.vllm),
    )
