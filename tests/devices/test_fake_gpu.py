"""Training steps on a GPU that is not there: tensors lie where they have to, and host and device meet once a step."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
from devices.device_runs import RUNS, make_trainer, make_window, train
from support.ranks import alone, run_on_ranks

WRONG = {
    "a host tensor in the forward": "FakeTensorDeviceMismatchError",
    "a batch that is left on the host": "FakeTensorDeviceMismatchError",
    "a value that is read in the forward": "DataDependentOutputException",
    "a size that is read in the forward": "DynamicOutputShapeException",
    "a host tensor over the devices' network": "WrongDeviceError",
    "a device tensor over the hosts' network": "WrongDeviceError",
}


def go_wrong(what: str) -> str:
    import torch.distributed as dist
    from devices.fake_gpu import simulated

    from toolkit import ranks

    with simulated(4):
        trainer = make_trainer(RUNS["zero3"])
        device = trainer.accelerator.device

        def in_forward(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            if "host tensor" in what:
                return output + torch.ones(output.shape[-1])
            return output * (output.sum().item() if "value" in what else len(output.flatten().nonzero()))

        try:
            if "host tensor over" in what:
                dist.all_reduce(torch.ones(1))
            elif "hosts' network" in what:
                dist.all_reduce(torch.ones(1, device=device), group=ranks.host_group())
            elif "batch" in what:
                with mock.patch("toolkit.training.trainer.send_to_device", lambda batch, device, **_: batch):
                    trainer.train_step(make_window(RUNS["zero3"]))
            else:
                trainer.model.model.layers[0].mlp.register_forward_hook(in_forward)
                trainer.train_step(make_window(RUNS["zero3"]))
        except Exception as error:
            return type(error).__name__
    return "nothing"


@alone
def run_all() -> tuple[dict[str, Any], dict[str, str]]:
    from devices.fake_gpu import install

    install()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    return {name: train(run) for name, run in RUNS.items()}, {what: go_wrong(what) for what in WRONG}


def test_tensors_lie_where_they_have_to_and_host_and_device_meet_once_a_step() -> None:
    """And what a GPU would refuse is refused here, too."""
    runs, wrong = run_on_ranks(run_all, 1)[0]
    assert wrong == WRONG
    assert list(runs) == list(RUNS)
    for name, run in runs.items():
        assert run["parameters"] == {"gpu"}, name
        assert run["stepped"] == run["trained"], f"{name}: the optimizer has each parameter once"
        assert (run["saved"], run["exported"], run["evaluated"]) == ({"cpu"}, {"gpu"}, 1), name
        assert run["shapes"], name
        met, backend = run["met"], RUNS[name].backend
        if RUNS[name].balance is not None:
            assert met.pop() == (9,), f"{name}: choices and probabilities of four experts, and the loss"
        assert [shape[0] for shape in met[-1:]] == [4], f"{name}: a row of each rank"
        # How many tokens it sends and gets, a rank has to know: of each micro-batch, in its one layer.
        assert met[:-1] == [(2, backend["experts"])] * 2 if "experts" in backend else not met[:-1], name
