"""Decides which modules FSDP2 gathers together: `plan_units(model) -> UnitPlan`, from the model alone.

Pure: it needs no process group, no device and no transformers, and the model may be on the meta device.
There are five kinds of unit, and each unit is one `fully_shard` call:

- block: a repeated transformer block, found by `_no_split_modules`, by the base class
  `GradientCheckpointingLayer`, or as elements of one class that fill a sizable part of the model.
  Only the outermost modules count, and never a list of experts: an expert runs on some ranks and not
  on others, and as a separate unit it would hang the collectives.
- experts: the stacked experts of a block, with expert parallelism (expert_parallel.py).
- embeddings: the input embeddings, if they share nothing with the head.
- tail: the head and the final norm. If the embeddings are tied, the embeddings, the final norm and the head.
- root: the model itself with everything else. Without a head that `get_output_embeddings` knows
  (encoders, classifiers), the final norm and the classifier are small and stay here.

FSDP2 holds a parameter in one unit only (torch 2.13 refuses others in
`_validate_no_duplicate_params`), so modules that share parameters belong to one unit. The first rule that
applies decides:

- If one of them contains a block, or lies inside a unit but is also reached from outside it, all of
  them go to the root. Only there does FSDP2 manage such a module once.
- If one of them is a block, the others join its unit. Blocks that share parameters (Zamba2) are one unit.
- If one of them is the head or the input embeddings, the others join that unit. An owner that contains
  another (BERT's `cls.predictions` owns the bias of `cls.predictions.decoder`) stands for both.
- Otherwise they go to the root.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from toolkit.errors import UnitError, did_you_mean
from toolkit.sharding.plan.unit_plan import Unit, UnitKind, UnitPlan

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
BLOCK_BASE = "GradientCheckpointingLayer"  # compared by name: transformers is not imported here
MIN_SHARE = 0.2  # of the parameters outside the vocabulary; a smaller list may stay in the root
MIN_SHARE_OF_LARGE = 0.02  # the same for elements of `LARGE` parameters on average: towers, not heads and vocoders
LARGE = 1_000_000


def plan_units(model: nn.Module, unit_classes: Sequence[str] | None = None, experts: bool = False) -> UnitPlan:
    """Plans the FSDP units of a model.

    Args:
        model: any module. Its weights may be on the meta device, and it may have adapters.
        unit_classes: class names. The outermost modules of these classes become the blocks. None finds the blocks.
        experts: whether the stacked experts of a block form a separate unit, planned before the block.

    Raises:
        UnitError: if no block is found, a name matches nothing, or no block can be a unit.
    """
    tree = _Tree(model)
    blocks = _found_blocks(tree) if unit_classes is None else _named_blocks(tree, unit_classes)
    drafts = _draft_units(tree, blocks)
    if not any(draft.kind == "block" for draft in drafts):
        raise UnitError(
            f"{tree.class_of('')}: every block ({blocks[0]}, {len(blocks)} in all) shares parameters with a module "
            "around it, so none can be a unit; untie them, or name other classes in sharding.unit_classes of the recipe"
        )
    stacks = [_Draft(path, "experts", (path,)) for path in stacked_experts(model)] if experts else []
    return UnitPlan(tuple(_count_parameters(tree, [*stacks, *drafts])))


def stacked_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules, by path, that transformers marks as having parameters with a row for each expert.

    If peft has wrapped such a module, returns the outermost wrapper.
    """
    marked = (path for path, module in model.named_modules() if hasattr(module, "_is_expert_parallel"))
    return {path: model.get_submodule(path) for path in (path.partition(".base_layer")[0] for path in marked)}


# The model as a tree of paths


