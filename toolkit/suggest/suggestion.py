"""Suggests a recipe for a model and its data: chooses the values in order, each from what was found before it."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.kinds.registry import kind_for
from toolkit.data.rows.sources import open_source
from toolkit.data.samples.packing import Ints, best_fit, split
from toolkit.data.tokens import tokenizer as tokenizers
from toolkit.errors import BadInputError, DataError, counted
from toolkit.model.load import is_encoder_decoder
from toolkit.model.part_sizes import PartSize
from toolkit.paths import GIB, is_file_source, is_store
from toolkit.planning.hardware import Hardware
from toolkit.planning.planner import PlanRow
from toolkit.planning.setup import Setup
from toolkit.planning.table import plan, recommend
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.objectives.spec import ObjectiveSpec
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import DataSection, ModelSection, steps_of_run
from toolkit.suggest.draft import Draft
from toolkit.suggest.methods import METHODS, SPEC_OF, TOKENS_PER_STEP, Method, method_of
from toolkit.suggest.survey import Model, UsableRows, covering, first_words, look_at, measure, template_for

COVERED = 0.99
"""Share of the rows that fit `data.max_length`: the longest ones cost memory that the others do not need, and a run
refuses to drop more than 1 %."""

TEXT_LENGTH = 2048
"""Tokens of a sample of plain text, whose rows are joined and split anyway."""

ROUND_TO = 64
"""Lengths are multiples of this, like the tiles of matrix units."""

ROUND_TARGETS_TO = 16
"""The same for targets, which are shorter."""

MOST_LEFT_OUT = 0.5
"""The largest share of the rows that a recipe may leave out, with a comment that says so."""

FEWEST_STEPS = 100
"""Steps have fewer rows if a run would have fewer steps than this, because a schedule needs steps to act."""

EVALUATIONS = 5
"""Number of evaluations in a run, not counting the one before the first step."""

MOST_ROWS_PACKED = 100_000
"""The most rows whose packing is tried; of more, a part is tried."""

FEWEST_ROWS_TO_HOLD_OUT, MOST_ROWS_HELD_OUT = 20, 1000
"""Below the first nothing is held out; above the second an evaluation gets slower, but not more precise."""

GROUP = 8
"""Completions of a prompt, as TRL's GRPOConfig has them."""

THINKING = 256
"""The most tokens of a completion whose length the answers do not tell, as TRL's GRPOConfig has them."""

MICRO_BATCH_TOKENS = 8192
"""The largest micro-batch that is tried first (tokens): it keeps a GPU busy."""


@dataclass(frozen=True)
class Machine:
    """The target of the recipe: `count` devices of one node; for CPU ranks `hardware.device_type` is cpu.

    Attributes:
        asked: the name or path of the hardware on a command line, or None for its own name.
        has_bf16: whether CPU ranks multiply in bf16 by instructions of the processor; without these it is slow.
    """

    hardware: Hardware
    count: int
    asked: str | None = None
    has_bf16: bool = False

    @property
    def is_cpu(self) -> bool:
        return self.hardware.device_type == "cpu"

    @property
    def words(self) -> str:
        return f"{self.count} x {self.hardware.name}"

    def train_options(self) -> list[str]:
        return ["--cpu" if self.is_cpu else "--gpus", str(self.count)]

    def plan_options(self) -> list[str]:
        if self.asked is None and self.is_cpu:
            return self.train_options()
        return ["--gpus", str(self.count), "--hardware", self.asked or self.hardware.name]


@dataclass(frozen=True)
class Suggestion:
    """A suggested recipe, with the facts behind it.

    Attributes:
        draft: the values with their reasons.
        layout: layout of the rows.
        row: row of the plan for the chosen strategy.
        parts: sizes by part, of a model that reads more than text.
        num_steps: optimizer steps of the run, approximately.
        prompt: the beginning of a row; empty for a classifier.
    """

    draft: Draft
    recipe: Recipe
    method: Method
    layout: str
    machine: Machine
    model: Model
    rows: UsableRows
    row: PlanRow
    parts: Mapping[str, PartSize]
    num_steps: int
    prompt: str

    @property
    def reasons(self) -> dict[str, str]:
        """The reason for each key's value."""
        return self.draft.all_reasons()

    def text(self) -> str:
        """Returns the recipe as YAML, with the reasons as comments."""
        return self.draft.text(["Written by `toolkit init`. Change what you like; `toolkit validate` checks it."])

    def commands(self, file: str) -> list[str]:
        """Returns the commands to run next, in order."""
        machine = self.machine
        found = [
            ["toolkit", "plan", file, *machine.plan_options()],
            ["toolkit", "train", file, *machine.train_options()],
        ]
        if self.prompt:
            found.append(["toolkit", "generate", self.recipe.training.output_dir, "--prompt", self.prompt])
        return [shlex.join(words) for words in found]


