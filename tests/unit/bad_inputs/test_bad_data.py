"""Data files, paths and addresses as `toolkit data` sees them: one clear error, or rows all the same.

tests/unit/data/test_bad_rows.py says what becomes of single rows and files.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from s3fs import S3FileSystem
from support.cases import cases
from support.refusals import Outcome, finetune, toolkit, unclear

CLASSIFY = "objective.kind=sequence_classification"
GOOD = '{"text": "a king and a queen"}\n'
TABLES = cases(__file__)
REFUSED: dict[str, tuple[str, tuple[str, ...], str]] = TABLES["REFUSED"]
"""Name -> what a.jsonl holds, overrides, and what the error names."""

SEPARATED = {";": "';'", "\t": "'\\t'", "|": "'|'"}
"""What a CSV file has between its columns, and how the error shows it."""

PATHS: dict[str, str] = cases(__file__)["PATHS"]
"""`data.train`, and what the error names."""

TAKEN: dict[str, tuple[str, tuple[str, ...]]] = {
    "one bad row in a hundred is dropped, counted and named": (GOOD * 99 + '{"text": ""}\n', ()),
    "control characters have tokens, and are shown escaped": ('{"text": "a\\u0000b\\u001b[31m"}\n', ()),
    "classes are often numbered": ('{"text": "a", "label": 0}\n{"text": "b", "label": 1}\n', (CLASSIFY,)),
}
"""Why rows are trained on, and the same."""


def test_refused_rows(place: Path) -> None:
    def outcome(content: str, overrides: tuple[str, ...], name: str = "a.jsonl") -> Outcome:
        (place / name).write_text(content)
        return toolkit("data", str(place / "recipe.yaml"), f"data.train={place / name}", *overrides)

    given = REFUSED.items()
    assert unclear((name, outcome(content, more), named) for name, (content, more, named) in given) == []
    for sign, shown in SEPARATED.items():
        told = outcome(f"prompt{sign}completion\na{sign}b\n", (), "a.csv")
        assert told.problems(f"separated by {shown}: save the file with") == [], told
    for why, (content, more) in TAKEN.items():
        assert outcome(content, more).code == 0, why


def test_refused_paths(place: Path) -> None:
    def outcome(path: str) -> Outcome:
        value = json.dumps(path.format(place=place)).replace("\\u0000", "\\0")
        return toolkit("data", str(place / "recipe.yaml"), f"data.train={value}")

    assert unclear((path, outcome(path), named) for path, named in PATHS.items()) == []


@pytest.mark.parametrize(
    ("override", "named"),
    [
        (
            "checkpoint.to=s3://bucket/run",
            "checkpoint.to: s3://bucket/run/checkpoints: its driver finds no credentials (NoCredentialsError: Unable "
            "to locate credentials); set them, for example AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ),
        (
            "data.train=s3://bucket/rows.jsonl",
            "data.train: 's3://bucket/rows.jsonl' cannot be read: NoCredentialsError: Unable to locate credentials; "
            "set the driver's credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ),
    ],
)
def test_a_store_without_credentials(override: str, named: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(variable)
    for variable in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(variable, "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # a machine that has a role would ask for it
    S3FileSystem.clear_instance_cache()
    outcome = finetune(str(place / "recipe.yaml"), override, "--dry-run")
    assert outcome.problems(named) == [], outcome.told