class _Tree:
    """The modules of a model, each identified by its first path in `named_modules` order."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self.path_of = {id(module): path for path, module in self.modules.items()}
        self._order = {path: position for position, path in enumerate(self.modules)}
        self._inside: dict[str, frozenset[str]] = {}

    def class_of(self, path: str) -> str:
        """Returns the name of a module's class."""
        return type(self.modules[path]).__name__

    def inside(self, path: str) -> frozenset[str]:
        """Returns the paths of the module and all below it. Compares objects, since a module may have several paths."""
        if path not in self._inside:
            self._inside[path] = frozenset(self.path_of[id(module)] for module in self.modules[path].modules())
        return self._inside[path]

    def below(self, paths: Iterable[str]) -> set[str]:
        """Returns the paths of all modules that lie inside these modules."""
        return {inner for path in paths for inner in self.inside(path) if inner != path}

    def in_order(self, paths: Iterable[str]) -> list[str]:
        """Returns the paths in `named_modules` order, each once."""
        return sorted(set(paths), key=self._order.__getitem__)

    def outermost(self, paths: Iterable[str]) -> list[str]:
        """Returns the paths that lie inside no other of them, in order."""
        candidates = self.in_order(paths)
        below = self.below(candidates)
        return [path for path in candidates if path not in below]

    def parameters(self, paths: Iterable[str]) -> list[nn.Parameter]:
        """Returns the parameters of the modules and of all below them, each once."""
        found = {id(p): p for path in paths for p in self.modules[path].parameters()}
        return list(found.values())

    def num_parameters(self, paths: Iterable[str]) -> int:
        """Returns the number of elements of these parameters."""
        return sum(p.numel() for p in self.parameters(paths))

    def lists(self) -> Iterator[tuple[str, list[str]]]:
        """Yields the path of each list, outer ones first, with the paths of its elements. Repeated elements repeat."""
        for path, module in self.modules.items():
            if isinstance(module, LISTS):
                yield path, [self.path_of[id(child)] for child in module._modules.values() if child is not None]


# Which modules are blocks


def _found_blocks(tree: _Tree) -> list[str]:
    blocks = _marked_blocks(tree)
    blocks += _blocks_by_share(tree, _repeated_elements(tree), blocks)
    # The last resort: ALBERT holds one layer, applies it many times, and marks it in no way.
    blocks = blocks or _blocks_by_share(tree, _lone_elements(tree), blocks)
    if not blocks:
        raise UnitError(_no_block_message(tree))
    return tree.outermost(blocks)


def _marked_blocks(tree: _Tree) -> list[str]:
    """Returns marked elements of lists. `_no_split_modules` also names embeddings, which are in no list."""
    marks = {name for module in tree.modules.values() for name in getattr(module, "_no_split_modules", None) or ()}
    elements = [path for _, paths in tree.lists() for path in paths]
    return [path for path in elements if _is_marked(tree.modules[path], marks | {BLOCK_BASE})]


def _is_marked(module: nn.Module, marks: set[str]) -> bool:
    return any(cls.__name__ in marks for cls in type(module).__mro__)


def _repeated_elements(tree: _Tree) -> Iterator[list[str]]:
    """Yields the elements of one list that share a class, if there are two or more. Skips lists of experts."""
    for _, paths in (listed for listed in tree.lists() if "expert" not in listed[0].lower()):
        by_class: dict[str, list[str]] = {}
        for path in paths:
            by_class.setdefault(tree.class_of(path), []).append(path)
        yield from (alike for alike in by_class.values() if len(alike) > 1)


def _lone_elements(tree: _Tree) -> Iterator[list[str]]:
    """Returns the only elements of ModuleLists. Sequential and ModuleDict do not count: they also wrap models."""
    return (paths for path, paths in tree.lists() if len(paths) == 1 and isinstance(tree.modules[path], nn.ModuleList))


def _blocks_by_share(tree: _Tree, groups: Iterable[list[str]], taken: Sequence[str]) -> list[str]:
    """Selects groups of composite modules that do not overlap those taken and fill a sizable share of the model."""
    covered = {*taken, *tree.below(taken)}
    counted = _num_parameters_outside_vocabulary(tree)
    blocks: list[str] = []
    for group in groups:
        fresh = [path for path in tree.in_order(group) if _is_composite(tree, path) and not tree.inside(path) & covered]
        size = tree.num_parameters(fresh)
        share = MIN_SHARE_OF_LARGE if size >= LARGE * len(fresh) else MIN_SHARE
        if size >= max(1.0, share * counted):
            blocks += fresh
            covered |= {*fresh, *tree.below(fresh)}
    return blocks