def suggest(
    model: str,
    data: str,
    machine: Machine,
    *,
    method: str | None = None,
    overrides: Sequence[str] = (),
    folder: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Suggestion:
    """Suggests a recipe that trains a model on some rows and fits a machine.

    Args:
        model: a folder or a hub name, whose configuration and tokenizer are read.
        data: a file, a glob, a folder saved by `datasets`, or a hub data set.
        method: a key of `METHODS`. If it is None, the rows decide, with adapters if nothing else fits, over a base in
            4 bits if those do not fit either.
        overrides: `section.key=value` texts, which stay as they are.
        folder: folder of the recipe, to which its paths are relative, or None for the working folder.
        tell: called with a line before each part that takes time.

    Raises:
        BadInputError: if there is no such model or data, the rows fit no method, or no run fits the machine.
    """
    if machine.count > machine.hardware.devices_per_node:
        raise BadInputError(
            f"--gpus {machine.count}: a node of {machine.hardware.name} has {machine.hardware.devices_per_node}; write "
            "the recipe for one node, and see `toolkit help multi_node` for several"
        )
    draft = Draft(overrides)
    here = folder is None or folder.resolve() == Path.cwd().resolve()
    draft.set("model.name_or_path", model if here else _absolute(model))
    draft.set("data.train", data if here else _absolute(data))
    chosen, layout, rows, found, prompt = _survey(draft, method, tell)
    chooser = Chooser(draft, chosen, rows, found, machine)
    tell(f"planning {found.num_parameters:,} parameters on {machine.words}")
    # A save takes host memory, which the plan counts; its interval follows later from the steps.
    draft.set("checkpoint.every_steps", 1)
    planned = chooser.complete()
    while planned is None and method is None and chosen.smaller is not None:
        chosen = METHODS[chosen.smaller]
        chooser = replace(chooser, method=chosen)
        planned = chooser.complete()
        draft.reasons["adapter.kind"] = f"Training every parameter needs more than {machine.words}; adapters fit."
        if chosen.quantized:
            draft.reasons["adapter.quantize"] = f"LoRA over a base in 16 bits needs more than {machine.words}."
    if planned is None:
        raise BadInputError(chooser.nothing_fits())
    num_steps = chooser.set_length_of_run()
    return Suggestion(draft, draft.recipe(), chosen, layout, machine, found, rows, *planned, num_steps, prompt)


def _survey(draft: Draft, name: str | None, tell: Callable[[str], None]) -> tuple[Method, str, UsableRows, Model, str]:
    """Returns method, layout, rows, model, and a prompt; sets what reading the rows depends on."""
    # The required fields of a recipe; each gets its value later.
    draft.set("data.max_length", ROUND_TO)
    draft.set("optimizer.learning_rate", 1.0)
    draft.set("training.output_dir", f"outputs/{_run_name(draft.get('data.train'))}")
    draft.set("training.num_epochs", 1)
    reads_sources = is_encoder_decoder(_model_section(draft)) if name is None else _reads_sources(name)
    data = _data_section(draft, SPEC_OF["seq2seq" if reads_sources else "full"])
    source = open_source(data.train[0], "data.train")
    method, layout = method_of(name, source, data.columns, reads_sources)
    spec = SPEC_OF[method.name]
    data, model = _data_section(draft, spec), _model_section(draft)
    tokens = tokenizers.load(model, data, spec.kind)
    template = None if spec.padded else template_for(tokens, source, layout)
    if template is not None:
        draft.set("data.chat_template", template, "The tokenizer has no chat template of its own.")
        data = _data_section(draft, spec)
        tokens = tokenizers.load(model, data, spec.kind)
    tell(f"reading {source.name}: {layout.name}")
    try:
        rows = measure(data, tokens, _stand_in(spec))
    except DataError:
        usual = kind_for(spec.kind).also_called.get("prompt", ())
        column = next((column for column in source.columns if column.lower() in usual), None)
        if column is None or draft.get("data.columns.prompt") is not None or "prompt" in source.columns:
            raise
        draft.set("data.columns.prompt", column, "The rows have no column called prompt.")
        return _survey(draft, name, tell)
    prompt = first_words(source, layout) if spec.writes_text else ""
    prompt = f"{data.source_prefix or ''}{prompt}" if prompt else ""
    found = look_at(model, tokens, rows, spec.kind)
    return method, layout.name, _with_completions(draft, rows, found), found, prompt


def _stand_in(spec: ObjectiveSpec) -> ObjectiveSection:
    """Returns settings of an objective with which its rows can be read; what they lack is not decided yet."""
    of_samples = {"rewards": [{"name": "any", "match": "."}], "max_new_tokens": 1} if spec.samples_itself else {}
    return ObjectiveSection.model_validate({"kind": spec.kind, **of_samples})


def _with_completions(draft: Draft, rows: UsableRows, model: Model) -> UsableRows:
    """Sets how completions of prompts are sampled and rewarded. Returns the rows with room for a completion in each.

    Raises:
        BadInputError: if prompts have no answers to compare completions with, and no reward is given.
    """
    answers = rows.answers
    if answers is None:
        return rows
    if answers.lacking and "objective.rewards" not in draft.given:
        more = f" and {len(answers.lacking) - 1} more" if len(answers.lacking) > 1 else ""
        raise BadInputError(
            f"data.train: {answers.lacking[0]}{more}: no answer to compare completions with; add a column `answer`, or "
            "give a reward that needs none, as in objective.rewards='[{name: mine, compare: my_rewards.py:score}]' "
            "(`toolkit help online`)"
        )
    rewards = [{"name": "right", "compare": answers.compare}]
    why = {"numeric": "numbers", "structured": "JSON", "text": "texts"}[answers.compare]
    own = "A function of yours rewards as well: {name: mine, compare: my_rewards.py:score} (`toolkit help online`)."
    draft.set("objective.rewards", rewards, f"The answers are {why}. {own}")
    draft.set("objective.group_size", GROUP, "So many completions of a prompt are compared with each other.")
    most = covering(answers.lengths, COVERED)
    length, reason = THINKING, "Numbers may follow thoughts. Raise it if many completions are cut."
    if answers.compare != "numeric" and not answers.lacking:
        length = -(-2 * most // ROUND_TARGETS_TO) * ROUND_TARGETS_TO
        reason = f"{COVERED:.0%} of the answers have at most {most:,} tokens; wrong ones may be longer."
    room = length if model.positions is None else model.positions - covering(rows.lengths, COVERED)
    if 0 < room < length:
        length, reason = room, f"What prompts leave of the model's {model.positions:,} positions."
    draft.set("objective.max_new_tokens", length, reason)
    return replace(rows, lengths=rows.lengths + draft.get("objective.max_new_tokens"))


def _reads_sources(method: str) -> bool:
    """Returns whether a method trains an encoder-decoder; False for an unknown name, which `method_of` refuses."""
    return method in SPEC_OF and SPEC_OF[method].encoder_decoder


NEEDED = {"training": {"output_dir": "outputs", "num_epochs": 1}, "optimizer": {"learning_rate": 1.0}}
"""Required fields of a recipe, for building only one of its sections."""


def _model_section(draft: Draft) -> ModelSection:
    """Returns the checked `model` section of the draft."""
    data = {"train": draft.get("data.train"), "max_length": ROUND_TO}
    return Recipe.from_mapping({"model": draft.section("model"), "data": data, **NEEDED}).model


def _data_section(draft: Draft, spec: ObjectiveSpec) -> DataSection:
    """Returns the checked `data` section of the draft, alone, because other sections may lack values yet."""
    # For other objectives causal_lm is used, because the rows have not decided the objective yet.
    kind = spec.kind if spec.encoder_decoder else "causal_lm"
    sections = {"model": draft.section("model"), "data": draft.section("data"), "objective": {"kind": kind}}
    return Recipe.from_mapping({**sections, **NEEDED}).data


@dataclass(frozen=True)
class Chooser:
    """Chooses the values of a draft: of the method, of lengths, and, by plans, of the sharding and the batches."""

    draft: Draft
    method: Method
    rows: UsableRows
    model: Model
    machine: Machine

    def complete(self) -> tuple[PlanRow, Mapping[str, PartSize]] | None:
        """Completes the draft for the best row of a plan. Returns it and the model's parts, or None if nothing fits."""
        self._set_method()
        self._set_lengths()
        each = self._samples_of_a_rank()
        largest: int = max(1, MICRO_BATCH_TOKENS // self.draft.get("data.max_length"))
        size = math.gcd(each, 1 << (largest.bit_length() - 1))
        # A table also has a half and a quarter of the micro-batch. If 1 is not among them, it gets a table of its own.
        for micro_batch in (size, 1) if size > 4 else (size,):
            self.draft.set("training.micro_batch_size", micro_batch)
            self.draft.set("training.gradient_accumulation_steps", each // micro_batch)
            found = self._settle()
            if found is not None:
                return found
        return None

    def _settle(self) -> tuple[PlanRow, Mapping[str, PartSize]] | None:
        """Sets what plans recommend until one recommends the draft as it is. Returns its row and the model's parts."""
        tried: list[Setup] = []
        while True:
            found = plan(self.draft.recipe(), self.machine.hardware, self.machine.count, with_levers=False)
            able = [row for row in found.rows if self._is_allowed(row.setup)]
            if not able:
                raise BadInputError(
                    "no setup that was planned has the given sharding and micro-batches; give fewer of them"
                )
            row, why = recommend(able, self.machine.hardware, found.asked.setup)
            if row is None:
                return None
            self._set_setup(row, why)
            # The next table has other micro-batches, those around the new one. Two rows may each be worth the other.
            if row.setup == found.asked.setup or row.setup in tried:
                return row, found.parts
            tried.append(row.setup)

    def _set_method(self) -> None:
        draft, method, machine = self.draft, self.method, self.machine
        kind = SPEC_OF[method.name].kind
        if kind != ObjectiveSection().kind:
            draft.set("objective.kind", kind, f"Method {method.name} trains {method.about}.")
        if method.loss is not None:
            draft.set("objective.loss", method.loss, "The loss that compares the two completions of a pair.")
        if method.adapter:
            draft.set("adapter.kind", "lora", f"Method {method.name} trains {method.about}.")
            if "adapter.start_from" not in draft.given:  # their rank stays
                draft.set("adapter.r", 16, "Rank of the adapters; alpha is twice that.")
            if not machine.is_cpu:
                draft.set("model.dtype", "bfloat16", "The base is frozen, so 16 bits are enough.")
        if method.quantized:
            draft.set("adapter.quantize", "nf4", f"Method {method.name} trains {method.about}.")
            draft.set(
                "adapter.double_quantization", True, "As in QLoRA: the scales take 0.02 bytes a weight, not 0.06."
            )
        rate = method.rate(self.model.num_parameters)
        why = f"For method {method.name} with {self.model.num_parameters:,} parameters: {rate.source}."
        draft.set("optimizer.learning_rate", rate.value, why)
        if not machine.is_cpu or machine.has_bf16:
            draft.set("training.mixed_precision", "bf16", "Weights stay in float32; products are computed in 16 bits.")
        draft.set("schedule.kind", "cosine", "Falls to zero by the end of the run.")
        draft.set("schedule.warmup_fraction", 0.1, "A tenth of the run, as in the recipes of alignment-handbook.")

    def _set_lengths(self) -> None:
        """Sets the length of a sample, and what happens to longer rows."""
        draft, rows, model = self.draft, self.rows, self.model
        most = covering(rows.lengths, COVERED)
        reason = f"{COVERED:.0%} of the {counted(len(rows.lengths), 'row')} have at most {most:,} tokens."
        spec, is_text = SPEC_OF[self.method.name], self.method.name == "pretrain"
        if not is_text and not spec.has_classes:
            self._require_rows_that_fit()
        wanted = min(TEXT_LENGTH, max(ROUND_TO, rows.num_tokens // FEWEST_STEPS)) if is_text else most
        length = max(8, -(-wanted // ROUND_TO) * ROUND_TO)
        if model.positions is not None and length > model.positions:
            length = model.positions
            reason += f" The model has {model.positions:,} positions."
        if is_text:
            reason += " Documents share samples, and longer ones are split."
        draft.set("data.max_length", length, reason)
        if rows.target_lengths is not None:
            self._set_target_length(rows.target_lengths)
        longer = rows.longer_than(draft.get("data.max_length"), draft.get("data.max_target_length"))
        if longer and not is_text:
            # A text can be classified by its beginning. An answer cut short would teach the model to stop early.
            cut = spec.has_classes
            policy, what = ("truncate", "cut") if cut else ("drop", "left out")
            reason = f"{longer:,} of {counted(len(rows.lengths), 'row')} are longer and are {what}."
            draft.set("data.long_rows", policy, reason)
        if not spec.padded:
            why = "Short rows share a sample without padding, unless the first check finds that they see each other."
            without = "This model takes no position_ids, so rows that share a sample would see each other."
            # Null instead of true, which would end the run if that check fails.
            draft.set("data.packing", *((None, why) if model.takes_positions else (False, without)))

    def _require_rows_that_fit(self) -> None:
        """Raises BadInputError if a run would leave out most rows: its recipe would train next to nothing."""
        draft, rows, model = self.draft, self.rows, self.model
        given = draft.given.get("data.max_length")
        limits = [limit for limit in (model.positions, given) if limit is not None]
        is_cut = draft.get("data.long_rows") in ("truncate", "split")
        longer = rows.longer_than(min(limits), model.positions) if limits and not is_cut else 0
        if longer > MOST_LEFT_OUT * len(rows.lengths):
            limit, most = min(limits), int(rows.lengths.max())
            which = "data.max_length allows" if limit == given else "the model has positions for"
            larger = f"a larger data.max_length (the longest row has {most:,} tokens), " if limit == given else ""
            raise BadInputError(
                f"data.train: {longer:,} of {counted(len(rows.lengths), 'row')} are longer than the {limit:,} tokens "
                f"that {which}, and a run would leave them out; give {larger}shorter rows, a model with more "
                "positions, or data.long_rows=truncate, which cuts them"
            )

    def _set_target_length(self, lengths: Ints) -> None:
        most = covering(lengths, COVERED)
        length = -(-most // ROUND_TARGETS_TO) * ROUND_TARGETS_TO
        if self.model.positions is not None:
            length = min(length, self.model.positions)
        self.draft.set("data.max_target_length", length, f"{COVERED:.0%} of the targets have at most {most:,} tokens.")

    @property
    def _samples_itself(self) -> bool:
        return SPEC_OF[self.method.name].samples_itself

    def _num_samples(self) -> int:
        """Returns the samples of one epoch, approximately."""
        draft, rows = self.draft, self.rows
        length: int = draft.get("data.max_length")
        if self._samples_itself:
            return len(rows.lengths) * int(draft.get("objective.group_size"))
        if draft.get("data.packing", False) is False:
            return len(rows.lengths)
        used = rows.lengths if self.method.name == "pretrain" else rows.lengths[rows.lengths <= length]
        tried = used[:: -(-len(used) // MOST_ROWS_PACKED) or 1]
        if not len(tried):
            return 1
        pieces = split(np.arange(len(tried)), tried, length).lengths()
        return max(1, round((int(best_fit(pieces, length).max()) + 1) * len(used) / len(tried)))

    def _samples_of_a_rank(self) -> int:
        """Returns a step's samples on each rank: the method's, or fewer for enough steps.

        It is a power of two, of groups of completions if the model samples itself.
        """
        draft, method = self.draft, self.method
        samples = self._num_samples()
        wanted = method.rows_per_step * samples / len(self.rows.lengths)
        if method.name == "pretrain":
            wanted = TOKENS_PER_STEP / draft.get("data.max_length")
        enough = method.epochs * samples / FEWEST_STEPS
        if self._samples_itself:  # completions of several prompts, which come again in the next epoch
            wanted, enough = method.rows_per_step, samples
        each = max(1, int(min(wanted, enough) * self._ranks_of_a_row / self.machine.count))
        group: int = draft.get("objective.group_size") if self._samples_itself else 1
        whole = group // math.gcd(group, self.machine.count)  # a step has whole groups of completions
        return whole << (max(1, each // whole).bit_length() - 1)

    @property
    def _ranks_of_a_row(self) -> int:
        """The number of ranks that share a row, or have the same ones and cut matrices."""
        return int(self.draft.get("sharding.sequence", 1) * self.draft.get("sharding.tensor", 1))

    def set_length_of_run(self) -> int:
        """Sets epochs, evaluation and checkpoints; returns the approximate optimizer steps of the run."""
        draft, method = self.draft, self.method
        draft.set("training.num_epochs", method.epochs, f"As published recipes for method {method.name} do.")
        count, samples = len(self.rows.lengths), self._num_samples()
        if count >= FEWEST_ROWS_TO_HOLD_OUT and not self._samples_itself:
            share = float(f"{min(0.05 if count >= 400 else 0.1, MOST_ROWS_HELD_OUT / count):.2g}")
            held_out = counted(round(share * count), "row")
            draft.set("data.validation_fraction", share, f"About {held_out} are held out for evaluation.")
        training = draft.recipe().training
        per_step = training.micro_batch_size * training.gradient_accumulation_steps * self.machine.count
        per_step //= self._ranks_of_a_row
        if self._samples_itself and (epochs := math.ceil(FEWEST_STEPS * per_step / samples)) > method.epochs:
            draft.set("training.num_epochs", epochs, f"About {FEWEST_STEPS} steps; each epoch draws new completions.")
            training = draft.recipe().training
        steps = steps_of_run(
            training, max(1, round(samples * (1 - (draft.get("data.validation_fraction") or 0)))), per_step
        )
        every = max(1, steps // EVALUATIONS)
        if draft.recipe().data.has_validation:
            draft.set("training.eval_every_steps", every, f"{EVALUATIONS} times in about {counted(steps, 'step')}.")
        draft.set(
            "checkpoint.every_steps", every, "A run that is cut off resumes from the last checkpoint; two are kept."
        )
        return steps

    def _settings_of_setup(self, setup: Setup) -> dict[str, Any]:
        """Returns a setup's values by keys of the recipe; None is the default."""
        checkpointing = setup.checkpointing
        sequence, tensor = setup.sequence or self.draft.get("sharding.sequence"), setup.mesh.tensor
        return {
            "sharding.strategy": setup.strategy.name,
            "sharding.offload": "optimizer" if setup.offload else None,
            "sharding.sequence": sequence,
            "sharding.tensor": tensor if tensor > 1 else None,
            "sharding.activation_checkpointing": None if checkpointing is None else checkpointing.every,
            "training.micro_batch_size": setup.micro_batch_size,
            "training.gradient_accumulation_steps": setup.accumulation,
        }

    def _is_allowed(self, setup: Setup) -> bool:
        """Returns whether a setup has the given values."""
        settings = self._settings_of_setup(setup)
        given = {key: None if value == "none" else value for key, value in self.draft.given.items() if key in settings}
        return all(value in (settings[key], "auto") for key, value in given.items())

    def _set_setup(self, row: PlanRow, why: str) -> None:
        """Sets what the plan recommends."""
        settings = self._settings_of_setup(row.setup)
        samples = (
            row.setup.micro_batch_size
            * row.setup.accumulation
            * row.setup.ranks
            // ((settings["sharding.sequence"] or 1) * row.setup.mesh.tensor)
        )
        reasons = {
            "sharding.strategy": f"Planned for {self.machine.words}: {why}.",
            "sharding.offload": "Optimizer state is held in host memory, which frees room on the GPUs.",
            "sharding.sequence": "So many ranks share a row, which frees room for its activations.",
            "sharding.tensor": "So many ranks cut each matrix, which makes the buffers of gathered weights smaller.",
            "sharding.activation_checkpointing": (
                "Blocks keep only their inputs and are computed twice, which frees room."
            ),
            "training.micro_batch_size": "The size with which the plan fits and sends least.",
            "training.gradient_accumulation_steps": (
                f"{counted(samples, 'sample')} a step, at most {row.tokens:,} tokens."
            ),
        }
        for key, value in settings.items():
            self.draft.drop(key)
            if value is not None:
                self.draft.set(key, value, reasons[key])

    def nothing_fits(self) -> str:
        method, machine = self.method, self.machine
        ways = [f"--method {method.smaller}"] if method.smaller is not None else []
        ways += ["more devices"] if machine.count < machine.hardware.devices_per_node else []
        return (
            f"method {method.name} does not fit {machine.words} of {machine.hardware.memory_bytes / GIB:.0f} GiB with "
            f"{self.model.num_parameters:,} parameters and rows of {self.draft.get('data.max_length'):,} tokens; "
            f"try {', '.join([*ways, 'a smaller data.max_length', 'or a smaller model'])}"
        )


def _absolute(name: str) -> str:
    """Returns a path as absolute; a hub name stays."""
    if is_store(name):
        return name
    path = Path(name).expanduser()
    return os.path.abspath(path) if path.exists() or is_file_source(name) else name


def _run_name(train: object) -> str:
    """Returns the run's name, after its data."""
    path = Path(train if isinstance(train, str) else "run")
    name = path.name.partition(".")[0] if "*" not in path.name else path.parent.name
    return name or "run"
