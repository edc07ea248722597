"""The methods of `toolkit init` (methods.yaml); docs/starting_values.md cites their values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import yaml
from pydantic import TypeAdapter

from toolkit.data.kinds.recognise import recognise
from toolkit.data.kinds.registry import kind_for
from toolkit.data.layouts.layout import Layout
from toolkit.data.rows.sources import Source
from toolkit.errors import BadInputError, DataError, did_you_mean
from toolkit.recipe.objectives.registry import SPECS
from toolkit.recipe.schema import ColumnsSection

TOKENS_PER_STEP = 2**17
"""Tokens of an optimizer step on plain text, whose rows are of any length: 128 samples of 1024, as alignment-handbook
trains GPT-2 in another language."""


class Rate(NamedTuple):
    """A peak learning rate for models of at most so many parameters, and the published recipe that it comes from."""

    up_to: float
    value: float
    source: str


@dataclass(frozen=True)
class Method:
    """A way to train: what is trained, on which rows, and at which rates; methods.yaml says what each value is."""

    name: str
    objective: str
    about: str
    rates: tuple[Rate, ...]
    rows_per_step: int
    epochs: int
    loss: str | None = None
    adapter: bool = False
    quantized: bool = False
    smaller: str | None = None
    by_rows: int | None = None
    for_encoder_decoders: bool = False
    layouts: tuple[str, ...] = ()

    def takes(self, layout: str) -> bool:
        """Returns whether it learns from this layout of its objective's rows."""
        return not self.layouts or layout in self.layouts

    def rate(self, num_parameters: int) -> Rate:
        """Returns the learning rate for a model of this size."""
        return next(rate for rate in self.rates if num_parameters <= rate.up_to)


METHODS = {
    name: TypeAdapter(Method).validate_python({"name": name, **values})
    for name, values in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
}

SPEC_OF = {name: SPECS[method.objective] for name, method in METHODS.items()}
"""Method -> its objective."""

BY_LAYOUT = tuple(
    name for _, name in sorted((method.by_rows, name) for name, method in METHODS.items() if method.by_rows is not None)
)
"""The methods among which the layout of the rows decides if none is named, in order."""

OF_ENCODER_DECODERS = tuple(name for name, method in METHODS.items() if method.for_encoder_decoders)
"""The same for a model with an encoder and a decoder."""


def method_of(
    name: str | None, source: Source, columns: ColumnsSection, encoder_decoder: bool = False
) -> tuple[Method, Layout]:
    """Returns the method of that name, or one that fits the rows and the kind of model, and the layout of the rows.

    Raises:
        BadInputError: if the name or the layout is unknown, or the method does not learn from the layout.
    """
    if name is not None and name not in METHODS:
        raise BadInputError(
            f"--method: unknown {name!r}{did_you_mean(name, METHODS)}; allowed: {', '.join(sorted(METHODS))}"
        )
    # `lora` and `qlora` take pairs too: their siblings do.
    pairs = {"lora": ("lora-dpo", "lora"), "qlora": ("qlora-dpo", "qlora")}
    by_layout = OF_ENCODER_DECODERS if encoder_decoder else BY_LAYOUT
    names = by_layout if name is None else pairs.get(name, (name,))
    candidates = [METHODS[candidate] for candidate in names]
    objectives = dict.fromkeys(SPEC_OF[candidate].kind for candidate in names)
    try:
        layout = recognise(source, columns, *objectives)
    except DataError:
        if name is None:
            raise
        # The rows may be for another method: layouts of the named one are still tried first.
        layout = recognise(source, columns, *objectives, *SPECS)
    for method in candidates:
        if _learns_from(method, layout):
            return method, layout
    others = [other.name for other in METHODS.values() if _learns_from(other, layout)]
    raise BadInputError(
        f"--method {name} does not learn from rows with {' + '.join(layout.form.needed)}; "
        f"allowed for these: {', '.join(others)}"
    )


def _learns_from(method: Method, layout: Layout) -> bool:
    return layout.form in kind_for(SPEC_OF[method.name].kind).layouts and method.takes(layout.name)
