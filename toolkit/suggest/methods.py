"""The methods of `toolkit init`, which the objectives define; docs/starting_values.md cites their values."""

from __future__ import annotations

from toolkit.data.kinds.recognise import recognise
from toolkit.data.kinds.registry import kind_for
from toolkit.data.layouts.layout import Layout
from toolkit.data.rows.sources import Source
from toolkit.errors import BadInputError, DataError, did_you_mean
from toolkit.recipe.objectives.method import Method
from toolkit.recipe.objectives.registry import SPECS
from toolkit.recipe.schema import ColumnsSection

TOKENS_PER_STEP = 2**17
"""Tokens of an optimizer step on plain text, whose rows are of any length: 128 samples of 1024, as alignment-handbook
trains GPT-2 in another language."""

# Objectives that write answers or text first, and encoder-decoders last, in the order of messages.
_SPECS = sorted(SPECS.values(), key=lambda spec: (spec.padded, spec.encoder_decoder))

METHODS = {method.name: method for spec in _SPECS for method in spec.methods}

SPEC_OF = {method.name: spec for spec in _SPECS for method in spec.methods}
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
