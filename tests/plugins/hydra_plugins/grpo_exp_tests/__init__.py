"""Hydra launchers for tests; found where ``tests/plugins`` is on the path."""
