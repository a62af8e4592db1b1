"""The read-back: what dtypes are in effect, taken from live objects and held against what was declared.

It happens after start-up and after the first applied step. Both are written to the manifest; a difference, or a site that
nothing was seen of, ends the run.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .device import num_ranks
from .distributed.team import Team
from .folder import RunFolder
from .lora import adapter_parameters
from .manifest import hardware
from .optim import Optimizer
from .policy import Policy
from .precision import Audit, DtypeProbe, Precision, dtype_name, observed_dtypes
from .sync.shm import unique_parameters
from .weights import Reference


class ReadBack:
    """The audit of one run over its live objects."""

    def __init__(self, precision: Precision, policy: Policy, optimizer: Optimizer, folder: RunFolder) -> None:
        self.precision, self.policy, self.optimizer, self.folder = precision, policy, optimizer, folder
        self.reference: list[Tensor] = []  # the weights of the frozen reference, where there is one
        self.audit = Audit(precision)
        self.team: Team | None = None
        self._probe: DtypeProbe | None = DtypeProbe(policy.body)

    def with_team(self, team: Team) -> None:
        """Several ranks: how many, by which wrapper and through what is read back as well."""
        self.team = team
        self.audit.declared |= team.declared()

    def with_reference(self, reference: Reference | None) -> None:
        """The frozen policy whose weights are looked at; where there is none, its site is none of this run's."""
        if reference is None:
            del self.audit.declared["reference"]
        else:
            self.reference = reference.weights

    def at_startup(self, generator: dict[str, str]) -> None:
        """Weights, modes and ranks, before anything is trained. ``generator`` is what the workers report of themselves.

        Raises:
            RunFailed: at a difference.
        """
        self._check("startup", self._before_training(generator))

    def at_first_sync(self, generator: dict[str, str]) -> None:
        """Once more where log-probabilities say that something is wrong: a dtype that explains it is named.

        Raises:
            RunFailed: at a difference.
        """
        seen = {} if self._probe is None or not self._probe.seen else {"compute": self._probe.observed()}
        self._check("first_sync", self._before_training(generator) | seen)

    def after_first_step(self, generator: dict[str, str]) -> None:
        """Every site, while the gradients of the first applied step are still there; later calls do nothing.

        Raises:
            RunFailed: at a difference, or if a site was not seen.
        """
        if self._probe is None:
            return
        observed = self._before_training(generator) | {
            "compute": self._probe.observed(),
            "head": "none" if self.policy.logits_dtype is None else dtype_name(self.policy.logits_dtype),
            "grad_reduce": self._grad_reduce(),
            "optimizer_state": observed_dtypes(self.optimizer.moments()),
        }
        self._probe.close()
        self._probe = None
        self._check("first_step", observed)
        self.audit.check_complete()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For computations with the model that are not the run's own: their dtypes are not looked at."""
        probe = self._probe
        if probe is not None:
            probe.is_paused = True
        try:
            yield
        finally:
            if probe is not None:
                probe.is_paused = False

    def write(self) -> None:
        """Declared and observed, with the reasons, into the manifest, and the machine on which that is so."""
        self.folder.update_manifest(
            hardware=hardware(self.policy.device.type),  # a run may start elsewhere than where it was prepared
            precision={
                "declared": self.audit.declared,
                "reasons": {site: why for site, why in self.precision.reasons.items() if site in self.audit.declared},
                "observed": self.audit.observed,
                "kernels": self.precision.kernels(self.policy.device),
            },
        )

    def _before_training(self, generator: dict[str, str]) -> dict[str, str]:
        return {
            "params": observed_dtypes(unique_parameters(self.policy.model).values()),
            "matmul": torch.get_float32_matmul_precision(),
            "loss_scale": self.optimizer.loss_scale.mode_in_effect,
            **({"num_ranks": str(num_ranks())} if self.team is None else self.team.observed()),
            **(
                {"adapter": observed_dtypes(adapted)}
                if (adapted := adapter_parameters(self.policy.model).values())
                else {}
            ),
            **({"reference": observed_dtypes(self.reference)} if self.reference else {}),
            **generator,
        }

    def _grad_reduce(self) -> str:
        if self.team is None:
            return observed_dtypes(p.grad for p in self.optimizer.params)
        return "+".join(sorted(self.team.wrapped.reduced)) or "none"

    def _check(self, phase: str, observed: dict[str, str]) -> None:
        try:
            self.audit.check(phase, observed)
        finally:
            self.write()
