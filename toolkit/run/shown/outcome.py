"""The outcome of a run: the export and its check, report, card and last lines."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from toolkit.checkpoint.manifest import step_folder
from toolkit.checkpoint.writer import clear_unfinished
from toolkit.errors import counted, first_line
from toolkit.model.adapters.adapters import base_of
from toolkit.model.beside_weights.base_files import CHAT_TEMPLATE
from toolkit.model.load import auto_class
from toolkit.pages.card import model_and_data, recipe_for_readers, write_card
from toolkit.pages.notebook_output import result_output
from toolkit.pages.parts.loss_warnings import doubts_of
from toolkit.pages.parts.page import render
from toolkit.pages.parts.run_metrics import damage_in_words, last_step, parse_metrics
from toolkit.pages.parts.side_by_side import SideBySide, last_turn
from toolkit.pages.parts.story import Story, read_story
from toolkit.pages.run_page import RunSummary, headline, write_report
from toolkit.paths import atomic_write, is_hub_name, read_foreign
from toolkit.recipe.adapter_file import PER_EXPERT
from toolkit.recipe.figures import steering
from toolkit.recipe.recipe import Recipe
from toolkit.run.folder.finished import write_finished
from toolkit.run.folder.origin import own_command, versions, write_origin
from toolkit.run.stages.stages import PreparedRun
from toolkit.serving.servers import ADAPTER, adapter_problem, vllm_command
from toolkit.sharding.plan.unit_plan import UnitPlan
from toolkit.supervise.rank_status import REPORT
from toolkit.terminal import Terminal, format_bytes, harmless
from toolkit.training.extensions.best import judged, patience_is_over

MOST_SHOWN = 160
"""Characters of a prompt, or of an answer to it, in the last lines of a run."""


@dataclass(frozen=True, repr=False)
class FinetuneResult:
    """The result of a run, on every rank.

    Attributes:
        output_dir: the run's folder.
        export_dir: folder for `from_pretrained`, or None if the recipe turned the export off.
        metrics: the records of metrics.jsonl.
        initial_eval_loss: held-out loss before the first step, or None without held-out data.
        final_eval_loss: held-out loss after the last step.
        logits_difference: difference between model and export, as a share of the largest logit.
        doubts: warnings about the losses, a sentence each.
    """

    output_dir: Path
    export_dir: Path | None
    metrics: list[dict[str, Any]]
    initial_eval_loss: float | None
    final_eval_loss: float | None
    logits_difference: float | None
    doubts: tuple[str, ...] = ()

    def __repr__(self) -> str:
        steps = counted(last_step(self.metrics), "step")
        told = [repr(str(self.output_dir)), steps, read_story(self.output_dir).limited(headline(self.metrics))]
        return f"FinetuneResult({', '.join(filter(None, told))})"

    def _repr_html_(self) -> str:
        """Returns the run as a notebook shows it: losses, curve, and the paths of report and export."""
        return result_output(self.metrics, self.output_dir, self.export_dir, self.doubts)["text/html"]


def finished_before(output_dir: Path) -> FinetuneResult:
    """Reads the result of a finished run from its folder."""
    try:
        metrics, damaged = parse_metrics(read_foreign(output_dir / "metrics.jsonl"))
        problems = (damage_in_words(damaged),) if damaged else ()
    except OSError as error:
        metrics, problems = [], (f"metrics.jsonl cannot be read: {first_line(error)}",)
    export_dir = output_dir / "export"
    result = result_of(output_dir, metrics, export_dir if export_dir.is_dir() else None)
    return replace(result, doubts=(*problems, *read_story(output_dir).doubts))


def result_of(
    output_dir: Path,
    metrics: list[dict[str, Any]],
    export_dir: Path | None,
    difference: float | None = None,
    guess: tuple[int, str] | None = None,
) -> FinetuneResult:
    """Returns the result of these records and this export; `guess` is what the loss has to beat."""
    losses = [record.get("loss") for record in metrics if record["split"] == "eval"]
    first, last = (losses[0], losses[-1]) if losses else (None, None)
    doubts = tuple(doubts_of(metrics, guess))
    return FinetuneResult(output_dir, export_dir, metrics, first, last, difference, doubts)


def write_pages(run: PreparedRun, result: FinetuneResult) -> None:
    """Writes the model card, the report, and last that the run is finished. On rank 0."""
    opened = run.opened
    clear_unfinished(result.output_dir)  # leftovers of saves that a full disk interrupted
    opened.story.reads = opened.digests
    summary = summary_of(run, result)
    opened.story.write(result.output_dir)
    if result.export_dir is not None:
        use = _how_to_use(result.export_dir, opened.recipe, base_of(run.inner).config)
        write_card(result.export_dir, opened.recipe, summary, *use)
        write_origin(result.export_dir, opened, summary)
    if summary.side_by_side:
        samples = json.dumps([asdict(sample) for sample in summary.side_by_side], indent=1)
        atomic_write(result.output_dir / "samples.json", samples)
    write_report(result.output_dir / REPORT, summary)
    write_finished(result.output_dir, result.export_dir)


def judge(story: Story, recipe: Recipe, result: FinetuneResult, exported_step: int | None) -> None:
    """Takes the outcome so far into the record of a run: figures, doubts, and the best, last and exported step.

    Args:
        exported_step: the step whose weights the run leaves, or None for the last one.
    """
    by, last, run = recipe.training.best_by, last_step(result.metrics), result.output_dir
    every, step = recipe.checkpoint.every_steps, exported_step or last
    merits = judged(result.metrics, by, every)
    for at in (step, last):  # a save there is judged by the steps before it
        merits |= {end: merit for end, merit in judged(result.metrics, by, every, at).items() if end == at}
    values = {step: steering(by).merit(merit) for step, merit in merits.items() if math.isfinite(merit)}
    story.outcome, story.doubts = headline(result.metrics, by), list(result.doubts)
    story.last = {"step": last, "value": values.get(max(merits, default=last))}
    if result.export_dir is not None:
        story.exported = {"step": step, "value": values.get(step)}
    if (best := max(values, key=merits.__getitem__, default=None)) is not None:
        folder = step_folder(run, best)
        kept = str(folder.relative_to(run)) if folder.exists() else None
        story.best = {"step": best, "by": by, "value": values[best], "checkpoint": kept}


def print_result(
    console: Terminal, recipe: Recipe, result: FinetuneResult, story: Story, side_by_side: Sequence[SideBySide] = ()
) -> None:
    """Prints the last lines: the outcome in figures, answers, and the paths of report and export."""
    if story.outcome:
        console.print(story.limited(f"{story.outcome} in {story.facts()['duration']}"), markup=False)
    for name, told in story.weights().items():
        console.print(f"{name}: {told}", markup=False)
    for doubt in story.doubts:
        console.warn(doubt)
    for sample in side_by_side[:3]:
        _print_answers(console, sample)
    if story.warnings:
        console.print(f"{counted(len(story.warnings), 'warning')}: the report lists them")
    if console.quiet:
        return
    # On stdout, for programs; everything else is for people and goes to stderr.
    print(f"run: {result.output_dir}")
    print(f"report: {result.output_dir / 'report.html'}")
    if result.export_dir is not None:
        print(f"model: {result.export_dir}", flush=True)
        spec = recipe.objective.spec
        if spec.writes_text and not spec.encoder_decoder:
            told = adapter_problem(result.export_dir) or f"to serve it: {vllm_command(result.export_dir)}"
            console.print(f"{told} (`toolkit help serving` has other servers)")


def _print_answers(console: Terminal, sample: SideBySide) -> None:
    """Prints the end of a held-out prompt, and what the model wrote after it before and after training."""
    console.print(harmless(last_turn(sample.prompt)[-MOST_SHOWN:]), style="bold", markup=False)
    after = sample.after or ""
    wanted = [] if after.strip() == sample.expected.strip() else [("in the data", sample.expected)]
    for when, text in [("before", sample.before or ""), ("after", after), *wanted]:
        shown = " ".join(text.split())
        cut = shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]} …"
        console.print(f"  {when}: {harmless(cut)}", markup=False)


def _how_to_use(export_dir: Path, recipe: Recipe, config: PretrainedConfig) -> tuple[str, str]:
    """Returns Python that loads the export and uses it, and vLLM's command; both name no folder of this machine.

    Args:
        config: the configuration of the trained model.
    """
    name, base, spec = recipe.export.push_to_hub or ".", recipe.model.name_or_path, recipe.objective.spec
    known_base, is_adapter = base is not None and is_hub_name(base), (export_dir / ADAPTER).is_file()
    trusted = {"trust_remote_code": True} if recipe.model.trust_remote_code else {}
    auto, own, chats = auto_class(config).__name__, f'"{name}"', (export_dir / CHAT_TEMPLATE).is_file()
    sees = auto == AutoModelForImageTextToText.__name__
    pipes, reader = auto == AutoModelForCausalLM.__name__ or not spec.writes_text, "Processor" if sees else "Tokenizer"
    code = render(
        "use.py.jinja",
        auto=auto,
        reader=reader,
        own=own,
        shows_image=sees and chats,
        task=spec.pipeline_task if pipes or (sees and chats) else None,
        chats=spec.writes_text and chats,
        is_adapter=is_adapter,
        has_ends=is_adapter and (export_dir / "generation_config.json").is_file(),
        folder=None if known_base else repr(Path(base or "").name),
        base=_loaded(auto, f'"{base}"' if known_base else "BASE", {**_of_base(recipe, config), **trusted}),
        model=_loaded(auto, own, trusted),
        read=_loaded(f"Auto{reader}", own, trusted),
    )
    is_served = spec.writes_text and not spec.encoder_decoder and adapter_problem(export_dir) is None
    is_served = is_served and (known_base or not is_adapter)
    if recipe.export.push_to_hub and (export_dir / PER_EXPERT).is_dir():  # vLLM takes no folder of a repository
        is_served = False
    served = vllm_command(export_dir).replace(str(export_dir), name) if is_served else ""
    return code.strip(), served


def _of_base(recipe: Recipe, config: PretrainedConfig) -> dict[str, Any]:
    """Returns what an adapter's base needs to be loaded as it was trained, and its own files do not say."""
    needed: dict[str, Any] = {} if recipe.model.revision is None else {"revision": recipe.model.revision}
    if not recipe.objective.spec.writes_text:  # the adapter's file has no names of classes
        needed |= {"id2label": config.id2label, "pad_token_id": config.get_text_config().pad_token_id}
        needed |= {"problem_type": config.problem_type}  # of a reward model: its score as it is
    return needed