def _is_composite(tree: _Tree, path: str) -> bool:
    """Returns whether a module has children and a forward. A bare Linear has no children, a ModuleList no forward."""
    return any(True for _ in tree.modules[path].children()) and _has_forward(tree, path)


def _has_forward(tree: _Tree, path: str) -> bool:
    return type(tree.modules[path]).forward is not nn.Module.forward


def _num_parameters_outside_vocabulary(tree: _Tree) -> int:
    """Counts elements except those of vocabulary-sized parameters, which are nearly everything in small models."""
    sizes = [module.num_embeddings for module in tree.modules.values() if isinstance(module, nn.Embedding)]
    vocabulary = max(sizes, default=-1)
    return sum(p.numel() for p in tree.parameters([""]) if p.ndim == 0 or p.shape[0] != vocabulary)


def _named_blocks(tree: _Tree, unit_classes: Sequence[str]) -> list[str]:
    names = [unit_classes] if isinstance(unit_classes, str) else list(unit_classes)
    candidates = _candidates(tree)
    counts = _class_counts(tree, candidates)
    unknown = [name for name in names if name not in counts]
    if unknown or not names:
        raise UnitError(_unmatched_message(tree, unknown, counts))
    return tree.outermost(path for path in candidates if tree.class_of(path) in names)


def _candidates(tree: _Tree) -> list[str]:
    """Returns the modules that may be named as blocks: those below the root with a forward and parameters."""
    return [path for path in tree.modules if path and _has_forward(tree, path) and tree.num_parameters([path])]


def _class_counts(tree: _Tree, paths: Iterable[str]) -> Counter[str]:
    return Counter(tree.class_of(path) for path in paths)


# Which modules form a unit


@dataclass(frozen=True)
class _Draft:
    """A unit before its parameters are counted."""

    name: str
    kind: UnitKind
    modules: tuple[str, ...]


@dataclass(frozen=True)
class _Roles:
    """The paths of the input embeddings, the head and the final norm, or None for those that are missing."""

    embeddings: str | None
    head: str | None
    norm: str | None

    def paths(self) -> set[str]:
        """Returns the paths of those that exist."""
        return {path for path in (self.embeddings, self.head, self.norm) if path is not None}


def _draft_units(tree: _Tree, blocks: list[str]) -> list[_Draft]:
    roles = _find_roles(tree, blocks)
    components = _settled_components(tree, tree.outermost({*blocks, *roles.paths()}), blocks)
    is_norm_free = roles.norm is not None and {roles.norm} in components
    drafts = [_block_draft(tree, c, blocks) for c in components if c & set(blocks)]
    drafts = sorted(drafts, key=lambda draft: blocks.index(draft.name))
    others = [c for c in components if not c & set(blocks)]
    tail = [_tail_draft(tree, c, roles, is_norm_free) for c in others if _contains_role(tree, c, roles.head)]
    embeddings = [
        _Draft("embeddings", "embeddings", tuple(_role_first(tree, c, roles.embeddings)))
        for c in others
        if _contains_role(tree, c, roles.embeddings) and not _contains_role(tree, c, roles.head)
    ]
    # The root last: `fully_shard` gives a module what no call before has taken.
    return [*embeddings, *drafts, *tail, _Draft("root", "root", ("",))]


def _block_draft(tree: _Tree, component: set[str], blocks: list[str]) -> _Draft:
    own = [path for path in blocks if path in component]
    return _Draft(own[0], "block", (*own, *tree.in_order(component - set(own))))


