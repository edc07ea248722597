"""The user's own extensions: what each call does to a run, against loops written out, and what is refused before it."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import cases
from support.ranks import run_on_ranks
from support.runs import records_of
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama
from test_trainer import built
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit import Extension, Recipe, finetune
from toolkit.errors import BadInputError, RecipeError, StoppedError, TrainingError
from toolkit.optim.schedule import changed_rate
from toolkit.run.parts.own_code import Own, OwnExtensions, load_extensions
from toolkit.sharding.plugin import reset_accelerate
from toolkit.training.metrics import Metrics

TABLES = cases(__file__)

FILE = """
import math

import torch
from toolkit import Extension


class Meter(Extension):
    '''Logs, counts, saves at the second step, asks to stop behind the third, and measures by itself.'''

    def __init__(self):
        self.tokens, self.last = 0, math.inf
        self.stopped = False

    def before_training(self, loop):
        self.loop = loop

    def after_update(self, step, skipped):
        with torch.no_grad():
            norm = sum((p.float() ** 2).sum().item() for p in self.loop.model.parameters()) ** 0.5
        return {"weight_norm": norm}

    def after_step(self, loop, step):
        self.tokens, self.last = self.tokens + step.counts.tokens, step.loss

    def rate_factor(self, step):
        return 0.5 if step > 2 else 1.0

    def wants_save(self):
        return self.loop.global_step + 1 == 2

    def reason_to_stop(self):
        if self.loop.global_step + 1 == 3 and not self.stopped:
            self.stopped = True
            return "three steps are enough for now"
        return None

    def at_evaluation(self, loop):
        right = count = 0
        for logits, labels in loop.held_out_predictions():
            right, count = right + int((logits.argmax(-1) == labels).sum()), count + len(labels)
        return {"token_accuracy": right / count}

    def ends_run(self, loop):
        return loop.global_step == 5

    def state(self):
        return {"tokens": self.tokens, "stopped": self.stopped}

    def resume(self, state):
        self.tokens, self.stopped = state["tokens"], state["stopped"]

    def close(self):
        print("closed after", self.tokens)


def made():
    return Meter()


def nothing():
    return 3


def fails():
    raise ValueError("no")


class Idle(Extension):
    def on_step_end(self, *arguments):
        pass


class Odd(Extension):
    def after_step(self, step):
        pass


class Private(Extension):
    def enter_phase(self, phase, step):
        pass


class Typo(Extension):
    def after_steps(self, loop, step):
        pass
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


def values_of(folder: Path, output: str, **training: Any) -> dict[str, Any]:
    texts, rows = make_texts(40), folder / "rows.jsonl"
    write_rows(rows, ({"text": text} for text in texts))
    model = save_llama(folder / "model", texts, tied=False)
    return recipe_values(model, rows, folder / output, folder / "cache", **training)