def _loaded(auto: str, source: str, arguments: dict[str, Any]) -> str:
    """Returns Python that loads `source`, which is Python, too."""
    # Names of classes come from rows: none may close the fence around the code.
    given = "".join(f", {key}={value!r}" for key, value in arguments.items()).replace("`", "\\x60")
    return f"{auto}.from_pretrained({source}{given})"


def summary_of(run: PreparedRun, result: FinetuneResult) -> RunSummary:
    """Collects what the report shows of a run so far."""
    opened, recipe = run.opened, run.opened.recipe
    judge(opened.story, recipe, result, opened.shown.exported_step)
    opened.story.values()  # takes the time
    facts = opened.facts | opened.story.facts()
    facts["memory"] += f"; measured {_measured_memory(result.metrics)}"
    if run.sharded.compilation is not None:
        facts["compute"] = run.sharded.compilation.describe()  # it may have failed in the first step
    if result.logits_difference is not None:
        facts["export checked"] = f"logits differ by {result.logits_difference:.1e} of the largest"
    if (ended := patience_is_over(result.metrics, recipe.training)) is not None:
        facts["ended early"] = ended
    return RunSummary(
        title=model_and_data(recipe, run.inner.config.architectures[0]),
        recipe_yaml=recipe_for_readers(recipe),
        metrics=result.metrics,
        data_report=run.data.report.to_dict(),
        units=_unit_rows(opened.plugin.unit_plan),
        facts=facts,
        versions=versions(),
        side_by_side=opened.shown.side_by_side,
        sampled=opened.shown.sampled,
        doubts=opened.story.told(),
        limits=opened.story.limits,
        outcome=opened.story.outcome,
        folder=result.output_dir.name,
        command=own_command(opened),
        written=time.time(),
    )


def _measured_memory(metrics: list[dict[str, Any]]) -> str:
    """Describes the peak memory of the rank that used most, on its device or, for CPU ranks, in its process."""
    train = [record for record in metrics if record["split"] == "train"]
    # Null on CPU ranks, which have no device memory.
    device = max((record["peak_device_bytes"] or 0 for record in train), default=0)
    if device:
        return format_bytes(device)
    host = max((record["peak_host_bytes"] for record in train), default=0)
    return f"{format_bytes(host)} of host memory, with Python and its libraries"


def _unit_rows(plan: UnitPlan | None) -> list[tuple[str, ...]]:
    rows = []
    for name, units in plan.groups() if plan is not None else []:
        numbers = [len(units), sum(unit.num_parameters for unit in units)]
        size = format_bytes(sum(unit.num_bytes for unit in units))
        rows.append((name, units[0].class_name, *(f"{number:,}" for number in numbers), size))
    return rows