def _tail_draft(tree: _Tree, component: set[str], roles: _Roles, is_norm_free: bool) -> _Draft:
    """Returns the tail. Untied, the head comes first, so that the norm's parameter is the unit's last.

    The reduction keeps the gradient of the last parameter alive while it allocates its output (`foreach_reduce`). At
    8B width that saves half a GiB.
    """
    norm = [roles.norm] if is_norm_free and roles.norm is not None else []
    rest = _role_first(tree, component, roles.embeddings)
    head = [path for path in rest if roles.head in tree.inside(path)]
    rest = [path for path in rest if path not in head]
    is_tied = _contains_role(tree, set(rest), roles.embeddings)
    return _Draft("tail", "tail", (*rest, *norm, *head) if is_tied else (*head, *rest, *norm))


def _contains_role(tree: _Tree, paths: set[str], role: str | None) -> bool:
    return any(role in tree.inside(path) for path in paths)


def _role_first(tree: _Tree, paths: set[str], role: str | None) -> list[str]:
    """Returns the paths in order, but first the one that contains the module of the role."""
    return sorted(tree.in_order(paths), key=lambda path: role not in tree.inside(path))


# The modules around the blocks


def _find_roles(tree: _Tree, blocks: list[str]) -> _Roles:
    embeddings = _accessor_path(tree, "get_input_embeddings", blocks)
    head = _accessor_path(tree, "get_output_embeddings", blocks)
    return _Roles(embeddings, head, _final_norm(tree, blocks, embeddings) if head is not None else None)


def _accessor_path(tree: _Tree, accessor: str, blocks: list[str]) -> str | None:
    """Returns the path of the module that a transformers accessor returns, or None if blocks lie inside it."""
    try:
        module = getattr(tree.model, accessor)()
    except (AttributeError, NotImplementedError):
        return None
    path = tree.path_of.get(id(module))
    return None if path is None or tree.inside(path) & set(blocks) else path


def _final_norm(tree: _Tree, blocks: list[str], embeddings: str | None) -> str | None:
    """Finds the first norm after the last list of blocks in the same module, or else the last one before it (OPT).

    Not the last norm after it: in Gemma 3n and 4 that one belongs to the per-layer embeddings. Norms named after the
    embeddings (BART) stay in the root: in the tail, their forward at the start would gather the head.
    """
    holders = {_list_owner(tree, block): block for block in blocks}
    beside_embeddings = (embeddings or "").rpartition(".")[0]
    # Kosmos-2 defines its vision tower last: what is next to the embeddings is the language model.
    holder = beside_embeddings if embeddings and beside_embeddings in holders else list(holders)[-1]
    children = {tree.path_of[id(child)]: name for name, child in tree.modules[holder].named_children()}
    position = [holders[holder] in tree.inside(path) for path in children].index(True)
    norms = [(place, path) for place, (path, name) in enumerate(children.items()) if _is_norm(tree, path, name)]
    after = [path for place, path in norms if place > position]
    before = [path for place, path in norms if place < position]
    return next(iter([*after, *reversed(before)]), None)


def _list_owner(tree: _Tree, block: str) -> str:
    """Returns the path of the module that contains the list of the block."""
    path = block.rpartition(".")[0]
    while path and isinstance(tree.modules[path], LISTS):
        path = path.rpartition(".")[0]
    return path


def _is_norm(tree: _Tree, path: str, name: str) -> bool:
    is_norm = "norm" in tree.class_of(path).lower() or name.startswith("ln_")
    return is_norm and "emb" not in name and tree.num_parameters([path]) > 0


# Shared parameters


def _settled_components(tree: _Tree, atoms: list[str], blocks: list[str]) -> list[set[str]]:
    """Returns the sets of modules that must be in one unit. No module lies inside another.

    An owner that joins a unit brings everything below it, which may be shared too. So this repeats until nothing
    changes.
    """
    while True:
        components = [c for c in _components(tree, atoms, blocks) if c & set(atoms)]
        settled = tree.outermost(path for component in components for path in component)
        if settled == atoms:
            return components
        atoms = settled


