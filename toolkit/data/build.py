"""Builds samples of a recipe's sources: tokenised once on rank 0, cached by content, memory-mapped by every rank."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.data import report as reports
from toolkit.data.documents.documents import Named, read_documents, work_of, write_documents
from toolkit.data.documents.encode import FEATURES, Encoder
from toolkit.data.documents.processes import image_root
from toolkit.data.images.images import Images, image_tokens_of, require_built, require_effect, require_root, why_unread
from toolkit.data.kinds.recognise import recognise
from toolkit.data.kinds.registry import LAYOUTS, rows_of
from toolkit.data.layouts.layout import ColumnLayout, Layout
from toolkit.data.layouts.template_arguments import date_of
from toolkit.data.report import DataReport, SplitReport
from toolkit.data.rows.cache import cache_folder, digest, kept
from toolkit.data.rows.files import local_path, paths_of
from toolkit.data.rows.sources import Source, glimpse, has_images, identify, map_of, open_source, sampled, short_names
from toolkit.data.samples.image_samples import identify_images
from toolkit.data.samples.samples import Rows, Samples
from toolkit.data.selection import RowCounts, Selection, class_names, hold_out, one_pass, select
from toolkit.data.stream import Stream, StreamedSource, Window, describe_stream
from toolkit.data.templates.stops import next_turn_of, require_turn_end
from toolkit.data.tokens.tokenizer import bos_of, identity, pad_id
from toolkit.errors import DataError
from toolkit.paths import source_name
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.schema import DataSection, SourceSection
from toolkit.terminal import LongAction, Terminal


@dataclass(frozen=True)
class TokenisedData:
    """Samples to train on and held-out ones.

    Attributes:
        validation: held-out samples, or None if nothing is held out.
        report: what became of the rows; see docs/data.md.
        fingerprint: digest of the rows, the tokenizer and how samples are made of them.
        label_names: names of the classes, or of the one score of a reward model, in the order of their numbers; None
            for a model that writes text.
        stream: the stream to train on instead of `train`, which then is its first window.
        content: a digest of what the fingerprint has by name alone: the files of a stream, and the images of rows; None
            if there are none of both.
    """

    train: Samples
    validation: Samples | None
    report: DataReport
    fingerprint: str
    label_names: list[str] | None = None
    stream: Stream | None = None
    content: str | None = None


def build(
    data: DataSection, tokenizer: PreTrainedTokenizerBase, seed: int, objective: ObjectiveSection | None = None
) -> TokenisedData:
    """Tokenises the recipe's rows, or finds them in the cache, and decides which rows make up which sample.

    Raises:
        DataError: on every rank, if a source is missing, unreadable, of unknown layout or without a row to train
            on, or if too many rows are too long.
    """
    builder = Builder(data, tokenizer, seed, objective or ObjectiveSection())
    folder = ranks.on_each_host(builder.write)
    prepared = builder.read(folder)
    return _with_stream(builder, prepared) if data.streaming else prepared


def _with_stream(builder: Builder, prepared: TokenisedData) -> TokenisedData:
    """Returns the data with a stream to train on, whose first window is read now."""
    found: list[tuple[Stream, Window]] = []
    # Digests, not numbers: held-out rows come from sources of their own, which are numbered apart.
    rows = getattr(prepared.validation, "rows", None)
    held_out = frozenset(rows.column("digest").tolist()) if isinstance(rows, Rows) else frozenset()
    ranks.on_every_rank(lambda: found.append(builder.first_window(held_out)), "read data.train")
    stream, first = found[0]
    report, rows = prepared.report, first.samples.rows
    shown = np.arange(min(reports.EXAMPLES_OF_WINDOW, len(rows)))
    examples = reports.examples(stream.kind, builder.tokenizer, rows, shown, "train", stream.images)
    return replace(
        prepared,
        train=first.samples,
        report=describe_stream(report.model_copy(update={"examples": [*examples, *report.examples]}), stream),
        # Streamed rows are not read beforehand: names and sizes of their files stand for their content.
        fingerprint=digest(prepared.fingerprint, builder.glimpse(stream.images)),
        content=ranks.on_first_rank(
            lambda: digest(
                [sampled(source, "data.train") for source in builder.data.train],
                *([] if prepared.content is None else [prepared.content]),  # of held-out images
            )
        ),
        stream=stream,
    )


DOCUMENTS = "documents-6-"
"""Prefix of the folder of a source's documents. The number is raised if rows are read differently, so that documents of
older versions are made again. Runs of older versions resume, because their fingerprint uses the rest of the name."""


COLUMNS_OF_KEYS = (*FEATURES, "label", "tags", "split", "margin", "shard")
"""The columns of all documents in version 0.2. Names of folders are digests of these, too, so they stay."""


LATER = frozenset({"group_size", "max_new_tokens", "rollout_batch_size", "scale_rewards", "mask_truncated"})
"""Fields of `ObjectiveSection` that are no part of the key of samples where they are not set."""

GONE = dict.fromkeys(("router_z_coef", "router_bias_rate", "teacher_revision"))
"""Fields that `ObjectiveSection` had, and which every key has, so that runs of before resume."""


class Builder:
    """Makes samples for one recipe."""

    def __init__(
        self, data: DataSection, tokenizer: PreTrainedTokenizerBase, seed: int, objective: ObjectiveSection
    ) -> None:
        self.data = data
        self.tokenizer = tokenizer
        self.seed = seed
        self.objective = objective
        self.kind = rows_of(data, objective)
        self.cache = cache_folder(data)
        self.images = Images.of(tokenizer, self.cache)

    # ---- on one rank of each host ----

    def write(self) -> Path:
        """Returns the folder of the samples, filled if it does not exist yet."""
        names = short_names(paths_of(self.data))
        sources = [] if self.data.streaming else self.data.train
        train = [self._tokenised(section, "data.train", names) for section in sources]
        validation = [self._tokenised(section, "data.validation", names) for section in self.data.validation or []]
        if not self.data.streaming:  # a stream's rows are not looked at here
            require_effect(self.data, lambda: any("roots" in named for named in (*train, *validation)))
        limits = {"max_length", "max_target_length", "long_rows", "max_dropped_fraction"}
        fields = self.data.model_dump(include={*limits, "validation_fraction", "packing", "targets", "streaming"})
        keys = [[named["folder"].removeprefix(DOCUMENTS) for named in part] for part in (train, validation)]
        folders = [[f"documents-{key}" for key in part] for part in keys]
        weights = [source.weight for source in self.data.train]
        # Here the seed only chooses what is held out. Without that, every seed finds the same samples in the cache.
        seed = self.seed if self.data.validation_fraction is not None else None
        split = [] if seed is None or self.kind.strata is None else [self.kind.strata]
        # A run resumes with files that were moved: their place decides the names of rows, not what is learned.
        # Rewards do not change the rows. Settings that came after version 0.2 count where they are set.
        objective = self.objective.model_dump(exclude={"rewards"})
        objective = GONE | {name: value for name, value in objective.items() if value is not None or name not in LATER}
        if self.objective.own_loss is not None:
            objective["loss"] = None  # the same rows as without it, wherever the file is
        fingerprint = digest("samples", folders, weights, fields, seed, objective, *split)
        content = self._content_of_images([*train, *validation])
        # Images of other sizes have other numbers of tokens.
        key = digest(fingerprint, train, validation, *([] if content is None else [content]))

        def write(folder: Path) -> None:
            facts = {"documents": [train, validation], "fingerprint": f"samples-{fingerprint}", "content": content}
            (folder / "documents.json").write_text(json.dumps(facts), encoding="utf-8")
            self._write_samples(folder, self._rows(train, weighted=True), self._rows(validation, weighted=False))

        with LongAction(Terminal(quiet=ranks.rank() != 0), "making samples of the rows"):
            return kept(self.cache / f"samples-{key}", write)

    def _tokenised(self, section: SourceSection, field: str, names: dict[str, str]) -> Named:
        """Returns the folder of a source's documents, filled if it does not exist yet."""
        source = self._open(section, field)
        # max_length is not part of the key: another length needs no tokenising. Texts to classify are the exception,
        # which the tokenizer itself cuts.
        images = self._images_of(source)
        layout, encoder = self._reads(source, images)
        key = digest(
            "documents",
            COLUMNS_OF_KEYS,
            identify(section, field, source),
            *self._map_source(),
            identity(self.tokenizer),
            [layout.name, layout.columns, layout.label_names],
            *encoder.key(layout),
            *self.kind.key(source),
            *([] if images is None else [images.identity, self.data.image_root]),
        )
        with LongAction(Terminal(quiet=ranks.rank() != 0), f"tokenising {source.name}"):
            folder = kept(
                self.cache / f"{DOCUMENTS}{key}",
                lambda folder: write_documents(source, layout, encoder, self.data.num_proc, folder),
            )
        paths = [names[shard.path] for shard in source.shards]
        named = Named(folder=folder.name, name=names.get(section.path, source.name), paths=paths)
        if images is not None:
            named["roots"] = [str(image_root(shard, self._image_root())) for shard in source.shards]
        # Left out if there is none, so that documents from before sources had names are found again.
        return named if section.name is None else {**named, "told_as": section.name}

    def _open(self, section: SourceSection, field: str, streaming: bool = False) -> Source:
        return open_source(section, field, streaming, map_of(self.data))

    def _map_source(self) -> list[str]:
        mapped = map_of(self.data)
        return [] if mapped is None else [mapped.identity]

    def _reads(self, source: Source, images: Images | None) -> tuple[Layout, Encoder]:
        """Returns the layout and the encoder of a source's rows, whose images `images` reads; None if none is read."""
        blind = why_unread(self.objective, self.images is not None, images is not None)
        layout = replace(self._layout(source), images=images is not None, blind=blind)
        return layout, replace(self._encoder(source, layout), images=images, image_root=self._image_root())

    def _layout(self, source: Source) -> Layout:
        layout = recognise(source, self.data.columns, self.objective.kind)
        return self.kind.agreed(layout, lambda: self._other_layouts)

    @functools.cached_property
    def _other_layouts(self) -> list[Layout]:
        """The layouts of all sources, held-out ones too, or none if there is a single one, which is open already."""
        sections = [("data.train", section) for section in self.data.train]
        sections += [("data.validation", section) for section in self.data.validation or []]
        if len(sections) == 1:
            return []
        opened = (self._open(section, field, streaming=self.data.streaming) for field, section in sections)
        return [recognise(source, self.data.columns, self.objective.kind) for source in opened]

    def _image_root(self) -> Path | None:
        return None if self.data.image_root is None else local_path(self.data.image_root).resolve()

    def _images_of(self, source: Source) -> Images | None:
        """Returns the reader of a source's images, or None if it has none or the model takes none.

        Raises:
            DataError: if the recipe has settings that do not support images.
        """
        if not self.objective.spec.sees_images or self.images is None or not has_images(source):
            return None
        require_built(self.data, source.name)
        require_root(self.data)
        return self.images

    def _content_of_images(self, named: list[Named]) -> str | None:
        """Returns a digest of the images of all rows, or None if no source has any; see `identify_images`."""
        with_images = [source for source in named if "roots" in source]
        return identify_images(self._rows(with_images, False), self.images) if with_images and self.images else None

    def _encoder(self, source: Source, layout: Layout) -> Encoder:
        conversation = layout.has_conversations
        if conversation and not getattr(self.tokenizer, "chat_template", None):
            raise DataError(
                f"{source.field}: {source.name!r} holds conversations ({layout.name}), and the tokenizer has no chat "
                "template; set data.chat_template=chatml, or alpaca if the vocabulary lacks its markers"
            )
        if conversation and self.objective.spec.predicts_next_tokens:
            require_turn_end(self.tokenizer, f"{source.field}: {source.name!r}")
        if layout.form.is_plain and self.data.targets not in (None, "all"):
            raise DataError(
                f"data.targets: {self.data.targets} has no effect on {source.name!r}, which holds plain text; remove it"
            )
        if conversation and self.data.add_bos is not None:
            raise DataError(
                f"data.add_bos has no effect on {source.name!r}, which holds conversations: the chat template says how "
                "they begin; remove it"
            )
        # A reward model reads a conversation as the template writes it, here and wherever it scores.
        stops = layout.may_have_conversations and self.objective.spec.predicts_next_tokens
        return self.kind.encoder(
            self.tokenizer,
            bos_id=bos_of(self.tokenizer, self.data.add_bos),
            next_turn=next_turn_of(self.tokenizer) if stops else None,
            image_tokens=image_tokens_of(self.tokenizer),
        )

    def _rows(self, named: list[Named], weighted: bool) -> Rows:
        weights = [source.weight for source in self.data.train] if weighted and named else [None] * len(named)
        return Rows([read_documents(self.cache, *both) for both in zip(named, weights, strict=True)])

    def _write_samples(self, folder: Path, train: Rows, validation: Rows) -> None:
        # A stream has no training rows here; then the held-out rows decide.
        policy = self._long_rows(LAYOUTS[source.layout] for source in (train if train.sources else validation).sources)
        names = class_names(self.kind, train)
        kept_rows = select(self.kind, train, "data.train", policy, names) if train.sources else None
        held_out = None
        # After the selection, so that rows that cannot be used are never held out.
        if self.data.validation_fraction is not None and kept_rows is not None:
            classes = None if self.kind.strata is None else train.values(self.kind.strata)
            kept_rows, held_out = hold_out(kept_rows, self.data.validation_fraction, self.seed, classes)
        elif validation.sources:
            held_out = select(self.kind, validation, "data.validation", policy, names)
        if kept_rows is not None:  # without those that are held out
            self.kind.require(kept_rows.rows, kept_rows.kept)
        splits: dict[str, SplitReport] = {}
        if kept_rows is not None:
            splits["train"] = self._write_split(folder / "train.npz", kept_rows, one_pass(kept_rows), policy, names)
        if held_out is not None:
            # In plain order: weights mix what is trained on, and each held-out row is evaluated once.
            splits["validation"] = self._write_split(
                folder / "validation.npz", held_out, held_out.kept, policy, names, kept_rows
            )
        report = self._report(policy, splits, kept_rows, held_out)
        facts = {"report": report.to_dict(), "label_names": names}
        (folder / "report.json").write_text(json.dumps(facts), encoding="utf-8")

    def _long_rows(self, layouts: Iterable[ColumnLayout]) -> str:
        return self.data.long_rows or ("split" if all(form.is_plain for form in layouts) else "error")

    def _report(
        self, policy: str, splits: dict[str, SplitReport], train: Selection | None, held_out: Selection | None
    ) -> DataReport:
        own = "the tokenizer's own" if getattr(self.tokenizer, "chat_template", None) else None
        warnings = reports.warnings(splits)
        # A classifier writes nothing, nor does a reward model, so they need no token to stop at.
        # A target ends with one in any case.
        if train is not None and self.objective.spec.predicts_next_tokens and self.kind.learns_tokens:
            warnings += reports.unclosed(self.tokenizer, train.rows, train.kept, self.kind.targets != "all")
        examples = [
            example
            for name, chosen in (("train", train), ("validation", held_out))
            if chosen is not None
            for example in reports.examples(self.kind, self.tokenizer, chosen.rows, chosen.kept, name, self.images)
        ]
        return DataReport(
            max_length=self.data.max_length,
            packing=self.kind.packed,
            long_rows=policy,
            targets=self.kind.chosen_targets,
            chat_template=source_name(self.data.chat_template) if self.data.chat_template is not None else own,
            streaming=self.data.streaming,
            warnings=warnings,
            **splits,
            **({"examples": examples} if examples else {}),
        )

    def _write_split(
        self,
        file: Path,
        chosen: Selection,
        order: Any,
        policy: str,
        names: list[str] | None,
        train: Selection | None = None,
    ) -> SplitReport:
        """Writes which rows make up a split's samples, and returns the split's part of the report.

        Args:
            order: the rows of one pass.
            train: for a held-out split, the rows that are trained on.
        """
        rows = chosen.rows
        arrays, samples = self.kind.arrays(rows, order, policy, names)
        np.savez(file, **arrays)
        counts = RowCounts()
        counts.add(chosen)
        described = counts.described(samples.pop("cut_tokens", 0))
        if train is not None:
            samples["also_in_train"] = reports.repeated_in(rows, chosen.kept, train.rows, train.kept)
        if not self.kind.learns_tokens:
            described = {key: value for key, value in described.items() if not key.startswith("target")}
        return SplitReport(
            **described,
            duplicates=reports.named(rows, reports.duplicates(rows, chosen.kept)),
            sources=reports.describe_sources(rows, chosen.kept, chosen.dropped, order),
            **samples,
        )

    # ---- on every rank ----

    def first_window(self, held_out: frozenset[int]) -> tuple[Stream, Window]:
        """Returns the stream of the training rows, and its first window.

        Args:
            held_out: digests of the rows that are evaluated.

        Raises:
            DataError: as `Stream.windows` does.
        """
        names = short_names(paths_of(self.data))
        opened = [
            replace(self._open(section, "data.train", streaming=True), paths=names) for section in self.data.train
        ]
        seen = [self._images_of(source) for source in opened]
        held_out_sources = (self._open(section, "data.validation") for section in self.data.validation or [])
        require_effect(self.data, lambda: any(seen) or any(map(self._images_of, held_out_sources)))
        # A copy of each image in the cache could fill the disk: a window has its images in memory.
        images = replace(self.images, held={}) if self.images is not None and any(seen) else None
        sources = [
            StreamedSource(source, work_of(*self._reads(source, images if shown else None)))
            for source, shown in zip(opened, seen, strict=True)
        ]
        stream = Stream(
            self.kind,
            sources,
            self._long_rows(of.work.layout.form for of in sources),
            pad_id(self.tokenizer),
            self.seed if self.data.shuffle else None,
            held_out,
            images,
        )
        # Read now, so that data that cannot be used ends the run before its first step.
        return stream, next(stream.windows())

    def glimpse(self, images: Images | None) -> list[Any]:
        """Returns what identifies the streamed sources, and the reader of their images, without reading the rows."""
        fields = {"targets", "long_rows", "packing", "max_length", "shuffle", "add_bos"}
        return [
            [glimpse(section, "data.train") for section in self.data.train],
            identity(self.tokenizer),
            {"columns": self.data.columns_key(), **self.data.model_dump(include=fields)},
            self.seed,
            *([] if (day := date_of(self.tokenizer)) is None else [str(day)]),
            *self._map_source(),
            *([] if images is None else [images.identity, self.data.image_root]),
        ]

    def read(self, folder: Path) -> TokenisedData:
        """Reads what `write` left in the cache."""
        kept_as = json.loads((folder / "documents.json").read_text(encoding="utf-8"))
        facts = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        # Weights are not needed here: the order of a pass is in the files.
        train, validation = (self._rows(part, weighted=False) for part in kept_as["documents"])
        # What validation_fraction holds out are rows of the training sources.
        held_out_rows = validation if validation.sources else train
        return TokenisedData(
            train=self._samples(folder / "train.npz", train),  # type: ignore[arg-type]  # a stream has its own
            validation=self._samples(folder / "validation.npz", held_out_rows),
            report=DataReport.model_validate(facts["report"]),
            fingerprint=kept_as["fingerprint"],
            content=kept_as.get("content"),
            label_names=list(self.objective.spec.head_names) or facts["label_names"],
        )

    def _samples(self, file: Path, rows: Rows) -> Samples | None:
        if not file.exists():
            return None
        return self.kind.samples(rows, np.load(file, allow_pickle=False), pad_id(self.tokenizer), self.images)
