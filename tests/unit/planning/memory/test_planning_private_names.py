"""The private names of torch that planning leans on are still there, and stand where they are looked for.

When one of these fails after an upgrade, the named file is what to mend.
"""

from __future__ import annotations

import inspect
import re
import weakref
from pathlib import Path

import torch

MEND = "see toolkit/model/structure/fake_tensors.py and toolkit/planning/memory/fake.py"

PRIVATE = re.compile(r"\b(?:torch|accelerate|transformers)\.(?:\w+\.)*_[a-z]\w*")


def test_private_modules_are_named_in_few_files() -> None:
    package = Path(__file__).parents[4] / "toolkit"
    naming = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(PRIVATE.search(line) for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
    }
    assert naming == {
        "__init__.py",  # the name of a logger
        "cli/shared/console.py",  # the name of its logger
        "model/attention/attention.py",  # the name of a kernel, and does without
        "model/structure/fake_tensors.py",
        "planning/memory/fake.py",
        "run/stages/opening.py",  # whether CUDA is unusable after a fork
        "sharding/fsdp2/fsdp.py",
        "sharding/fsdp2/fsdp_replaced.py",
        "sharding/fsdp2/gloo.py",
        "sharding/fsdp2/shards.py",
        "sharding/blocks/compiling.py",
    }


def test_fake_tensors_without_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    assert "allow_non_fake_inputs" in inspect.signature(FakeTensorMode.__init__).parameters, MEND
    with FakeTensorMode():
        tensor = torch.empty(2**40)
    assert isinstance(tensor, FakeTensor), MEND
    assert tensor.untyped_storage().nbytes() == 2**42, MEND


def test_storages_have_an_identity_and_can_be_watched() -> None:
    tensor = torch.ones(3)
    storage = tensor.untyped_storage()
    assert storage._cdata == tensor[1:].untyped_storage()._cdata, MEND
    died = []
    watch = weakref.ref(storage, lambda _: died.append(True))
    del storage
    assert not died, f"a storage's Python object must live as long as the storage; {MEND}"
    del tensor
    assert died, MEND
    assert watch() is None
    assert callable(torch.UntypedStorage.resize_), MEND


def test_fsdp2_frees_by_resizing_storages() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    assert "resize_(" in inspect.getsource(_fsdp_param), MEND


def test_a_dtensor_has_its_local_tensor() -> None:
    from torch.distributed.tensor import DTensor

    assert "_local_tensor" in DTensor.__slots__, MEND


def test_what_dropout_and_host_copies_replace() -> None:
    parameters = list(inspect.signature(torch.nn.functional.dropout).parameters)
    assert parameters == ["input", "p", "training", "inplace"], MEND
    assert "F.dropout(" in inspect.getsource(torch.nn.Dropout.forward), MEND
    parameters = list(inspect.signature(torch.autograd.graph.save_on_cpu.__init__).parameters)
    assert parameters == ["self", "pin_memory", "device_type"], MEND


def test_grouped_products_of_experts_without_values() -> None:
    from transformers.integrations import moe

    assert "_can_use_grouped_mm(input, weight, offs)" in inspect.getsource(moe._grouped_mm), MEND
    assert "grouped_mm_fallback(input" in inspect.getsource(moe._grouped_mm), MEND
