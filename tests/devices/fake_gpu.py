"""A GPU that is not there: tensors without memory on a device `gpu`, which torch takes for an accelerator of its own.

What lies in host memory is real, what lies on the device is a fake tensor, which has shape, type and device alone. So a
run goes its way through FSDP2, autograd and Accelerate, and ends where a GPU would end it, or where it would be slow:

- an operator that is given tensors of both (torch's FakeTensorDeviceMismatchError),
- a collective whose tensors do not lie where its backend can reach them (WrongDeviceError),
- an operator that makes the host wait for a value (torch's DataDependentOutputException, DynamicOutputShapeException),
  but for `tolist`, which is how the toolkit reads: each is noted in `meetings`, and gives ones.

torch has one such device for the whole process: `install` is called in a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "gpu"
DEVICE = f"{NAME}:0"


class WrongDeviceError(Exception):
    pass


class Stream:
    """Everything happens at once: tests/streams looks at the order of streams."""

    stream_id, device_index, device_type = 0, 0, 20  # 20 is c10::DeviceType::PrivateUse1

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device(DEVICE)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Event:
        return event or Event()

    def is_capturing(self) -> bool:
        return False


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Handle:
    """What `torch.gpu` is."""

    Stream = Stream
    Event = Event

    def __init__(self) -> None:
        self._stream: Stream | None = None

    def current_stream(self, device: Any = None) -> Stream:
        self._stream = self._stream or Stream()
        return self._stream

    default_stream = current_stream

    def stream(self, stream: Any) -> Stream:
        return stream or self.current_stream()

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def device(self, device: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class Simulated(TorchDispatchMode):
    """Operators on the device, and what has come from there, are fake; operators on the host are real.

    Attributes:
        meetings: shapes of what the host has read of the device, one by one.
        host_group_name: of the group that stands for gloo's; all others stand for NCCL's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.meetings: list[tuple[int, ...]] = []
        self.host_group_name = ""
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given, _ = tree_flatten((args, kwargs))
        if function.namespace == "c10d":
            return self._collective(function, args, kwargs, given)
        if any(isinstance(each, FakeTensor) or _is_device(each) for each in given):
            return self._on_fake(function, args, kwargs)
        return function(*args, **kwargs)

    def _on_fake(self, function: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self._faked, (args, kwargs))
        with self._fake:
            return function(*args, **kwargs)

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)

    def _collective(self, function: Any, args: Any, kwargs: Any, given: list[Any]) -> Any:
        [group] = [each for each in given if isinstance(each, torch.ScriptObject) and "Group" in str(each._type())]
        on_host = dist.ProcessGroup.unbox(group).group_name == self.host_group_name
        reached = "cpu" if on_host else NAME
        for tensor in given:
            if isinstance(tensor, torch.Tensor) and tensor.device.type != reached:
                raise WrongDeviceError(f"{function} of a tensor on {tensor.device} over a group of {reached}")
        return function(*args, **kwargs) if on_host else self._on_fake(function, args, kwargs)


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == NAME


def install() -> None:
    """Makes the device known to torch."""
    _setup_privateuseone_for_python_backend(NAME, Handle())


@contextmanager
def simulated(num_ranks: int, read: Mapping[tuple[int, ...], int] | None = None) -> Iterator[Simulated]:
    """Rank 0 of so many, each with one device; the collectives of the others do nothing.

    Args:
        read: what the host reads in tensors of a shape, instead of ones.
    """
    from accelerate.state import PartialState

    from toolkit import ranks
    from toolkit.sharding.blocks import by_block
    from toolkit.sharding.offload.worker import Worker
    from toolkit.sharding.plugin import reset_accelerate

    reset_accelerate()
    told = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    told |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    seen = Simulated()

    def at_once(self: Any, run: Any, abandon: Any) -> None:
        # A thread of the engine would not be seen: dispatch modes are of one thread.
        with torch.no_grad():
            run()

    def seen_on_thread(run: Callable[[], None]) -> Callable[[], None]:
        # Dispatch modes are of one thread.
        def wrapped() -> None:
            with seen:
                run()

        return wrapped

    def tolist(tensor: torch.Tensor) -> Any:
        seen.meetings.append(tuple(tensor.shape))
        kind = float if tensor.is_floating_point() else int
        return np.full(tensor.shape, (read or {}).get(tuple(tensor.shape), 1), kind).tolist()

    with mock.patch.dict(os.environ, told):
        # `torch.tensor(..., device=...)` makes a tensor on the host, and moves it by an operator that is seen here.
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        dist.init_process_group(f"cpu:fake,{NAME}:fake", rank=0, world_size=num_ranks, store=FakeStore())
        try:
            host_group = dist.new_group()
            seen.host_group_name = host_group.group_name
            PartialState(cpu=True)
            PartialState._shared_state["device"] = torch.device(DEVICE)
            os.environ["ACCELERATE_USE_CPU"] = "false"
            with (
                mock.patch.object(ranks, "gather_objects", lambda value, group=None: [value] * num_ranks),
                mock.patch.object(ranks, "_gloo_group", return_value=host_group),
                mock.patch.object(Worker, "submit", at_once),
                mock.patch.object(by_block, "on_this_device", seen_on_thread),
                mock.patch.object(FakeTensor, "tolist", tolist),
                # By which Accelerate tells an optimizer's parameters apart.
                mock.patch.object(FakeTensor, "data_ptr", lambda tensor: id(tensor)),
                # torch 2.13 asks for its own stream ("Unknown device: 96") where a unit has no gradients to reduce.
                mock.patch.object(torch.accelerator, "current_stream", Stream),
                seen,
            ):
                yield seen
        finally:
            torch._C._set_only_lift_cpu_tensors(before)
            dist.destroy_process_group()
            reset_accelerate()
