"""A user's function that scores completions."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from toolkit.generation.text.rows import PromptRow
from toolkit.user_function import UserFunction, as_number


@dataclass(frozen=True)
class Scorer:
    """Scores completions by a function, which takes a completion and its row as the file has it.

    The function returns True, False or a number from 0 to 1.
    """

    function: UserFunction

    def score(self, completion: str, row: PromptRow) -> float:
        """Returns the score of a row's completion, 0 to 1.

        Raises:
            BadInputError: if the function fails or returns something else; it names the row.
        """
        # A copy, so that one score does not depend on those before it.
        found = self.function.call(row.place, completion, copy.deepcopy(dict(row.fields)))
        score = as_number(found)
        if score is not None and 0 <= score <= 1:
            return score
        raise self.function.wrong(found, row.place, "True, False, or a number from 0 to 1")
