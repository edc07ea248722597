"""Says why the hub gave no model, tokenizer or data set, and what to do about it.

The cause is found by the types of huggingface_hub's errors. transformers and datasets wrap them in errors of their own.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

from toolkit.errors import BadInputError, DataError, HubError, ToolkitError, first_line
from toolkit.paths import download_command, is_file_source, is_hub_name, is_repository
from toolkit.published import without_secrets

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)

UNREACHABLE = {"TransportError", "ConnectionError", "TimeoutError", "XetDownloadError", "LocalEntryNotFoundError"}
"""Names of errors of the HTTP clients, of Python and of the hub's library, which have no base in common."""

DATA_SET = "data set"


def download(name: str, field: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Returns the folder of a repository's files of these patterns. Files that are not in the cache are downloaded.

    Args:
        field: the recipe's field that names the repository.

    Raises:
        BadInputError: if the hub refuses them or cannot be reached.
        HubError: if the hub itself fails.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # the hub's library, its HTTP client and its downloader have no base in common
        raise hub_error(error, field, name, revision=revision) or error from error


def hub_error(
    error: BaseException, field: str, name: str, kind: str = "model", revision: str | None = None
) -> ToolkitError | None:
    """Returns the error to raise if `error` comes from the hub or from the way to it; None for another cause.

    Args:
        error: what a library raised while it loaded `name`.
        field: the recipe's field, or the option, that names it.
        name: a hub name. A folder or file has no such cause.
        kind: `model`, `tokenizer` or `data set`.
        revision: the revision that was asked for.

    Returns:
        BadInputError for what the user can fix, HubError if the hub itself fails.
    """
    if not (is_hub_name(name) if kind != DATA_SET else not is_file_source(name)):
        return None
    if kind == DATA_SET and not is_repository(name):
        return DataError(f"{field}: there is no file {name!r}, and the hub allows no such name; correct it")
    causes = list(_causes(error))
    if kind == DATA_SET and any(type(cause).__name__ == "DatasetNotFoundError" for cause in causes):
        causes += _causes(_asked_again(name))
    text = _sentence(causes, field, name, kind, revision)
    hub_fails = any(getattr(getattr(cause, "response", None), "status_code", 0) >= 500 for cause in causes)
    made = HubError if hub_fails else DataError if kind == DATA_SET else BadInputError
    return None if text is None else made(without_secrets(text))


def _sentence(causes: Sequence[BaseException], field: str, name: str, kind: str, revision: str | None) -> str | None:
    """Returns what to say, or None for another cause."""
    from huggingface_hub import constants, errors, get_token, is_offline_mode

    page = f"{constants.ENDPOINT}/{'datasets/' if kind == DATA_SET else ''}{name}"
    login = "for a token that may read it run `hf auth login`, or set HF_TOKEN"
    refusals = (cause for cause in causes if isinstance(cause, errors.HfHubHTTPError))
    answer = next((each for each in refusals if not isinstance(each, errors.EntryNotFoundError)), None)
    if isinstance(answer, errors.GatedRepoError):
        return f"{field}: {name!r} is gated on the hub. Ask for access at {page}, and wait until it is granted; {login}"
    if isinstance(answer, errors.RevisionNotFoundError):
        field = field.replace("name_or_path", "revision")
        return f"{field}: {name!r} has no revision {revision or 'main'!r} on the hub; see {page}/commits/main"
    status = None if answer is None else answer.response.status_code
    if status == 404 or (status == 401 and (get_token() is None or isinstance(answer, errors.RepositoryNotFoundError))):
        return f"{field}: {constants.ENDPOINT} has no {kind} {name!r}, or it is private. Correct the name; {login}"
    if answer is not None:
        said = answer.server_message or first_line(answer)
        return (
            f"{field}: the hub answers HTTP {status} for {name!r} ({said.splitlines()[0].rstrip('.')}); try again in "
            f"some minutes, or see {page}; {login}"
        )
    for cause in causes:
        if isinstance(cause, OSError) and cause.errno in UNWRITABLE:
            return f"{field}: {name!r} cannot be downloaded to {constants.HF_HUB_CACHE}: {cause.strerror}"
    if not {kind.__name__ for cause in causes for kind in type(cause).__mro__} & UNREACHABLE:
        return None
    why = "HF_HUB_OFFLINE is set" if is_offline_mode() else first_line(causes[-1])
    command = download_command(name, revision) if kind != DATA_SET else f"hf download {name} --repo-type dataset"
    return (
        f"{field}: {name!r} is not in the hub's cache, and {constants.ENDPOINT} cannot be reached ({why}). To work "
        f"offline, run `{command}` where there is a network, and name the folder that it prints; behind a proxy set "
        "HTTPS_PROXY, with a mirror HF_ENDPOINT"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, what it was raised from or while handling, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _asked_again(name: str) -> Exception | None:
    """Returns what the hub says about a data set: `datasets` drops the cause if it does not find one."""
    from huggingface_hub import HfApi

    try:
        HfApi().auth_check(name, repo_type="dataset")
    except Exception as error:  # the hub's library and its HTTP client have no base in common
        return error
    return None