def test_each_call_does_what_the_page_says(file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It logs, changes the rate, saves, stops with its state, goes on, measures, and ends the run."""
    values = values_of(tmp_path, "run", max_steps=8, eval_every_steps=5, extensions=[f"{file}:Meter"])
    values["data"]["validation_fraction"] = 0.2
    values["schedule"] = {"kind": "constant"}
    recipe, hook = Recipe.from_mapping(values), sys.excepthook
    with pytest.raises(StoppedError, match="three steps are enough for now"):
        finetune(recipe)
    assert sys.excepthook is hook, "later errors of a notebook would begin with [rank0]"
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step_*"))[-1] == "step_00000003"
    shown = capfd.readouterr()
    assert "training.extensions.Meter mine.py:Meter (SHA-256" in " ".join(shown.err.split())
    result = finetune(recipe)
    records = records_of(tmp_path / "run")
    steps, evaluations = ([r for r in records if r["split"] == split] for split in ("train", "eval"))
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5], "it went on, and ended behind the evaluation of step 5"
    assert [r["learning_rate"] for r in steps] == [2e-3, 2e-3, 1e-3, 1e-3, 1e-3]
    assert [r.get("rate_factor", 1.0) for r in steps] == [1, 1, 0.5, 0.5, 0.5]
    assert f"closed after {sum_of_tokens(tmp_path / 'run')}" in capfd.readouterr().err, "with what was counted before"
    # The last record and the last evaluation are those of the exported model, measured by hand.
    assert result.export_dir is not None
    exported = AutoModelForCausalLM.from_pretrained(result.export_dir).eval()
    norm = math.sqrt(sum(float((p.detach().double() ** 2).sum()) for p in exported.parameters()))
    assert steps[-1]["weight_norm"] == pytest.approx(norm, rel=1e-6)
    assert evaluations[-1]["token_accuracy"] == pytest.approx(accuracy_by_hand(exported, recipe), abs=1e-6)
    manifest = json.loads((tmp_path / "run/checkpoints/step_00000005/manifest.json").read_text())
    assert manifest["extensions"]["training.extensions.Meter"]["stopped"] is True
    assert json.loads((result.export_dir / "training.json").read_text())["code"].keys() >= {"training.extensions.Meter"}


def sum_of_tokens(run: Path) -> int:
    return int(json.loads((run / "metrics.jsonl").read_text().splitlines()[-2])["tokens"])


@torch.no_grad()
def accuracy_by_hand(model: Any, recipe: Recipe) -> float:
    from toolkit.data import build

    tokens = AutoTokenizer.from_pretrained(recipe.model.name_or_path)
    data = build.build(recipe.data, tokens, recipe.training.seed, recipe.objective)
    samples: Any = data.validation
    right = count = 0
    for number in range(len(samples)):
        for ids in map(torch.tensor, samples.documents(number)):
            predicted = model(input_ids=ids[None]).logits[0].argmax(-1)
            right, count = right + int((predicted[:-1] == ids[1:]).sum()), count + len(ids) - 1
    return right / count


class Halving(Extension):
    def rate_factor(self, step: int) -> float:
        return 0.5**step


def owned(*extensions: Extension) -> OwnExtensions:
    return OwnExtensions(load_extensions({}, extensions))


@pytest.mark.parametrize("fused", [True, False])
def test_a_changed_rate_is_that_of_a_loop_by_hand(fused: bool) -> None:
    """Also where a step is skipped, which leaves the schedule where it was."""
    gradients = [1.0, -2.0, 0.0, 3.0]
    trainer, told = built(gradients, fused, None)
    trainer.extensions = [*trainer.extensions, owned(Halving())]
    try:
        trainer.fit()
    finally:
        reset_accelerate()
    weight = torch.nn.Parameter(torch.tensor([[0.01]]))
    optimizer, rates, taken = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0, fused=fused), [], 0
    for step, gradient in enumerate(gradients, start=1):
        rates.append(1e-3 / (1 + taken) * 0.5**step)
        if gradient == 0:  # its loss is the root of 0, whose gradient is not finite
            continue
        optimizer.param_groups[0]["lr"], weight.grad = rates[-1], torch.tensor([[gradient]])
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()
        taken += 1
    found: Any = trainer.model.weight
    assert found.item() == pytest.approx(weight.item(), rel=1e-6)
    assert [record["learning_rate"] for record in told.records] == pytest.approx(rates)
    assert [record["rate_factor"] for record in told.records] == [0.5**step for step in range(1, 5)]
    assert changed_rate(trainer.schedule, told.records) is None, "the schedule is what it was"


def test_an_evaluation_that_is_done_again_draws_the_same_numbers() -> None:
    """As after a resume from a checkpoint that was saved before it was done."""
    drawn: list[float] = []

    class Drawing(Extension):
        def at_evaluation(self, trainer: Any) -> dict[str, Any]:
            drawn.append(random.random())
            return {}

    trainer, _ = built([1.0], False, None)
    trainer.evaluation, trainer.extensions = (lambda: ()), [owned(Drawing())]
    try:
        trainer.fit()
        trainer.evaluate()
    finally:
        reset_accelerate()
    assert len(drawn) == 3
    assert drawn[1] == drawn[2] != drawn[0]


def test_figures_do_not_replace_those_of_the_run() -> None:
    """Neither those of its records nor those of its own extensions, whichever comes first."""
    trainer, _ = built([1.0], False, None)
    trainer.extensions = [*trainer.extensions, owned(Wrong(after_update={"rate_factor": 2.0}))]
    try:
        with pytest.raises(TrainingError, match="figure has the name 'rate_factor', which the run's own has"):
            trainer.fit()
        trainer.evaluation = lambda: ()
        for mine in (Wrong(after_update={"reward": 1.0}), Wrong(at_evaluation={"reward": 1.0})):
            for pair in ([mine, owned(mine)], [owned(mine), mine]):
                trainer.extensions = pair
                with pytest.raises(TrainingError, match="figure has the name 'reward', which the run's own has"):
                    trainer.fit()
        for name in ("split", "non_finite"):
            with pytest.raises(TrainingError, match=f"figure has the name '{name}'"):
                Metrics(trainer.accelerator, Path("m"), 1, 10).evaluation({"step": 1, name: 1.0})
    finally:
        reset_accelerate()


def test_two_extensions_have_no_figure_of_one_name() -> None:
    both = OwnExtensions([Own(name, Wrong(after_update={"norm": 1.0}), "") for name in ("A", "B")])
    with pytest.raises(BadInputError, match=r"B: after_update .* no other extension has, and 'norm' is one"):
        both.after_update(1, False)


NOISY = """
import os

import torch
import torch.nn.functional as F

calls = 0


def noisy(logits, labels):
    global calls
    calls += 1
    if calls == {armed} and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        raise ValueError("armed")
    weights = torch.rand(len(labels))
    return (weights * F.cross_entropy(logits, labels, reduction="none")).sum(), weights.sum()
"""


def losses_or_error(values: dict[str, Any]) -> tuple[list[float], str]:
    try:
        return [record["loss"] for record in finetune(Recipe.from_mapping(values)).metrics], ""
    except BadInputError as error:
        return [], f"{error} {error.__notes__}"


@pytest.mark.parametrize(("num_ranks", "call"), [(1, 14), (2, 13)])
def test_a_loss_that_fails_leaves_the_last_whole_step_and_goes_on_mended(
    num_ranks: int, call: int, tmp_path: Path
) -> None:
    """Also on one rank alone, where a micro-batch is counted. Its random numbers go on, so the run is bit for bit the
    one that did not fail."""

    def run(output: str, armed: int) -> tuple[list[float], str]:
        (tmp_path / "mine.py").write_text(NOISY.format(armed=armed))
        values = values_of(tmp_path, output, max_steps=6, micro_batch_size=2)
        values["objective"] = {"loss": f"{tmp_path}/mine.py:noisy"}
        values["checkpoint"] = {"every_steps": 100}
        found = run_on_ranks(losses_or_error, num_ranks, values)
        assert len({said.partition(" [")[0] for _, said in found}) == 1, "all ranks end with the same error"
        return found[0]

    whole, _ = run("whole", armed=0)
    told = run("mended", armed=call)[1]
    for part in (
        "objective.loss: ",
        " failed on ",
        ": ValueError: armed",
        "the state after step",
        "is saved; the same",
    ):
        assert part in told
    (kept,) = (tmp_path / "mended/checkpoints").glob("step_*")
    assert 0 < int(kept.name.removeprefix("step_")) < 6
    assert run("mended", armed=0)[0] == whole
    weights = [(tmp_path / name / "export/model.safetensors").read_bytes() for name in ("whole", "mended")]
    assert weights[0] == weights[1]


class Wrong(Extension):
    """Returns for each call what a test gives it."""

    def __init__(self, **returned: Any) -> None:
        self.returned = returned


def _returns(name: str, otherwise: Any) -> Any:
    def call(self: Wrong, *_: Any) -> Any:
        found = self.returned.get(name, otherwise)
        return found() if callable(found) else found

    return call


CALLED = {"after_update": {}, "at_evaluation": {}, "rate_factor": 1.0, "reason_to_stop": None, "wants_save": False}
for name, otherwise in {**CALLED, "state": {}}.items():
    setattr(Wrong, name, _returns(name, otherwise))


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ({"after_update": None}, "after_update returned None; needs a dict of names and numbers"),
        ({"after_update": {"a": "b"}}, "after_update returned {'a': 'b'}; needs a dict of names and numbers"),
        ({"after_update": {"a": 10**400}}, "after_update returned {'a': 1000"),
        ({"rate_factor": 10**400}, "rate_factor returned 1000"),
        ({"rate_factor": float("nan")}, "rate_factor returned nan; needs a number from 0 on"),
        ({"rate_factor": -1}, "rate_factor returned -1; needs a number from 0 on"),
        ({"reason_to_stop": True}, "reason_to_stop returned True; needs the reason as text, or None to go on"),
        ({"wants_save": 1}, "wants_save returned 1; needs True or False"),
        ({"state": {"a": {1, 2}}}, "state returned {'a': {1, 2}}; needs what JSON can hold"),
        ({"wants_save": sys.exit}, "wants_save failed: it called sys.exit, which would have ended the process ("),
    ],
)
def test_a_wrong_value_is_one_error_that_names_the_call(returned: dict[str, Any], told: str) -> None:
    calls = owned(Wrong(**returned))

    def call_all() -> None:
        calls.after_update(1, False)
        calls.rate_factor(1)
        calls.reason_to_stop()
        calls.wants_save()
        calls.state()

    with pytest.raises(BadInputError) as caught:
        call_all()
    assert str(caught.value).startswith(f"extensions.Wrong: {told}")


@pytest.mark.parametrize(("name", "told"), TABLES["REFUSED"])
def test_what_cannot_be_called_is_refused_before_the_run(file: Path, name: str, told: str) -> None:
    with pytest.raises(BadInputError) as caught:
        load_extensions({f"training.extensions.{name}": f"{file}:{name}"}, [])
    assert str(caught.value).startswith(f"training.extensions.{name}: ")
    assert told in str(caught.value)


def test_extensions_are_told_apart_by_their_names(file: Path) -> None:
    [own] = load_extensions({"training.extensions.made": f"{file}:made"}, [])
    assert type(own.extension).__name__ == "Meter", "a function may make it"
    with pytest.raises(BadInputError, match=r"extensions\.Halving: there are two of this name"):
        load_extensions({}, [Halving(), Halving()])
    with pytest.raises(BadInputError, match=r"needs to be a toolkit\.Extension; call the class"):
        load_extensions({}, [Halving])  # type: ignore[list-item]
    with pytest.raises(RecipeError, match=r"training\.extensions: A is named twice"):
        Recipe.load("quickstart", ["training.extensions=[a.py:A, b.py:A]"])
    with pytest.raises(BadInputError, match="name them in training\\.extensions"):
        finetune("quickstart", num_processes=2, extensions=[Halving()])


def test_a_state_is_taken_up_by_its_name(file: Path) -> None:
    extensions = OwnExtensions(load_extensions({"training.extensions.Meter": f"{file}:Meter"}, []))
    extensions.resume({"extensions": {"training.extensions.Meter": {"tokens": 5, "stopped": True}, "gone": {}}})
    assert extensions.state() == {"extensions": {"training.extensions.Meter": {"tokens": 5, "stopped": True}}}
