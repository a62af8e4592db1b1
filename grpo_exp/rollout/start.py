"""Starting the rollout side of a run: pool, engines and source from a configuration."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..assets import locate
from ..config.rollouts import engine_problems, is_local
from ..config.schema import Backend, Config, RolloutConfig, SyncTransport
from ..errors import ConfigErrors
from ..precision import Precision, dtype_name
from ..tasks import Task
from .aside import Codec
from .pool import OnEvent, WorkerPool
from .process import Spawned, spawn_workers
from .replay import ReplaySource
from .source import RolloutSource
from .types import EngineSpec

ENGINES = {
    Backend.hf: "grpo_exp.rollout.hf:HFEngine",
    Backend.vllm: "grpo_exp.rollout.vllm:VllmEngine",
    Backend.vllm_server: "grpo_exp.rollout.vllm_server:VllmServerEngine",
    Backend.replay: "grpo_exp.rollout.hf:HFEngine",  # for evaluation
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
        pool.initialise(engine_spec(config, precision, device, log_dir.parent), should_stop)
        kind = ReplaySource if config.rollout.backend is Backend.replay else RolloutSource
        return kind(config, task, codec, pool, on_event, should_stop)
    except BaseException:
        pool.close()
        raise


def engine_spec(config: Config, precision: Precision, device: str, folder: Path = Path()) -> EngineSpec:
    """What workers build their engine from; dtypes are explicit names, never ``auto``.

    Raises:
        ConfigError: if the engine cannot honour a precision site.
    """
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
        options=engine_options(config.rollout, folder),
    )


def engine_options(rollout: RolloutConfig, folder: Path) -> dict[str, Any]:
    """What only some engines have."""
    match rollout.backend:
        case Backend.hf | Backend.replay:
            return {}
        case Backend.vllm:
            return asdict(rollout.vllm)
        case Backend.vllm_server:
            in_memory = rollout.sync is SyncTransport.shm or all(map(is_local, rollout.urls))
            transport = (
                SyncTransport.shm if in_memory and rollout.sync is not SyncTransport.file else SyncTransport.file
            )
            return asdict(rollout.vllm) | {
                "urls": list(rollout.urls),
                "token_variable": rollout.token_variable,
                "http_timeout_s": rollout.http_timeout_s,
                "http_retries": rollout.http_retries,
                "startup_timeout_s": rollout.startup_timeout_s,
                "sync": transport.name,
                "sync_dir": rollout.sync_dir or str(folder / "sync"),
            }
