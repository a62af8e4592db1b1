"""What several ranks cannot do together. Imports no torch."""

from collections.abc import Iterator

from ..errors import ConfigError
from .schema import Backend, Config, Proximal, Strategy


def layout_problems(config: Config) -> Iterator[ConfigError]:
    """Settings that need what the ranks of ``distributed.strategy`` do not have."""
    strategy = config.distributed.strategy
    if strategy is not Strategy.single and config.model.init_kwargs.get("device_map") is not None:
        yield ConfigError(
            "model.init_kwargs.device_map",
            config.model.init_kwargs["device_map"],
            "null",
            f"distributed={strategy.name} gives every rank one device",
        )
    if strategy is not Strategy.fsdp2:
        return
    fix = "it takes all weights on one rank: distributed=ddp or single"
    if config.probe.every:
        yield ConfigError("probe.every", config.probe.every, "0 with distributed=fsdp2", fix)
    if config.correction.proximal is Proximal.beta_removal:
        yield ConfigError(
            "correction.proximal", "beta_removal", "rollout, recompute, interpolate with distributed=fsdp2", fix
        )
    if config.lora.rank:
        yield ConfigError("lora.rank", config.lora.rank, "0 with distributed=fsdp2", "adapters are not laid in parts")
    if config.rollout.backend is Backend.replay:
        yield ConfigError("rollout.backend", "replay", "hf, vllm, vllm_server with distributed=fsdp2", fix)
