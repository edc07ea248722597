"""A run goes on with the images, models and questions that it began with, whatever is in the cache."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.sights import drawn_image, save_rows, save_seeing
from support.texts import make_texts, write_rows
from support.tiny import objective_of, recipe_values, save_llama, unfinish
from transformers import AutoTokenizer

from toolkit import Recipe, finetune
from toolkit.errors import ToolkitError
from toolkit.paths import fingerprint_of
from toolkit.run.parts.inputs import has_other_template

TEXTS = [" ".join(text.split()[:6]) for text in make_texts(8, seed=4)]
UNKNOWN = "whether they are the same is not known"


def outcome(values: dict[str, Any]) -> str:
    """The sentence of a run that is refused, or how many steps it took."""
    try:
        done = finetune(Recipe.from_mapping(values))
    except ToolkitError as error:
        return str(error) if error.exit_code == 2 else f"exit code {error.exit_code}: {error}"
    return f"{done.metrics[-1]['step']} steps"


class Begun:
    """A folder with a run that was cut off behind step 1, whose files every case finds as they were."""

    def __init__(self, folder: Path, values: dict[str, Any]) -> None:
        values["training"] |= {"max_steps": 1, "micro_batch_size": 2}
        values["checkpoint"] = {"every_steps": 1, "asynchronous": False}
        assert outcome(values) == "1 steps"
        unfinish(folder / "run")
        values["training"]["max_steps"] = 2
        self.folder, self.values, self.kept = folder, values, shutil.copytree(folder, f"{folder}-kept")

    def again(self, *changes: Callable[[Path], Any]) -> str:
        shutil.rmtree(self.folder)
        shutil.copytree(self.kept, self.folder)
        for change in changes:
            change(self.folder)
        return outcome(self.values)


def forget(*names: str) -> Callable[[Path], None]:
    """Makes the checkpoint one of a version that did not record these."""

    def forge(folder: Path) -> None:
        place = folder / "run/checkpoints/step_00000001"
        manifest = json.loads((place / "manifest.json").read_text())
        text = json.dumps({name: value for name, value in manifest.items() if name not in names})
        (place / "manifest.json").write_text(text)
        (place / "COMPLETE").write_text(hashlib.sha256(text.encode()).hexdigest())

    return forge


def without_cache(folder: Path) -> None:
    shutil.rmtree(folder / "cache")


def exchange(folder: Path) -> None:
    """Another image of the same size in pixels under the name of the first."""
    drawn_image(3).save(folder / "shown" / "0.png")


def set_field(model: str, **fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


@pytest.mark.slow
def test_a_run_goes_on_over_its_own_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "of"
    save_seeing("llava", folder / "model", TEXTS)
    rows = save_rows(folder, TEXTS, [1, 0, 2, 0, 1, 0, 1, 2])
    values = recipe_values(folder / "model", rows, folder / "run", folder / "cache")
    values["data"] |= {"max_length": 64}
    begun = Begun(folder, values)

    assert begun.again() == begun.again(without_cache) == "2 steps"
    capsys.readouterr()
    other = "the content of data.train has changed since: images, or files of a stream, under the same names"
    assert other in begun.again(exchange, without_cache)
    assert UNKNOWN not in capsys.readouterr().err
    assert begun.again(forget("content", "named"), exchange, without_cache) == "2 steps"
    assert UNKNOWN in capsys.readouterr().err

    # With the cache it is known before the first step which image it is, and each way out is one.
    told = begun.again(exchange)
    assert re.search(r"rows\.jsonl:1: '.*0\.png' is another image than when the rows were read", told)
    (cached,) = re.findall(r"or delete '([^']*)' and start again", told)
    shutil.rmtree(cached)
    assert other in outcome(values)
    values["training"]["output_dir"] = str(tmp_path / "anew")
    assert outcome(values) == "2 steps"
    values["training"]["output_dir"] = str(folder / "run")
    drawn_image(0).save(folder / "shown" / "0.png")
    shutil.rmtree(cached)
    assert outcome(values) == "2 steps"
    gone = begun.again(lambda folder: (folder / "shown/1.png").unlink())
    assert "rows.jsonl:3: " in gone
    assert "an image that cannot be read: No such file or directory; bring the old one back, or delete" in gone


@pytest.mark.slow
def test_a_run_goes_on_with_models_of_the_same_configuration(tmp_path: Path) -> None:
    """Of which the weights alone do not tell: the frequencies of positions, for one."""
    folder = tmp_path / "of"
    for name, seed in (("base", 0), ("teacher", 1)):
        save_llama(folder / name, TEXTS, tied=False, seed=seed)
    rows = write_rows(folder / "rows.jsonl", ({"text": text} for text in TEXTS))
    values = recipe_values(folder / "base", rows, folder / "run", folder / "cache")
    values["objective"] = {"kind": "distillation", "teacher": str(folder / "teacher")}
    begun = Begun(folder, values)
    assert begun.again() == "2 steps"
    for model, field in (("base", "model.name_or_path"), ("teacher", "objective.teacher")):
        changed = set_field(model, rope_parameters={"rope_theta": 77.0, "rope_type": "default"})
        assert f"config.json of {field} has changed since" in begun.again(changed)
        assert begun.again(changed, forget("named")) == "2 steps"
        assert begun.again(set_field(model, transformers_version="5.99")) == "2 steps"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["causal_lm", "grpo"])
def test_what_lies_beside_weights_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    folder = tmp_path / "of"
    save_llama(folder / "base", TEXTS, tied=False)
    (folder / "base/modeling_own.py").write_text("")
    rows = write_rows(folder / "rows.jsonl", ({"prompt": text, "completion": " a"} for text in TEXTS))
    values = recipe_values(folder / "base", rows, folder / "run", folder / "cache")
    values["model"]["trust_remote_code"] = True
    values["objective"] = objective_of(kind).model_dump(exclude_none=True)
    begun = Begun(folder, values)

    def set_ends(folder: Path) -> None:
        (folder / "base/generation_config.json").write_text('{"eos_token_id": [65, 66, 67]}')

    first = fingerprint_of(folder / "base")
    refused = begun.again(lambda folder: (folder / "base/modeling_own.py").write_text("1"))
    assert "*.py of model.name_or_path has changed since" in refused
    changed = "generation_config.json of model.name_or_path has changed since"
    if kind == "grpo":  # where a sample ends
        assert changed in begun.again(set_ends)
        return
    capsys.readouterr()
    assert begun.again(lambda folder: save_llama(folder / "base", TEXTS, tied=False, seed=2), set_ends) == "2 steps"
    said = " ".join(capsys.readouterr().err.split())
    assert changed in said
    assert "its weights have changed since the run began" in said
    assert json.loads((folder / "run/export/training.json").read_text())["base"] == first


def test_an_adapter_of_another_chat_template_is_told(tmp_path: Path) -> None:
    """Its prompts looked otherwise, and a run that goes on from it takes the template of the recipe and its base."""
    base = save_llama(tmp_path / "base", make_texts(5), tied=False)
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert not has_other_template(base, tokenizer), "neither has one"
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path / "adapter")
    assert not has_other_template(tmp_path / "adapter", tokenizer)
    tokenizer.chat_template = "{{ messages }}{{ eos_token }}"
    assert has_other_template(tmp_path / "adapter", tokenizer)
