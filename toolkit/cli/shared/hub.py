"""Whether the hub can be reached: asked once, and before its library is imported, which tries for a minute."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping

from toolkit.errors import BadInputError
from toolkit.paths import download_command, is_file_source, is_hub_name
from toolkit.recipe.recipe import Recipe
from toolkit.terminal import Terminal

ENDPOINT, OFFLINE = "HF_ENDPOINT", "HF_HUB_OFFLINE"
"""huggingface_hub's variables, which it reads when it is imported."""

ANSWER_SECONDS = 5.0
"""Longest wait for the hub's answer. Its library waits 10 s, and tries each file six times over 23 s."""


def settle_hub(recipe: Recipe) -> None:
    """Prints what is asked of the hub. If it cannot be reached, everything comes from the cache.

    Raises:
        BadInputError: if it cannot be reached, and a model or a tokenizer is not in the cache.
    """
    revision = {"model.name_or_path": recipe.model.revision}
    sources = [source.path for source in [*recipe.data.train, *(recipe.data.validation or [])]]
    settle_names(models_of(recipe), sources, revision)


def models_of(recipe: Recipe) -> dict[str, str]:
    """Returns the model, the tokenizer and the teacher that a recipe names, by field."""
    named = {
        "model.name_or_path": recipe.model.name_or_path,
        "model.tokenizer": recipe.model.tokenizer,
        "objective.teacher": recipe.objective.teacher,
    }
    return {field: name for field, name in named.items() if name is not None}


def settle_names(named: Mapping[str, str], sources: Iterable[str], revisions: Mapping[str, str | None]) -> None:
    """Does the same for models and tokenizers, by the field that names them, and for sources of data.

    Raises:
        BadInputError: as `settle_hub`.
    """
    models = {field: name for field, name in named.items() if is_hub_name(name)}
    data = [path for path in sources if not is_file_source(path)]
    if not (models or data):
        return
    console = Terminal(quiet=os.environ.get("RANK", "0") != "0")
    endpoint = os.environ.get(ENDPOINT) or "https://huggingface.co"
    asked = os.environ.get(OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE")
    if asked:
        why = f"{OFFLINE} is set"
    else:
        console.print(f"looking on {endpoint} for {', '.join(dict.fromkeys([*models.values(), *data]))}")
        unreachable = _why_unreachable(endpoint)
        if unreachable is None:
            return
        why = f"{endpoint} cannot be reached ({unreachable})"
        os.environ[OFFLINE] = "1"
    for field, name in models.items():
        if not _is_cached(name, revisions.get(field)):
            mend = f"or unset {OFFLINE}" if asked else f"behind a proxy set HTTPS_PROXY, with a mirror {ENDPOINT}"
            raise BadInputError(
                f"{field}: {name!r} is neither a folder here nor in the hub's cache, and {why}. To work offline, run "
                f"`{download_command(name, revisions.get(field))}` on a machine with network access, copy the folder "
                f"that it prints, and name that; {mend}"
            )
    if not asked:
        console.warn(f"{why}; the cache is used instead, as with {OFFLINE}=1")


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


def _is_cached(name: str, revision: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    files = ("config.json", "tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    return any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in files)
