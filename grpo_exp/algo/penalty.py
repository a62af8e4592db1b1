"""Terms of the loss that do not depend on the advantage: the distance from a reference policy."""

from torch import Tensor

from grpo_exp.config.schema import KlEstimator

from .loss import clamp_log_ratio


def reference_kl(new: Tensor, reference: Tensor, kind: KlEstimator) -> Tensor:
    """Estimates of KL(policy || reference) in nats at each sampled token, [n], with gradient by ``new``.

    With ``d = new - reference`` (Schulman 2020, "Approximating KL Divergence"): ``k1 = d``, unbiased, of either sign;
    ``k2 = d^2 / 2``, biased, never negative, and its gradient is unbiased; ``k3 = exp(-d) - 1 + d``, unbiased, never
    negative. Of tokens that the policy itself sampled, the mean gradient of k1 is 0: in a loss it only adds noise.

    Args:
        new: log-probability in nats under the weights being trained.
        reference: the same under the reference; no gradient flows into it.
    """
    d = new - reference.detach()
    match kind:
        case KlEstimator.k1:
            return d
        case KlEstimator.k2:
            return d.square() / 2
        case KlEstimator.k3:
            return clamp_log_ratio(-d).exp() - 1 + d
