"""A laboratory for numerical precision in asynchronous GRPO.

    from grpo_exp import AsyncGRPOConfig, AsyncGRPOTrainer

Importing the package itself imports no torch; the two names are loaded when they are first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .args import AsyncGRPOConfig
    from .trainer import AsyncGRPOTrainer

__version__ = "0.1.0"
__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer"]


def __getattr__(name: str) -> Any:
    if name == "AsyncGRPOConfig":
        from .args import AsyncGRPOConfig

        return AsyncGRPOConfig
    if name == "AsyncGRPOTrainer":
        from .trainer import AsyncGRPOTrainer

        return AsyncGRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
