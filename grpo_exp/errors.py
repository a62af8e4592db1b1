"""The one exception for what a user can put right: printed in a line or two, exit code 2, never with a traceback."""

from collections.abc import Iterable

LONGEST = 400
"""Characters of a value that a message shows."""


class ConfigError(ValueError):
    """A setting that cannot be used.

    Args:
        key: dotted path of the setting, as it is written on the command line.
        value: the value that was given.
        allowed: what would be accepted, in words or as a list of names.
        fix: what to do, as an imperative.
    """

    def __init__(self, key: str, value: object, allowed: str | Iterable[str] = "", fix: str = "") -> None:
        self.key, self.value, self.fix = key, value, fix
        self.allowed = allowed if isinstance(allowed, str) else ", ".join(allowed)
        text = f"{key}={written(value)}"
        if self.allowed:
            text += f": allowed: {self.allowed}"
        if fix:
            text += f" ({fix})" if self.allowed else f": {fix}"
        super().__init__(text)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.key, self.value, self.allowed, self.fix)


def written(value: object) -> str:
    """A value as it is written on the command line, text in quotes, on one line and not too long."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case _:
            shown = " ".join((repr(value) if isinstance(value, str) else str(value)).split())
            return shown if len(shown) <= LONGEST else f"{shown[: LONGEST // 2]}…{shown[-LONGEST // 2 :]}"


class ConfigErrors(ConfigError):
    """Every problem found in one configuration, so that a user mends them in one go."""

    def __init__(self, errors: list[ConfigError]) -> None:
        self.errors = errors
        ValueError.__init__(self, "\n".join(str(error) for error in errors))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.errors,)


class Interrupted(Exception):
    """A run was asked to stop while it waited."""


class RunFailed(RuntimeError):
    """A run that cannot go on: the message is the reason that status.json records."""
