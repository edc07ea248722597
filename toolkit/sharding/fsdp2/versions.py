"""Lists the tested versions of the libraries below, and the private names that the toolkit depends on.

An untested newer version gives a warning, not an error. All private names are checked first, so that a release that
moved one stops the run at once and by name, not in the middle of a step.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import warnings
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path

import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from toolkit.errors import BadInputError
from toolkit.ranks import rank

SUPPORTED_VERSIONS = {
    "torch": ">=2.13,<2.16",
    "accelerate": ">=1.13,<1.16",
    "transformers": ">=5.24,<5.25",
    "datasets": ">=4.7,<5.3",
    "peft": ">=0.21.2,<0.22",
}
"""The versions that this package is tested with, as in pyproject.toml; of peft, that has no upper limit."""


@dataclass(frozen=True)
class PrivateName:
    """A private name of a library, and the source text that the toolkit relies on.

    Attributes:
        place: "module:qualified.name".
        holds: texts that its source must contain in this order. A tuple lists alternatives for different versions.
    """

    place: str
    holds: tuple[str | tuple[str, ...], ...] = ()

    def problem(self) -> str | None:
        """Returns what is missing, or None if everything is in place."""
        try:
            text = _source(self.place)
        except (ImportError, AttributeError) as error:
            return f"{self.place}: {error}"
        start = 0
        for wanted in self.holds:
            spellings = (wanted,) if isinstance(wanted, str) else wanted
            places = [place for spelling in spellings if (place := text.find(spelling, start)) >= 0]
            if not places:
                return f"{self.place} holds no {' or '.join(map(repr, spellings))} where it is expected"
            start = min(places)
        return None


@functools.cache
def _source(place: str) -> str:
    """Returns the source text of a place. Raises ImportError or AttributeError if it is not there."""
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    return inspect.getsource(operator.attrgetter(name)(found) if name else found)


PRIVATE_NAMES = tuple(
    PrivateName(place, tuple(text if isinstance(text, str) else tuple(text) for text in holds))
    for entry in yaml.safe_load(Path(__file__).with_name("private_names.yaml").read_text(encoding="utf-8"))
    for place, holds in entry.items()
)


def check_versions() -> None:
    """Checks the installed versions of the libraries.

    Warns on rank 0 about a version newer than those tested.

    Raises:
        BadInputError: if a version is too old, or a newer one has moved a private name.
    """
    newer = []
    for package, allowed in SUPPORTED_VERSIONS.items():
        found, (oldest, _) = installed_version(package), allowed.split(",")
        plain = Version(found).base_version
        if not SpecifierSet(oldest).contains(plain):
            raise BadInputError(f"{package} {found} is installed, but the toolkit needs {package}{allowed}")
        if not SpecifierSet(allowed).contains(plain):
            newer.append(f"{package} {found} is newer than the tested {package}{allowed}")
    if newer:
        _check_private_names("; ".join(newer))


def _check_private_names(versions: str) -> None:
    moved = [problem for name in PRIVATE_NAMES if (problem := name.problem()) is not None]
    if moved:
        raise BadInputError(
            f"{versions}, and private names that the toolkit uses have moved: {'; '.join(moved)}; install a "
            "tested version"
        )
    if rank() == 0:
        warnings.warn(f"{versions}; all private names are in place, so it is tried", stacklevel=3)
