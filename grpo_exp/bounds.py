"""When a run ends: after so many steps, epochs or minutes, whichever comes first."""

import math
from dataclasses import dataclass

from .config.schema import TrainerConfig


@dataclass(frozen=True)
class Bounds:
    config: TrainerConfig
    num_prompts: int

    @property
    def horizon(self) -> int | None:
        """Steps of the whole run as far as they are known, for the learning-rate schedule; None: minutes alone."""
        epochs, bounds = self.config.max_epochs, []
        if self.config.max_steps is not None:
            bounds.append(self.config.max_steps)
        if epochs is not None:
            bounds.append(math.ceil(epochs * self.num_prompts / self.config.prompts_per_step))
        return min(bounds, default=None)

    def steps_left(self, step: int) -> int | None:
        """Steps after ``step`` as far as ``max_steps`` bounds them; the data may end before."""
        return None if self.config.max_steps is None else self.config.max_steps - step

    def reason_to_end(self, step: int, wall_s: float, data_used_up: bool) -> str | None:
        """Why the run is over after this step, None if it is not."""
        if self.config.max_minutes is not None and wall_s >= 60 * self.config.max_minutes:
            return "trainer.max_minutes"
        if self.config.max_steps is not None and step >= self.config.max_steps:
            return "trainer.max_steps"
        if not data_used_up:
            return None
        return "trainer.max_epochs" if self.config.max_epochs is not None else "what was recorded is used up"
