"""What a rank that does not lead builds, from the configuration that the leader sent."""

import torch

from ..assets import locate
from ..config.schema import Config
from ..device import compute_device
from ..optim import Optimizer
from ..passes import PassRunner
from ..policy import Policy, load_policy, read_checkpoint_dtype
from ..precision import resolve
from .ranks import Ranks
from .team import Team
from .wrap import Replicas


def build_team(config: Config, ranks: Ranks) -> Team:
    """The same policy, optimizer and passes as the leader's, and the wrapper around them."""
    device = compute_device(config)
    kwargs, source, remote_code = (
        config.model.init_kwargs,
        locate(config.model.name_or_path),
        config.model.trust_remote_code,
    )
    own_dtype = read_checkpoint_dtype(source, kwargs, remote_code)
    precision = resolve(config.precision, own_dtype, device, kwargs, config.optim.eps)
    torch.set_num_threads(config.trainer.num_threads)
    torch.set_float32_matmul_precision(precision.matmul)
    policy = Policy(
        load_policy(source, kwargs, precision.params, remote_code, device), precision, config.trainer.logprob_chunk
    )
    passes = PassRunner(policy, config.algo, config.correction, config.rollout.temperature)
    return assemble(config, ranks, passes, Optimizer(policy.model, config.optim, precision))


def assemble(config: Config, ranks: Ranks, passes: PassRunner, optimizer: Optimizer) -> Team:
    """Ranks wait for each other here."""
    ranks.open_compute(passes.policy.device, config.distributed.timeout_s)
    return Team(config.distributed.strategy, ranks, passes, optimizer, Replicas(passes.policy, ranks))
