"""What a run depends on is known by its content: a resumed run refuses another reference; "done" is a statement."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_on_ranks
from support.runs import finetuned
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama, unfinish

TEXTS = [" ".join(text.split()[:6]) for text in make_texts(24, seed=3)]
PAIRS = [{"prompt": a, "chosen": " " + b, "rejected": " a"} for a, b in zip(TEXTS, reversed(TEXTS), strict=True)]
JUDGED = [{"prompt": p["prompt"], "completion": p["chosen"], "label": i % 2 == 0} for i, p in enumerate(PAIRS)]
ROWS = {"preference": PAIRS, "kto": JUDGED}
STREAMED = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)

KEPT = {
    STREAMED: "3 records",
    STREAMED.upper().replace('"TEXT"', '"text"'): "the rows of kept.file",
    "": "kept.file: ",
    '{"chosen": "a", "rejected": "b"}\n': "matches no known column layout",
    '{"messages": [{"role": "user", "content": "a"}]}\n': "the tokenizer has no chat template",
    '{"text": 3}\n': "none of its rows (1) can be trained on",
}
"""The content of a file of kept rows -> what comes of a run that its limit ends, and of going on with others."""


def values_of(folder: Path, kind: str, steps: int) -> dict[str, Any]:
    values = recipe_values(folder / f"base-{kind}", folder / f"{kind}.jsonl", folder / kind, folder / "cache")
    values["data"] |= {"max_length": 64}
    values["objective"] = {"kind": kind}
    values["training"] |= {"max_steps": steps, "micro_batch_size": 2}
    values["checkpoint"] = {"every_steps": 2, "asynchronous": False}
    return values


def outcome(values: dict[str, Any]) -> tuple[str, int]:
    """What was told, and the exit code; or the number of records and 0."""
    from toolkit.errors import ToolkitError

    try:
        return f"{len(finetuned(values).metrics)} records", 0
    except ToolkitError as error:
        return str(error), error.exit_code


def runs(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ROWS:
        found[f"{kind} begun"] = outcome(values_of(folder, kind, 2))
        unfinish(folder / kind)
        shutil.copytree(folder / kind, folder / f"{kind}-kept")
        save_llama(folder / f"base-{kind}", TEXTS, tied=False, seed=1)
        found[f"{kind} other"] = outcome(values_of(folder, kind, 4))
        save_llama(folder / f"base-{kind}", TEXTS, tied=False)
        found[f"{kind} same"] = outcome(values_of(folder, kind, 4))
    streams = values_of(folder, "causal_lm", 2)
    streams["data"] |= {"streaming": True, "long_rows": "split"}
    rows = folder / "causal_lm.jsonl"
    rows.write_text(STREAMED)
    found |= outcomes_with_kept_rows(folder, rows)
    found["stream begun"] = outcome(streams)
    streams["training"]["max_steps"] = 4
    unfinish(folder / "causal_lm")
    rows.write_text(STREAMED.swapcase().replace('"TEXT"', '"text"'))
    found["stream other"] = outcome(streams)
    rows.write_text(STREAMED)
    found["stream same"] = outcome(streams)
    for name in ("metrics.jsonl", "export"):
        (folder / f"link-{name}").mkdir()
        (folder / f"link-{name}" / name).symlink_to(folder / "elsewhere")
        values = values_of(folder, "kto", 2)
        values["training"]["output_dir"] = str(folder / f"link-{name}")
        found[f"link {name}"] = outcome(values)
    found["gone"] = outcome_of_a_run_whose_folder_goes(values_of(folder, "preference", 6), folder)
    for name, spoil in SPOILED.items():
        shutil.rmtree(folder / "kto")
        shutil.copytree(folder / "kto-kept", folder / "kto")
        outcome(values_of(folder, "kto", 4))
        spoil(folder / "kto")
        weights = next((folder / "kto/export").glob("*.safetensors"), None)
        written = None if weights is None else weights.stat().st_mtime_ns
        found[name] = outcome(values_of(folder, "kto", 4))
        weights = next((folder / "kto/export").glob("*.safetensors"))
        found[f"{name} trained"] = weights.stat().st_mtime_ns != written
    return found


def outcomes_with_kept_rows(folder: Path, rows: Path) -> dict[str, Any]:
    """By the content of the file; last, with the first one and other weights."""
    values, found = values_of(folder, "causal_lm", 4), dict[str, Any]()
    values["data"] |= {"validation": str(rows), "long_rows": "split"}
    values["training"] |= {"output_dir": str(folder / "kept"), "eval_every_steps": 1}
    values["kept"] = {"file": str(file := folder / "kept.jsonl"), "max_kl": 1e-7}
    for content in (*KEPT, STREAMED):
        file.write_text(content)
        save_llama(folder / "base-causal_lm", TEXTS, tied=False, seed=int(content in found))
        found["other base" if content in found else content] = outcome(values)
        (folder / "kept/finished.json").unlink(missing_ok=True)
    return {**found, "kept report": (folder / "kept/report.html").read_text()}


def outcome_of_a_run_whose_folder_goes(values: dict[str, Any], folder: Path) -> tuple[str, int]:
    """Of a run whose output folder is renamed after its third step."""
    from toolkit.training.metrics import Metrics

    values["training"]["output_dir"] = str(folder / "going")
    train = Metrics.train

    def leave(metrics: Metrics, record: dict[str, Any]) -> None:
        train(metrics, record)
        if record["step"] == 3:
            (folder / "going").rename(folder / "gone")

    Metrics.train = leave  # type: ignore[method-assign]
    try:
        return outcome(values)
    finally:
        Metrics.train = train  # type: ignore[method-assign]


def killed_while_it_ran(run: Path, report: str) -> None:
    """As a run is left that was killed in its last step, by what its report holds."""
    unfinish(run)
    shutil.rmtree(run / "export")
    (run / "report.html").write_text(report)


SPOILED: dict[str, Callable[[Path], Any]] = {
    "empty report": lambda run: killed_while_it_ran(run, ""),
    "cut report": lambda run: killed_while_it_ran(run, "<!doctype html><html><head>"),
    "statement without a report": lambda run: (run / "report.html").unlink(),
    "no statement": lambda run: (run / "finished.json").unlink(),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("other")
    save_llama(folder / "base-causal_lm", TEXTS, tied=False)
    for kind, rows in ROWS.items():
        save_llama(folder / f"base-{kind}", TEXTS, tied=False)
        write_rows(folder / f"{kind}.jsonl", rows)
    return run_on_ranks(runs, 1, folder)[0]  # type: ignore[no-any-return]


def test_a_run_does_not_go_on_against_another_reference(found: dict[str, Any]) -> None:
    for kind in ROWS:
        assert found[f"{kind} begun"] == ("2 records", 0)
        told, code = found[f"{kind} other"]
        assert (code, "the reference of the run up to step 2 had other weights" in told) == (2, True), (kind, told)
        assert found[f"{kind} same"] == ("4 records", 0)


def test_a_stream_does_not_go_on_in_files_of_other_content(found: dict[str, Any]) -> None:
    """Of the same names and sizes."""
    assert found["stream begun"] == ("2 records", 0)
    told, code = found["stream other"]
    assert code == 2
    assert "the content of data.train" in told
    assert found["stream same"] == ("4 records", 0)


def test_a_limit_ends_a_run_which_goes_on_with_the_same_kept_rows_alone(found: dict[str, Any]) -> None:
    """Their figures: test_ema.py."""
    for case, said in (KEPT | {"other base": "began with other weights"}).items():
        told, code = found[case]
        assert (said in told, code) == (True, 2 * (case != STREAMED)), told
    assert "above 1e-07 nats a token (kept.max_kl)" in found["kept report"]


def test_a_run_is_done_if_it_says_so(found: dict[str, Any]) -> None:
    for name in SPOILED:
        assert found[name] == ("4 records", 0), name
        assert found[f"{name} trained"] == (name != "statement without a report"), name


def test_no_run_writes_through_links(found: dict[str, Any]) -> None:
    for name in ("metrics.jsonl", "export"):
        told, code = found[f"link {name}"]
        assert (code, f"{name}' is a link" in told) == (2, True), (name, told)


def test_a_run_whose_folder_is_gone_ends_at_its_next_save(found: dict[str, Any]) -> None:
    told, code = found["gone"]
    assert code == 1
    assert "was deleted or renamed while the run went on" in told
