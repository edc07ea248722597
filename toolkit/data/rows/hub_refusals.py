"""Says why the hub gave no model, tokenizer or data set, and what to do about it.

The cause is found by the types of huggingface_hub's errors. transformers and datasets wrap them in errors of their own.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import BadInputError, DataError, HubError, ToolkitError, first_line
from toolkit.paths import download_command, is_file_source, is_hub_name, is_repository
from toolkit.published import without_secrets

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)

UNREACHABLE = {"TransportError", "ConnectionError", "TimeoutError", "XetDownloadError"}
"""Names of errors of the HTTP clients, of Python and of the downloader, which have no base in common."""

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
    found = list(_causes(error))
    if kind == DATA_SET and any(type(cause).__name__ == "DatasetNotFoundError" for cause in found):
        found += _causes(_asked_again(name))
    refusal = _Refusal(field, name, kind, revision)
    text = refusal.by_answer(found) or refusal.by_disk(found) or refusal.by_network(found)
    made = HubError if refusal.hub_fails else DataError if kind == DATA_SET else BadInputError
    return None if text is None else made(without_secrets(text))


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


@dataclass
class _Refusal:
    """The sentences about one name that was looked for on the hub. Each method returns None for another cause."""

    field: str
    name: str
    kind: str
    revision: str | None
    hub_fails: bool = False

    @property
    def page(self) -> str:
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{'datasets/' if self.kind == DATA_SET else ''}{self.name}"

    def by_answer(self, found: Sequence[BaseException]) -> str | None:
        """Explains a refusal by the hub."""
        from huggingface_hub import constants, errors, get_token

        refusals = (cause for cause in found if isinstance(cause, errors.HfHubHTTPError))
        answer = next((each for each in refusals if not isinstance(each, errors.EntryNotFoundError)), None)
        if answer is None:
            return None
        status, login = answer.response.status_code, "run `hf auth login`, or set HF_TOKEN"
        said = (answer.server_message or first_line(answer)).splitlines()[0].rstrip(".")
        if isinstance(answer, errors.GatedRepoError):
            return (
                f"{self.field}: {self.name!r} is gated on the hub. Ask for access at {self.page}, and wait until it is "
                f"granted; for the token of that account {login}"
            )
        if isinstance(answer, errors.RevisionNotFoundError):
            return (
                f"{self.field.replace('name_or_path', 'revision')}: {self.name!r} has no revision "
                f"{self.revision or 'main'!r} on the hub; name a branch, a tag or a commit of {self.page}/commits/main"
            )
        if status == 401 and get_token() is not None:
            return (
                f"{self.field}: the hub refuses this machine's token ({said}), and gives no {self.name!r}; for another "
                f"{login}"
            )
        if isinstance(answer, errors.RepositoryNotFoundError) or status in (401, 404):
            return (
                f"{self.field}: {constants.ENDPOINT} has no {self.kind} {self.name!r}, or it is private. Correct the "
                f"name; for a token that may read it {login}"
            )
        self.hub_fails = status >= 500
        mend = "try again in some minutes"
        if self.hub_fails:
            mend += ", or set HF_HUB_OFFLINE=1 if it was downloaded before"
        elif status != 429:
            mend = f"see {self.page}; for a token that may read it {login}"
        return f"{self.field}: the hub answers HTTP {status} for {self.name!r} ({said}); {mend}"

    def by_disk(self, found: Sequence[BaseException]) -> str | None:
        """Explains that what the hub gives cannot be stored."""
        from huggingface_hub import constants

        why = next(
            (cause.strerror for cause in found if isinstance(cause, OSError) and cause.errno in UNWRITABLE), None
        )
        if why is None:
            return None
        return (
            f"{self.field}: {self.name!r} cannot be downloaded to {constants.HF_HUB_CACHE}: {why}. Free some space "
            "(`hf cache rm`), or set HF_HOME to another folder"
        )

    def by_network(self, found: Sequence[BaseException]) -> str | None:
        """Explains that the hub was not or could not be asked."""
        from huggingface_hub import constants, errors, is_offline_mode

        names = {kind.__name__ for cause in found for kind in type(cause).__mro__}
        if not names & UNREACHABLE and not any(isinstance(cause, errors.LocalEntryNotFoundError) for cause in found):
            return None
        if is_offline_mode():
            return (
                f"{self.field}: {self.name!r} is not in the hub's cache, and the hub is not asked (HF_HUB_OFFLINE). "
                f"Unset that, or {self._elsewhere()}"
            )
        return (
            f"{self.field}: {constants.ENDPOINT} cannot be reached for {self.name!r} ({first_line(found[-1])}); try "
            "again; behind a proxy correct HTTPS_PROXY, with a mirror HF_ENDPOINT. To work offline, "
            f"{self._elsewhere()}"
        )

    def _elsewhere(self) -> str:
        """Returns what to do on a machine without a network."""
        if self.kind == DATA_SET:
            return f"run `hf download {self.name} --repo-type dataset` where there is a network, and name its files"
        command = download_command(self.name, self.revision)
        return f"run `{command}` where there is a network, and name the folder that it prints"
