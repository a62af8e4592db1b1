"""``grpo-exp plan``: what a run or a sweep will need, before anything is launched."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config.compose import Composed

collected: "list[Composed]" = []
"""The jobs that the launcher ``planning`` was handed. Here, because Hydra imports its plugins twice."""
