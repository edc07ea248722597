"""Names of earlier versions: keys of recipes, commands and options that are gone, and what to do instead."""

from __future__ import annotations

from typing import Any, NamedTuple


class Gone(NamedTuple):
    """What to do instead of a name, in words that end a sentence.

    `idle` has the values of a key that asked for nothing, as each run wrote them into its recipe.
    """

    instead: str
    since: str = "0.3.0"
    idle: tuple[Any, ...] = (None,)


GONE_KEYS = {
    "sharding.device_state_gib=auto": Gone("give the GiB that may stay on each device"),
    "sharding.offload_threads": Gone("leave it out: the host's update takes all but two of a rank's cores", "0.2.0"),
}
"""Key, or `key=value` for a value that is gone. Keys of the items of a list stand without a number."""

GONE_COMMANDS = {
    "compare": Gone("look at runs side by side in a tracker (logging.trackers; docs/trackers.md shows two)"),
    "reproduce": Gone("train the export's recipe.yaml; docs/reliability.md says how to compare the weights"),
}

_NO_SECONDS = "leave it out: a plan has bytes and no seconds"

GONE_OPTIONS = {
    "init --from": Gone("docs/coming_from says what each key of another tool is called here"),
    "plan --calibrate": Gone(_NO_SECONDS),
    "plan --dram-gbs": Gone(_NO_SECONDS),
    "plan --link-gbs": Gone(_NO_SECONDS),
    "plan --longest-row": Gone("plan several values of data.max_length"),
    "plan --nic-gbs": Gone(_NO_SECONDS),
    "plan --pcie-gbs": Gone(_NO_SECONDS),
    "plan --plot": Gone("--json has the bytes of each row"),
    "plan --trace": Gone("leave it out: tests compare plans with traces of FSDP2"),
}
"""`command --option`."""


def gone_sentence(kind: dict[str, Gone], name: str) -> str | None:
    """Returns since when a name is gone and what to do instead; None for a name that has never been."""
    row = kind.get(name)
    return None if row is None else f"gone since {row.since}; {row.instead}"


def drop_idle(values: dict[str, Any]) -> None:
    """Removes keys that are gone and ask for nothing, so that the recipe of an earlier run still starts it."""
    for name, row in GONE_KEYS.items():
        *parents, key = name.split(".")
        node: Any = values
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if isinstance(node, dict) and key in node and node[key] in row.idle:
            del node[key]
