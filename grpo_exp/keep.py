"""What a run keeps in ``rollouts/``: the groups it trains with ``rollout.record``, traces of its steps in a replay.

A trace holds what can be compared between replays of one recording: the log-probability of every token under the trainer,
and sketches of the gradient and of the update of the weights (:mod:`grpo_exp.algo.sketch`).
"""

from collections.abc import Sequence

import numpy as np
import torch

from . import jsonl
from .algo.sketch import SEED, SIZE, count_sketch, norm
from .config.replays import FOLDER, FORMAT, find_recording, other_vocabulary, read_about, vocabulary_of
from .config.schema import Backend, Config
from .folder import RunFolder
from .metrics import Passes
from .optim import Optimizer, StepOutcome
from .precision import Precision, dtype_name
from .recording import TRACES, Recording, cut_after, trace_file, write_arrays
from .rollout.types import Group


class Keeper:
    """Writes these files, if there are any to be written.

    Args:
        vocabulary: the fingerprint of the tokenizer, None where it has none.
        after_step: the checkpoint that the run goes on from; None: from the start.

    Raises:
        ConfigError: the recording that is replayed has another vocabulary.
    """

    def __init__(
        self,
        config: Config,
        precision: Precision,
        folder: RunFolder,
        optimizer: Optimizer,
        vocabulary: str | None,
        after_step: int | None,
    ) -> None:
        self.run, self.optimizer = folder.path, optimizer
        self._recording: Recording | None = None
        self._weights: list[torch.Tensor] | None = None
        if config.rollout.record:
            self._recording = Recording(self.run, _about(config, precision, vocabulary), after_step)
        if config.rollout.backend is Backend.replay:
            self._check_vocabulary(config, vocabulary)
            (self.run / FOLDER).mkdir(exist_ok=True)
            cut_after(self.run / FOLDER, trace_file, after_step or 0)
            jsonl.write_json_atomic(self.run / FOLDER / TRACES, {"format": FORMAT, "size": SIZE, "seed": SEED})
            self._weights = self._copies()

    def groups(self, step: int, version: int, groups: Sequence[Group], rows: Sequence[int]) -> None:
        """Before a step: what it trains. ``rows``: the numbers of the prompts in the data set."""
        if self._recording is not None:
            self._recording.write(step, version, groups, rows)

    def trace(self, step: int, passes: Passes, outcome: StepOutcome) -> None:
        """After a step, while its gradients are still there.

        Raises:
            RunFailed: if the disk does not take it.
        """
        if self._weights is None:
            return
        order = (passes.sequence * (passes.position.max() + 1) + passes.position).argsort()
        arrays = {"logprobs": passes.new[order].cpu().numpy()}
        if outcome.applied:
            gradient = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.optimizer.params]
            pairs = zip(self.optimizer.params, self._weights, strict=True)
            update = [p.detach().double() - before.double() for p, before in pairs]  # float64: a small difference
            self._weights = self._copies()
            # gradients have been clipped since; that changes no angle, and outcome has the norm from before
            arrays |= {"gradient": count_sketch(gradient).numpy(), "update": count_sketch(update).numpy()}
            arrays["norms"] = np.array([outcome.grad_norm, norm(update)])
        write_arrays(self.run / FOLDER / trace_file(step), arrays)

    def close(self) -> None:
        if self._recording is not None:
            self._recording.close()

    def _copies(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.optimizer.params]

    def _check_vocabulary(self, config: Config, vocabulary: str | None) -> None:
        run = find_recording(config.rollout.replay_from or "", config.seed)
        about = read_about(run)
        if None not in (vocabulary, about["vocabulary"]) and vocabulary != about["vocabulary"]:
            raise other_vocabulary(config.model.name_or_path, run, str(about["model"]))


def _about(config: Config, precision: Precision, vocabulary: str | None) -> dict[str, object]:
    """recording.json: what the rollouts belong to, and how they were sampled."""
    return {
        "format": FORMAT,
        "model": config.model.name_or_path,
        "vocabulary": vocabulary,
        "vocabulary_file": vocabulary_of(config.model.tokenizer or config.model.name_or_path),
        "seed": config.seed,
        "rollout.backend": config.rollout.backend.name,
        "rollout.temperature": config.rollout.temperature,
        "rollout.max_staleness": config.rollout.staleness_bound,
        "precision.rollout": dtype_name(precision.rollout),
        "precision.rollout_head": dtype_name(precision.rollout_head),
        "task.name": config.task.name.name,
        "task.max_completion_tokens": config.task.max_completion_tokens,
        "trainer.prompts_per_step": config.trainer.prompts_per_step,
        "algo.group_size": config.algo.group_size,
    }