def _components(tree: _Tree, atoms: list[str], blocks: list[str]) -> list[set[str]]:
    """Returns the connected components of "shares a parameter with", except those that only the root can hold."""
    owners: dict[int, set[str]] = {}
    for parameter, owner in _owners_of(tree, tree.model, set(atoms)):
        owners.setdefault(parameter, set()).add(owner)
    links = [{atom} for atom in atoms] + [owner for owner in owners.values() if len(owner) > 1]
    loose = {path for link in links for path in link} - set(atoms)
    for_root = {path for path in loose if tree.inside(path) & set(blocks)} | (loose & tree.below(atoms))
    return [component for component in _merge_overlapping(links) if not component & for_root]


def _owners_of(tree: _Tree, module: nn.Module, atoms: set[str], atom: str | None = None) -> Iterator[tuple[int, str]]:
    """Yields every path to a parameter, aliases included: its id, and the atom on that path or else its owner."""
    path = tree.path_of[id(module)]
    atom = path if atom is None and path in atoms else atom
    for parameter in module.parameters(recurse=False):
        yield id(parameter), path if atom is None else atom
    for child in module.children():
        yield from _owners_of(tree, child, atoms, atom)


def _merge_overlapping(links: Iterable[set[str]]) -> list[set[str]]:
    """Merges sets that have members in common."""
    components: list[set[str]] = []
    for link in links:
        touching = [component for component in components if component & link]
        components = [component for component in components if not component & link]
        components.append(link.union(*touching))
    return components


# Numbers and text


def owned_parameters(model: nn.Module, units: Iterable[Sequence[str]]) -> Iterator[list[nn.Parameter]]:
    """Yields the parameters of each unit that no earlier unit owns, each once, in FSDP2's order.

    Args:
        units: the dotted paths of each unit's modules, in the order of a plan.
    """
    seen: set[int] = set()
    for paths in units:
        found = {id(p): p for path in paths for p in model.get_submodule(path).parameters() if id(p) not in seen}
        seen.update(found)
        yield list(found.values())


def _count_parameters(tree: _Tree, drafts: Sequence[_Draft]) -> Iterator[Unit]:
    owned = owned_parameters(tree.model, (draft.modules for draft in drafts))
    for draft, own in zip(drafts, owned, strict=True):
        yield Unit(
            name=draft.name,
            kind=draft.kind,
            modules=draft.modules,
            class_name="+".join(dict.fromkeys(tree.class_of(path) for path in draft.modules)),
            num_parameters=sum(p.numel() for p in own),
            num_bytes=sum(p.numel() * p.element_size() for p in own),
            # Backward begins with the tail: to keep it and the root saves a gather per micro-batch.
            reshard_after_forward=draft.kind in ("block", "experts", "embeddings"),
        )


def _no_block_message(tree: _Tree) -> str:
    contents = [(path or "the model", _in_words(_class_counts(tree, paths))) for path, paths in tree.lists() if paths]
    lists = [f"  {path}: {content}" for path, content in contents]
    return "\n".join(
        [
            f"no transformer block found in {tree.class_of('')} ({tree.num_parameters(['']):,} parameters)",
            *(["its module lists:", *lists] if lists else ["it has no module lists"]),
            f"its module classes: {_in_words(_class_counts(tree, _candidates(tree))) or 'none with parameters'}",
            "name the class of the blocks in the recipe key sharding.unit_classes",
        ]
    )


def _unmatched_message(tree: _Tree, unknown: list[str], counts: Counter[str]) -> str:
    problems = [f"{name!r} matches no module of {tree.class_of('')}{did_you_mean(name, counts)}" for name in unknown]
    return "\n".join(
        [
            "sharding.unit_classes: " + ("; ".join(problems) or "the list is empty"),
            f"module classes that it may name: {_in_words(counts)}",
            "correct sharding.unit_classes, or remove it; then the blocks are found",
        ]
    )


def _in_words(counts: Counter[str]) -> str:
    return ", ".join(f"{name} x {count}" for name, count in counts.items())
