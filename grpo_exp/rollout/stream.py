"""The order of prompts: a serial number is one group, and says which row of the data set it takes."""

import random
from typing import Any


class PromptStream:
    """Rows of a data set, in a new order every epoch that depends on the seed alone.

    Serial n is row ``order(n // size)[n % size]``; so the position in the data is one number.
    """

    def __init__(self, rows: list[dict[str, Any]], seed: int, max_epochs: int | None) -> None:
        self.rows, self.seed = rows, seed
        self.limit = None if max_epochs is None else max_epochs * len(rows)
        self.cursor = 0
        self.again: list[int] = []  # serials to start before the cursor goes on, after a resume
        self._order: tuple[int, list[int]] = (-1, [])

    def index(self, serial: int) -> int:
        epoch, position = divmod(serial, len(self.rows))
        if self._order[0] != epoch:
            order = list(range(len(self.rows)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1][position]

    def row(self, serial: int) -> dict[str, Any]:
        return self.rows[self.index(serial)]

    @property
    def exhausted(self) -> bool:
        return not self.again and self.limit is not None and self.cursor >= self.limit

    def coming_serials(self, count: int) -> list[int]:
        """Up to ``count`` serials that come next, without taking them."""
        end = self.cursor + count if self.limit is None else min(self.cursor + count, self.limit)
        return [*self.again, *range(self.cursor, end)][:count]

    def next_serials(self, count: int) -> list[int]:
        """Up to ``count`` serials, fewer at the end of the last epoch."""
        serials, self.again = self.again[:count], self.again[count:]
        while len(serials) < count and not self.exhausted:
            serials.append(self.cursor)
            self.cursor += 1
        return serials
