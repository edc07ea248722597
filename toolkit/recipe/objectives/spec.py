"""The description of an objective, and the questions that other rooms ask it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ObjectiveSpec:
    """An objective before there is a model. Its losses are in `toolkit.objectives`, and `build_objective` makes them.

    Attributes:
        kind: `objective.kind` of a recipe.
        about: what it minimises, in the words of the recipe's documentation.
        rows: the kind of rows that it learns from, a name in `toolkit.data.kinds.registry`.
        pipeline_task: the hub's name of its models' task, for the model card.
        settings: fields of `ObjectiveSection` that have an effect.
        losses: what `objective.loss` may be, each with the settings that have an effect on it alone; the first is the
            default. Empty: a user's function, if `loss` is a setting.
        required: settings that must be given, and what.
        auto_class: transformers' class of the model. If it is None, the configuration decides which class writes text.
        peft_task: peft's name of an adapted model's task.
        head_names: fixed names of the outputs of a new head; empty: the data's classes, or no new head.
        trained_turns: the turns of a conversation that are learned, or None if `data.targets` decides.
        has_classes: whether it predicts classes, of texts or of words.
        learns_numbers: whether a row's label may be a number to learn.
        writes_text: whether its models generate text.
        encoder_decoder: whether a sample is a source and a target, read by an encoder and written by a decoder.
        padded: whether rows are always padded, one to a sample, with the tokenizer's own special tokens.
        may_pad: whether rows may be padded instead of packed if nobody asked for either.
        has_teacher: whether a second, frozen model is loaded.
        sees_images: whether rows may have images, for models that take them.
        tells_sources: whether its losses are also reported by named sources of rows.
        has_margins: whether it uses by how much the chosen completion of a pair is better.
        samples_itself: whether it learns from completions that the model in training samples.
    """

    kind: str
    about: str
    rows: str
    pipeline_task: str = "text-generation"
    settings: tuple[str, ...] = ()
    losses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    required: Mapping[str, str] = field(default_factory=dict)
    auto_class: str | None = None
    peft_task: str = "CAUSAL_LM"
    head_names: tuple[str, ...] = ()
    trained_turns: Literal["last_turn"] | None = None
    has_classes: bool = False
    learns_numbers: bool = False
    writes_text: bool = True
    encoder_decoder: bool = False
    padded: bool = False
    may_pad: bool = False
    has_teacher: bool = False
    sees_images: bool = False
    tells_sources: bool = False
    has_margins: bool = False
    samples_itself: bool = False

    @property
    def predicts_next_tokens(self) -> bool:
        """Whether the model is a decoder that writes text, so that no token may see later ones."""
        return self.writes_text and not self.encoder_decoder

    @property
    def compares_completions(self) -> bool:
        """Whether completions are compared with others, so that their last turns are what is learned."""
        return self.trained_turns is not None

    @property
    def compares_answers(self) -> bool:
        """Whether these completions are answers of a model that writes; a reward model reads what is written."""
        return self.compares_completions and self.predicts_next_tokens
