"""Says why the hub gave no model, tokenizer or data set, and what to do about it.

The cause is found by the types of huggingface_hub's errors. transformers and datasets wrap them in errors of their own.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import BadInputError, DataError, HubError, ToolkitError, first_line, without_secrets
from toolkit.paths import download_command, is_file_source, is_hub_name

FULL, READ_ONLY = (errno.ENOSPC, errno.EDQUOT), (errno.EACCES, errno.EPERM, errno.EROFS)

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
    found = list(_causes(error))
    if kind == DATA_SET and any(type(cause).__name__ == "DatasetNotFoundError" for cause in found):
        found += _causes(_asked_again(name))
    refusal = _Refusal(field, name, kind, revision)
    text = refusal.by_answer(found) or refusal.by_disk(found) or refusal.by_network(found)
    if text is None:
        return None
    if refusal.hub_fails:
        return HubError(without_secrets(text))
    return (DataError if kind == DATA_SET else BadInputError)(without_secrets(text))


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
        from huggingface_hub import errors, get_token

        answer = next(
            (
                cause
                for cause in found
                if isinstance(cause, errors.HfHubHTTPError) and not isinstance(cause, errors.EntryNotFoundError)
            ),
            None,
        )
        if answer is None:
            return None
        status, has_token = answer.response.status_code, get_token() is not None
        said = (answer.server_message or first_line(answer)).splitlines()[0].rstrip(".")
        if isinstance(answer, errors.GatedRepoError):
            return self._gated(has_token)
        if isinstance(answer, errors.DisabledRepoError):
            return f"{self.field}: {self.name!r} is disabled on the hub; name another {self.kind}"
        if isinstance(answer, errors.RevisionNotFoundError):
            return self._no_revision()
        if status == 401 and has_token:
            return self._bad_token(said)
        if isinstance(answer, errors.RepositoryNotFoundError) or status in (401, 404):
            return self._missing(has_token)
        self.hub_fails = status >= 500
        if status == 403:
            mend = f"give its token the right to read it at {_tokens()}" if has_token else "run `hf auth login`"
        elif status == 429:
            mend = "try again in some minutes" + ("" if has_token else ", or run `hf auth login` for a higher limit")
        elif self.hub_fails:
            mend = (
                "try again later, or set HF_HUB_OFFLINE=1 if it was downloaded before (https://status.huggingface.co)"
            )
        else:
            mend = f"see {self.page}"
        return f"{self.field}: the hub answers HTTP {status} for {self.name!r} ({said}); {mend}"

    def _gated(self, has_token: bool) -> str:
        problem = f"{self.field}: {self.name!r} is gated on the hub, and"
        if not has_token:
            return (
                f"{problem} this machine has no token. Ask for access at {self.page}, then run `hf auth login`, or set "
                "HF_TOKEN"
            )
        return (
            f"{problem} the account of this machine's token (`hf auth whoami`) has no access. Ask for access at "
            f"{self.page}, and wait until it is granted; a fine-grained token also needs the right to read gated ones"
        )

    def _missing(self, has_token: bool) -> str:
        from huggingface_hub import constants

        mend = (
            "or this machine's token may not read it. Correct the name, or run `hf auth login` with an account that may"
            if has_token
            else "or it is private, and this machine has no token. Correct the name; for a private one run `hf auth "
            "login`, or set HF_TOKEN"
        )
        return f"{self.field}: {constants.ENDPOINT} has no {self.kind} {self.name!r}, {mend}"

    def _bad_token(self, said: str) -> str:
        mend = (
            "set HF_TOKEN to another, or unset it" if os.environ.get("HF_TOKEN") else "run `hf auth login` for another"
        )
        return (
            f"{self.field}: the hub refuses this machine's token, which is wrong or expired ({said}), and gives no "
            f"{self.name!r}; {mend}. Tokens are made at {_tokens()}"
        )

    def _no_revision(self) -> str:
        field = self.field.replace("name_or_path", "revision")
        return (
            f"{field}: {self.name!r} has no revision {self.revision or 'main'!r} on the hub; name a branch, a tag or a "
            f"commit of {self.page}/commits/main"
        )

    def by_disk(self, found: Sequence[BaseException]) -> str | None:
        """Explains that what the hub gives cannot be stored."""
        from huggingface_hub import constants

        codes = [cause.errno for cause in found if isinstance(cause, OSError)]
        if any(code in FULL for code in codes):
            problem = "has no space left. Free some, for example with `hf cache rm`, or set HF_HOME to a folder on"
            return f"{self.field}: {self.name!r} cannot be downloaded: {constants.HF_HUB_CACHE} {problem} another disk"
        if any(code in READ_ONLY for code in codes):
            problem = "cannot be written. Set HF_HOME to a folder that can"
            return f"{self.field}: {self.name!r} cannot be downloaded: {constants.HF_HUB_CACHE} {problem}"
        return None

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
        if "ProxyError" in names:
            reason, mend = "the proxy fails", "correct HTTPS_PROXY, or unset it"
        else:
            reason = first_line(found[-1])
            mend = "try again; behind a proxy set HTTPS_PROXY, with a mirror HF_ENDPOINT"
        return (
            f"{self.field}: {constants.ENDPOINT} cannot be reached for {self.name!r} ({reason}); {mend}. To work "
            f"offline, {self._elsewhere()}"
        )

    def _elsewhere(self) -> str:
        """Returns what to do on a machine without a network."""
        if self.kind == DATA_SET:
            return f"run `hf download {self.name} --repo-type dataset` where there is a network, and name its files"
        command = download_command(self.name, self.revision)
        return f"run `{command}` where there is a network, and name the folder that it prints"


def _tokens() -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/settings/tokens"
