"""What a rank that does not lead builds, from the configuration that the leader sent; and what all of them put around it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from ..assets import locate
from ..config.schema import Config, Strategy
from ..device import compute_device
from ..optim import Optimizer
from ..passes import PassRunner
from ..policy import Policy, load_trained, read_checkpoint_dtype
from ..precision import resolve
from ..weights import Reference
from .ranks import Ranks
from .team import Team, Wrapped


def build_team(config: Config, ranks: Ranks) -> Team:
    """The same policy, optimizer and passes as the leader's, and the wrapper around them."""
    device = compute_device(config)
    kwargs, source, remote_code = (
        config.model.init_kwargs,
        locate(config.model.name_or_path),
        config.model.trust_remote_code,
    )
    own_dtype = read_checkpoint_dtype(source, kwargs, remote_code)
    precision = resolve(
        config.precision, own_dtype, device, kwargs, config.optim.eps, config.distributed.strategy, config.lora.rank > 0
    )
    torch.set_num_threads(config.trainer.num_threads)
    torch.set_float32_matmul_precision(precision.matmul)
    policy = Policy(load_trained(config, precision, device), precision, config.trainer.logprob_chunk)
    wrapped = wrap(config, policy, ranks)
    assert wrapped is not None, "a rank that does not lead is one of several"
    optimizer = build_optimizer(config, policy, ranks)
    return Team(config.distributed.strategy, ranks, build_passes(config, policy, wrapped), optimizer, wrapped)


def wrap(config: Config, policy: Policy, ranks: Ranks | None) -> Wrapped | None:
    """What sums gradients over the ranks, if there are any; they wait for each other here."""
    if ranks is None or config.distributed.strategy is Strategy.single:
        return None
    ranks.open_compute(policy.device, config.distributed.timeout_s)
    if config.distributed.strategy is Strategy.fsdp2:
        from .shards import Shards

        return Shards(policy, ranks)
    from .wrap import Replicas

    return Replicas(policy, ranks)


def build_optimizer(config: Config, policy: Policy, ranks: Ranks | None) -> Optimizer:
    """Over the weights as they are after :func:`wrap`."""
    in_parts = ranks is not None and config.distributed.strategy is Strategy.fsdp2
    return Optimizer(policy.model, config.optim, policy.precision, ranks.sum if ranks and in_parts else None)


def build_passes(
    config: Config,
    policy: Policy,
    wrapped: Wrapped | None,
    unwatched: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> PassRunner:
    """With the reference, where there is one: made before a checkpoint is loaded, its weights are those of the base."""
    temperature = config.rollout.temperature
    across = wrapped.logprobs if wrapped is not None and wrapped.wraps_every_pass else None
    reference = Reference(policy, temperature, unwatched, across) if config.algo.kl_coef else None
    return PassRunner(policy, config.algo, config.correction, temperature, reference)
