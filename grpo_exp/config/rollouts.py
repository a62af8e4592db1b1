"""What can be known to be wrong with the rollout group, and what each engine cannot do. Imports no torch.

A setting that an engine would ignore is refused here: ignored, it would make an arm of an experiment a lie.
"""

from collections.abc import Mapping
from dataclasses import fields
from urllib.parse import urlsplit

from ..errors import ConfigError
from .schema import Backend, Config, RolloutConfig, SamplingConfig, SyncTransport

OF_VLLM = (Backend.vllm, Backend.vllm_server)
NEUTRAL = SamplingConfig()
SAMPLING = tuple(entry.name for entry in fields(SamplingConfig))
LOWEST, HIGHEST = 2.0**-126, 2.0**127
HOTTEST = 2.0
KWARGS_OF_VLLM = ("dtype", "torch_dtype", "revision", "attn_implementation", "device_map", "use_safetensors")
"""Keywords of ``from_pretrained`` that name no other weights than vLLM loads by itself: the trainer may have them."""


def rollout_problems(config: Config) -> list[ConfigError]:
    rollout = config.rollout
    problems = [*_sampling_problems(rollout), *_sync_problems(rollout)]
    if not LOWEST <= rollout.temperature <= HIGHEST:
        reason = "greedy rollouts have no log-probability to train on"
        problems.append(ConfigError("rollout.temperature", rollout.temperature, "a number > 0", reason))
    if not 0.01 <= rollout.vllm.kv_cache_gib <= 2**20:  # NaN never passes, also where nothing reads it
        problems.append(ConfigError("rollout.vllm.kv_cache_gib", rollout.vllm.kv_cache_gib, "a number from 0.01 on"))
    if rollout.num_workers == 0 and rollout.max_staleness:
        fix = "rollout.num_workers=0 runs in lockstep"
        problems.append(ConfigError("rollout.max_staleness", rollout.max_staleness, "0", fix))
    if rollout.backend in OF_VLLM:
        problems += _vllm_problems(config)
    return [*problems, *_server_problems(rollout)]


def engine_problems(backend: Backend, sites: Mapping[str, str]) -> list[ConfigError]:
    """Precision sites that an engine cannot honour.

    Args:
        sites: site → dtype name, as far as they are known; ``unknown`` agrees with anything.
    """
    rollout, head = sites["rollout"], sites["rollout_head"]
    if backend not in OF_VLLM or head == rollout or "unknown" in (head, rollout):
        return []
    reason = f"rollout={backend.name} computes its head in the rollout dtype; rollout=hf can do otherwise"
    return [ConfigError("precision.rollout_head", head, rollout, reason)]


def _sampling_problems(rollout: RolloutConfig) -> list[ConfigError]:
    """Nothing may shape what is trained on; what evaluation asks for has to be possible."""
    problems = []
    for name in SAMPLING:
        neutral, value, evaluated = (getattr(owner, name) for owner in (NEUTRAL, rollout, rollout.evaluation))
        if value != neutral:
            reason = (
                "mu would belong to another distribution than the one the trainer computes, and every ratio be biased;"
                f" rollout.evaluation.{name} is for evaluation"
            )
            problems.append(ConfigError(f"rollout.{name}", value, str(neutral), reason))
        key = f"rollout.evaluation.{name}"
        if evaluated != neutral and rollout.backend not in OF_VLLM:
            reason = f"rollout={rollout.backend.name} samples from the whole distribution; rollout=vllm can do this"
            problems.append(ConfigError(key, evaluated, str(neutral), reason))
        elif not _possible(name, evaluated):
            problems.append(ConfigError(key, evaluated, RANGES[name]))
    temperature = rollout.evaluation.temperature
    if temperature is not None and not LOWEST <= temperature <= HIGHEST:
        reason = "greedy completions are evaluated besides"
        problems.append(ConfigError("rollout.evaluation.temperature", temperature, "null, or a number > 0", reason))
    return problems


RANGES = {
    "top_p": "a number above 0, up to 1",
    "top_k": "0 (all tokens) or more",
    "min_p": "a number from 0 to 1",
    "repetition_penalty": "a number > 0, up to 2",
    "presence_penalty": "a number from -2 to 2",
    "frequency_penalty": "a number from -2 to 2",
}


def _possible(name: str, value: float) -> bool:
    match name:
        case "top_p":
            return 0 < value <= 1
        case "top_k":
            return value >= 0
        case "min_p":
            return 0 <= value <= 1
        case "repetition_penalty":
            return 0 < value <= 2
        case _:
            return -2 <= value <= 2


def _sync_problems(rollout: RolloutConfig) -> list[ConfigError]:
    """Which transports exist for which engine."""
    match rollout.sync:
        case SyncTransport.nccl | SyncTransport.ipc:
            reason = "not built: it needs GPUs on both sides; shm goes through the memory of the host"
            return [ConfigError("rollout.sync", rollout.sync.name, "auto, shm, file", reason)]
        case SyncTransport.file if rollout.backend is not Backend.vllm_server:
            reason = f"rollout={rollout.backend.name} is on this machine and shares memory with the trainer"
            return [ConfigError("rollout.sync", "file", "auto, shm", reason)]
    return []


def _server_problems(rollout: RolloutConfig) -> list[ConfigError]:
    problems = []
    urls = str(rollout.urls)
    if rollout.http_retries < 0:
        problems.append(ConfigError("rollout.http_retries", rollout.http_retries, "0 or more"))
    if rollout.urls and rollout.backend is not Backend.vllm_server:
        problems.append(ConfigError("rollout.urls", urls, "[]", "rollout=vllm_server talks to servers"))
    elif rollout.urls and len(rollout.urls) != rollout.num_workers:
        fix = f"one worker talks to one server: rollout.num_workers={len(rollout.urls)}"
        problems.append(ConfigError("rollout.num_workers", rollout.num_workers, str(len(rollout.urls)), fix))
    if any(urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname for url in rollout.urls):
        problems.append(ConfigError("rollout.urls", urls, "[http://HOST:PORT,…]"))
    elif rollout.sync is SyncTransport.shm and not all(map(is_local, rollout.urls)):
        reason = "a server on another machine cannot see the trainer's memory"
        problems.append(ConfigError("rollout.sync", "shm", "auto, file", reason))
    return problems


def is_local(url: str) -> bool:
    """Whether a server is on this machine."""
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


def _vllm_problems(config: Config) -> list[ConfigError]:
    rollout, problems = config.rollout, []
    for key, value in {
        "rollout.temperature": rollout.temperature,
        "rollout.evaluation.temperature": rollout.evaluation.temperature,
    }.items():
        if value is not None and value > HOTTEST:
            problems.append(ConfigError(key, value, f"up to {HOTTEST:g}", "vLLM refuses more; rollout=hf takes any"))
    if rollout.num_workers == 0:
        reason = "this engine needs a process of its own; rollout.max_staleness=0 generates and trains in turn"
        problems.append(ConfigError("rollout.num_workers", 0, "1 or more", reason))
    if rollout.vllm.max_model_len is not None and rollout.vllm.max_model_len < 2:
        problems.append(ConfigError("rollout.vllm.max_model_len", rollout.vllm.max_model_len, "null, or 2 or more"))
    for name, value in config.model.init_kwargs.items():
        if name not in KWARGS_OF_VLLM:
            reason = (
                f"vLLM loads the model by itself and does not know it; rollout=hf takes it, {rollout.backend.name} not"
            )
            problems.append(ConfigError(f"model.init_kwargs.{name}", value, "no such keyword", reason))
    return problems
