"""What a run reads apart from code of the user's: rows, the model's files, an adapter that it continues, a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.checkpoint.beside_weights.model_files import templates_in, templates_of
from toolkit.data.rows.cache import digest
from toolkit.data.samples.image_samples import image_samples_of
from toolkit.data.stream import describe_stream
from toolkit.model.adapters.started_adapter import start_fact
from toolkit.model.beside_weights.base_files import CODE, CONFIG, GENERATION, TOKENIZERS, BaseFiles
from toolkit.objectives.teacher import teacher_fact
from toolkit.paths import configuration_digest, folder_on_this_machine
from toolkit.run.checks.image_check import check_images
from toolkit.run.checks.packing_check import check_leaks
from toolkit.run.folder.folder import write_beginning, write_data_report
from toolkit.run.stages.part import NEW_FOLDER, Loop, RunPart
from toolkit.run.stages.stages import BuiltRun, MetaModel, PreparedRun, Read
from toolkit.training.extension import Extension

RESUME = "checkpoint.resume"
CHANGED = "its weights have changed since the run began; the record has the hash of those that it began with"


class RowsPart(RunPart):
    """The rows, as the tokenizer reads them, and the content of files that are named in them."""

    def start(self, run: PreparedRun) -> None:
        ranks.on_first_rank(lambda: write_beginning(run))

    def extension(self, loop: Loop) -> Extension | None:
        return None if loop.run.data.stream is None else StreamReport(loop.run)

    def prepared(self, run: PreparedRun) -> None:
        rows = (
            f"{RESUME}: the content of data.train, or the tokenizer, has changed since, or another version of the "
            f"toolkit tokenises the rows differently; restore the data or that version, {NEW_FOLDER}"
        )
        content = (
            f"{RESUME}: the content of data.train has changed since: images, or files of a stream, under the same "
            f"names; bring the old ones back, {NEW_FOLDER}"
        )
        unknown = (
            "the checkpoint is of a version that did not record the content of images, nor of a stream's files; "
            "whether they are the same is not known"
        )
        self.reads += [Read("data", run.data.fingerprint, rows), Read("content", run.data.content, content, unknown)]


class BasePart(RunPart):
    """The files of the model: its weights, and those beside them that say how it runs."""

    def on_meta(self, on_meta: MetaModel) -> None:
        model, fit = self.recipe.model, on_meta.loaded.fit
        # What ends a sample is among the generation settings; other runs only hand them on.
        beside = {GENERATION: self.recipe.objective.spec.samples_itself}
        beside |= dict.fromkeys(CODE if model.trust_remote_code else (), True)
        self.reads += _configuration("model.name_or_path", model.name_or_path, model.revision, beside)
        if fit.fingerprint is not None and not on_meta.objective.needs_references:
            changed = (
                f"{RESUME}: the adapters were trained on other weights than those of model.name_or_path as they are "
                f"now; name that base, {NEW_FOLDER}"
            )
            self.reads.append(Read("base", fit.fingerprint, changed, unknown=""))

    def prepared(self, run: PreparedRun) -> None:
        if run.objective.needs_references:
            changed = (
                f"{RESUME}: the reference of the run up to step {{step}} had other weights than model.name_or_path "
                f"({self.recipe.model.name_or_path!r}) has now; bring them back (of a hub model: set model.revision "
                f"to their commit), {NEW_FOLDER}"
            )
            # Known only now: of a base that is trained itself, the files are read with its weights.
            self.reads.append(Read("base", run.fit.origin, changed, unknown=""))
        elif run.fit.fingerprint is None:
            began = (self.opened.resumed and self.opened.resumed.base) or run.fit.origin
            self.reads.append(Read("base", began, "", unknown=""))
            if began != run.fit.origin:
                self.opened.console.warn(f"model.name_or_path: {CHANGED}")


class StreamReport(Extension):
    """Writes the data report again with all rows that were read; at the beginning it had only the first window."""

    def __init__(self, run: PreparedRun) -> None:
        self._run = run

    def after_last_step(self) -> None:
        opened, data = self._run.opened, self._run.data
        assert data.stream is not None
        report = describe_stream(data.report, data.stream)
        self._run.sharded.data = replace(data, report=report)
        opened.story.of_rows(report.to_dict())
        ranks.on_first_rank(lambda: write_data_report(opened.output_dir, opened.recipe, report))


class StartedAdapterPart(RunPart):
    """The adapter that the run continues (`adapter.start_from`)."""

    def on_meta(self, on_meta: MetaModel) -> None:
        changed = (
            f"{RESUME}: the run up to step {{step}} went on from another adapter than adapter.start_from "
            f"({self.recipe.adapter.start_from!r}) is now; bring that back, {NEW_FOLDER}"
        )
        self.reads.append(Read("adapter", on_meta.loaded.fit.adapter, changed))

        if (started := on_meta.loaded.started) is None:
            return
        fact = start_fact(started, self.recipe.adapter)
        if on_meta.data.report.chat_template is not None and has_other_template(started.folder, on_meta.tokenizer):
            fact += "; its chat template is another one than this run's"
        self.facts["start"] = fact


class TeacherPart(RunPart):
    """A frozen model to learn from, or the model itself as its reference."""

    def on_meta(self, on_meta: MetaModel) -> None:
        section, teacher = self.recipe.objective, on_meta.teacher
        self.reads += _configuration("objective.teacher", section.teacher, None, {})
        changed = (
            f"{RESUME}: the weights of objective.teacher, or of the model as a reference, have changed since; name the "
            f"same ones, {NEW_FOLDER}"
        )
        self.reads.append(Read("teacher", None if teacher is None else teacher.fit.fingerprint, changed))
        if teacher is not None:
            name = "reference" if section.teacher is None else "teacher"
            self.facts[name] = teacher_fact(section.teacher, teacher.model)

    def check(self, run: BuiltRun) -> None:
        train, teacher = run.data.train, run.objective.teacher
        with_images, device = image_samples_of(train), self.opened.device
        if teacher is None or not (train.is_packed or with_images is not None):
            return
        model, size, in_16_bits = teacher.model, self.recipe.training.micro_batch_size, self.opened.in_16_bits

        def check() -> None:
            if with_images is not None:
                check_images(model, teacher.causal, with_images, device, in_16_bits)
            else:
                check_leaks(model, teacher.causal, train, size, device, in_16_bits)

        ranks.on_every_rank(check, "look at the teacher's rows")


def _configuration(field: str, name: str | None, revision: str | None, beside: Mapping[str, bool]) -> list[Read]:
    """Returns what a run reads of a model's configuration; nothing if that is not on this machine.

    Args:
        beside: patterns of files that count beside config.json, and whether a run is refused that finds others.
    """
    if name is None:
        return []

    def digests() -> list[str | None]:
        folder = folder_on_this_machine(name, revision)
        return [configuration_digest(folder), *(digest(BaseFiles.read(folder, [files]).digests()) for files in beside)]

    # A configuration is read by the field's own name.
    read = [(field, CONFIG, True), *((f"{field} {files}", files, refuses) for files, refuses in beside.items())]
    changed = f"{RESUME}: {{}} of {field} has changed since; undo that, {NEW_FOLDER}"
    return [
        Read(read_as, known, changed.format(files), unknown="", refuses=refuses)
        for (read_as, files, refuses), known in zip(read, ranks.on_first_rank(digests), strict=True)
        if known is not None
    ]


def has_other_template(adapter: Path, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tells whether the folder of an adapter has a chat template that is not the tokenizer's."""
    before = templates_in(BaseFiles.read(adapter, TOKENIZERS))
    return bool(before) and before != templates_of(tokenizer)
