"""Measuring a grid: the model is loaded once, each generator samples once, each trainer scores what each generator sampled."""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from .. import assets
from ..config.schema import Config
from ..device import compute_device
from ..errors import ConfigError, RunFailed
from ..folder import now
from ..kernels import kernel_name
from ..manifest import about_this_machine
from ..policy import load_policy, read_checkpoint_dtype
from ..precision import DTYPES, Precision, resolve
from ..token_batch import Completion
from . import store
from .cells import Generator, Trainer, generator_config, generators, reason, trainer_config, trainers
from .prompts import encoded
from .sample import Sampled, sample
from .score import Scored, score
from .settings import Arguments
from .stats import as_json, batch_floor, statistics

REFERENCE = "fp32"  # what relative errors are relative to, in body and head of the trainer
Result = TypeVar("Result")


@dataclass
class Column:
    """A trainer of the grid, with its precision or with the reason why it has none."""

    cell: Trainer
    precision: Precision | None
    refused: str | None


class Measurement:
    """One probe: model and prompts at first, then every cell that can be had.

    Raises:
        ConfigError: a model or prompts that cannot be had. What single cells cannot have is in the report.
    """

    def __init__(self, arguments: Arguments, config: Config, folder: Path) -> None:
        self.settings, self.overrides = arguments.settings, arguments.overrides
        self.config, self.folder = config, folder
        torch.set_num_threads(config.trainer.num_threads)
        torch.set_float32_matmul_precision(config.precision.matmul)
        self.device = compute_device(config)
        name, kwargs, trusted = config.model.name_or_path, config.model.init_kwargs, config.model.trust_remote_code
        self.own_dtype = read_checkpoint_dtype(assets.locate(name), kwargs, trusted)
        params = self._precision(config).params
        self.model = load_policy(assets.locate(name), kwargs, params, trusted, self.device)
        prompts_from, self.prompts = encoded(
            config, self.settings, getattr(self.model.config, "max_position_embeddings", None)
        )
        self.arrays: store.Arrays = store.packed("prompts", self.prompts)
        self.columns = [self._column(cell) for cell in trainers(self.settings)]
        self.reference = self._column(Trainer(REFERENCE, REFERENCE, self.settings.micro_batch[0]))
        self.report: dict[str, Any] = {
            "format": store.FORMAT,
            "created": now(),
            "overrides": arguments.given,
            "grid": asdict(self.settings) | {"prompts_from": prompts_from.name},
            "model": {"name": name, "source": assets.source(name)},
            "temperature": config.rollout.temperature,
            "seed": config.seed,
            "device": str(self.device),
            "kernels": self._kernels(),
            **about_this_machine(),
            "generators": [],
            "cells": [],
            "batch_floor": [],
        }

    def _precision(self, config: Config) -> Precision:
        """Raises ConfigError for what the device cannot do."""
        return resolve(config.precision, self.own_dtype, self.device, config.model.init_kwargs, config.optim.eps)

    def _kernels(self) -> dict[str, str]:
        """How products of each dtype of the grid are computed here."""
        of_cells = [cell.rollout for cell in generators(self.settings)] + [c.compute for c in trainers(self.settings)]
        return {name: kernel_name(DTYPES[name], self.device) for name in sorted({*of_cells, REFERENCE})}

    def _column(self, cell: Trainer) -> Column:
        try:
            return Column(cell, self._precision(trainer_config(cell, self.config)), None)
        except ConfigError as error:
            return Column(cell, None, reason(error))

    def run(self) -> None:
        """Measure everything. After each generator the folder holds all there is."""
        cells = generators(self.settings)
        for index, cell in enumerate(cells):
            say(f"{index + 1} of {len(cells)}: {cell.label}")
            self._measure(index, cell)
            store.write(self.folder, self.report, self.arrays)

    def _measure(self, index: int, cell: Generator) -> None:
        """One generator, and every trainer on its completions."""
        entry: dict[str, Any] = asdict(cell) | {"label": cell.label, "refused": None, "failed": None}
        self.report["generators"].append(entry)
        sampled = attempt(entry, lambda: self._sample(cell))
        if sampled is None:
            return
        say(f"  {sampled.num_tokens:,} tokens sampled in {sampled.seconds:.0f} s")
        self._keep(index, entry, sampled)
        completions = [
            Completion(place, self.prompts[place // self.settings.num_completions], rollout.token_ids)
            for place, rollout in enumerate(sampled.rollouts)
        ]
        scored: dict[Trainer, Scored | None] = {}
        self._score(self.reference, completions, scored, {})
        for number, column in enumerate(self.columns):
            row: dict[str, Any] = {"generator": cell.label, "trainer": column.cell.label, **asdict(column.cell)}
            row |= {"refused": column.refused, "failed": None, "statistics": None}
            self.report["cells"].append(row)
            found = self._score(column, completions, scored, row)
            if found is not None:
                self.arrays[f"g{index}.t{number}"] = found.logprobs
                row |= {"seconds": found.seconds, "statistics": self._statistics(index, found, scored)}
        self._compare_sizes(index, cell, scored)

    def _sample(self, cell: Generator) -> Sampled:
        config = generator_config(cell, self.overrides, self.settings)
        precision = self._precision(config)
        logs = self.folder / "logs" / cell.label.replace(",", "").replace(" ", "-")
        return sample(config, precision, self.model, self.prompts, self.settings, logs, str(self.device))

    def _keep(self, index: int, entry: dict[str, Any], sampled: Sampled) -> None:
        rollouts = sampled.rollouts
        entry |= {"num_sequences": len(rollouts), "num_tokens": sampled.num_tokens, "seconds": sampled.seconds}
        entry |= {"num_finished": sum(rollout.finished for rollout in rollouts), "observed": sampled.observed}
        self.arrays |= store.packed(f"g{index}.tokens", [rollout.token_ids for rollout in rollouts])
        self.arrays[f"g{index}.mu"] = np.concatenate([rollout.mu for rollout in rollouts])

    def _score(
        self,
        column: Column,
        completions: list[Completion],
        scored: dict[Trainer, Scored | None],
        row: dict[str, Any],
    ) -> Scored | None:
        """What a trainer makes of the completions, each trainer once."""
        precision = column.precision
        if precision is None:
            return None
        if column.cell not in scored:
            config = self.config
            scored[column.cell] = attempt(
                row,
                lambda: score(
                    self.model,
                    precision,
                    completions,
                    column.cell.micro_batch,
                    config.rollout.temperature,
                    config.trainer.logprob_chunk,
                ),
            )
            if (found := scored[column.cell]) is not None:
                say(f"  scored in {column.cell.label}: {found.seconds:.0f} s")
        return scored[column.cell]

    def _statistics(self, index: int, found: Scored, scored: dict[Trainer, Scored | None]) -> dict[str, Any]:
        mu = self.arrays[f"g{index}.mu"].astype(np.float64)
        reference = scored.get(self.reference.cell)
        known = None if reference is None else reference.logprobs.astype(np.float64)
        if reference is not None:
            self.arrays[f"g{index}.reference"] = reference.logprobs
        lengths = self.arrays[f"g{index}.tokens.lengths"]
        return as_json(statistics(mu, found.logprobs.astype(np.float64), known, lengths))

    def _compare_sizes(self, index: int, cell: Generator, scored: dict[Trainer, Scored | None]) -> None:
        """The noise floor: trainers that differ in their micro-batch size alone, each against the first size."""
        first = self.settings.micro_batch[0]
        for trainer, found in scored.items():
            start = scored.get(Trainer(trainer.compute, trainer.head, first))
            if found is None or start is None or trainer.micro_batch == first:
                continue
            one, other = start.logprobs.astype(np.float64), found.logprobs.astype(np.float64)
            statistic = as_json(batch_floor(one, other, self.arrays[f"g{index}.tokens.lengths"]))
            entry = {"generator": cell.label, **asdict(trainer), "against": first, "statistics": statistic}
            self.report["batch_floor"].append(entry)


def attempt(entry: dict[str, Any], work: Callable[[], Result]) -> Result | None:
    """The result, or None with the reason in the entry: no cell keeps another one from being measured."""
    try:
        return work()
    except ConfigError as error:
        entry["refused"] = reason(error)
    except RunFailed as error:
        entry["failed"] = reason(error)
    except (RuntimeError, NotImplementedError) as error:  # torch's: no such kernel, out of memory
        entry["failed"] = f"{type(error).__name__}: {reason(error)}"
    say(f"  not measured: {entry['refused'] or entry['failed']}")
    return None


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
