"""Hydra launchers of grpo_exp."""
