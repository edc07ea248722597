"""Whether what a recipe names is here, and whether the hub can be reached: both before its library is imported."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Iterable

from toolkit.data.rows.files import paths_of
from toolkit.paths import is_file_source, is_hub_name, require_folder
from toolkit.recipe.recipe import Recipe
from toolkit.terminal import Terminal

ENDPOINT, OFFLINE = "HF_ENDPOINT", "HF_HUB_OFFLINE"
"""huggingface_hub's variables, which it reads when it is imported."""

ANSWER_SECONDS = 5.0
"""Longest wait for the hub's answer. Its library waits 10 s, and tries each file six times over 23 s."""


def settle_hub(recipe: Recipe) -> None:
    """Prints what is asked of the hub. If it cannot be reached, everything comes from the cache."""
    sources = [source.path for source in [*recipe.data.train, *(recipe.data.validation or [])]]
    settle_names(models_of(recipe).values(), sources)


def models_of(recipe: Recipe) -> dict[str, str]:
    """Returns the model, the tokenizer and the teacher that a recipe names, by field."""
    named = {
        "model.name_or_path": recipe.model.name_or_path,
        "model.tokenizer": recipe.model.tokenizer,
        "objective.teacher": recipe.objective.teacher,
    }
    return {field: name for field, name in named.items() if name is not None}


def require_inputs(recipe: Recipe, of_stores: bool = True) -> None:
    """Raises BadInputError for a missing file or folder: ranks would find that only after ten seconds of imports."""
    for field, name in models_of(recipe).items():
        require_folder(name, field)
    paths_of(recipe.data, of_stores)


def settle_names(models: Iterable[str], sources: Iterable[str]) -> None:
    """Does the same for names of models and tokenizers, and for sources of data."""
    names = [*filter(is_hub_name, models), *(path for path in sources if not is_file_source(path))]
    if not names or os.environ.get(OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE"):
        return
    console = Terminal(quiet=os.environ.get("RANK", "0") != "0")
    endpoint = os.environ.get(ENDPOINT) or "https://huggingface.co"
    console.print(f"looking on {endpoint} for {', '.join(dict.fromkeys(names))}")
    if (why := _why_unreachable(endpoint)) is not None:
        os.environ[OFFLINE] = "1"
        console.warn(f"{endpoint} cannot be reached ({why}); the cache is used instead, as with {OFFLINE}=1")


def _why_unreachable(endpoint: str) -> str | None:
    """Returns why the hub does not answer; None for any answer. Proxies are used as the environment says."""
    if not endpoint.startswith(("http://", "https://")):
        return f"{ENDPOINT} is not a web address"
    asked = urllib.request.Request(endpoint, method="HEAD")  # noqa: S310 - the line above
    try:
        with urllib.request.urlopen(asked, timeout=ANSWER_SECONDS):  # noqa: S310
            return None
    except urllib.error.HTTPError:
        return None
    except TimeoutError:
        return f"no answer within {ANSWER_SECONDS:g} s"
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        # A certificate of one's own is for the hub's library to judge, which knows more of them.
        return None if "CERTIFICATE" in str(reason) else str(reason)
