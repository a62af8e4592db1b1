"""``python -m grpo_exp``: the same as ``grpo-exp``, for launchers that start a module."""

from .cli import main

main()
