"""With TORCH_CUDA_SANITIZER=1, torch's sanitizer sees every thread: its dispatch mode alone is of one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def sanitized_threads() -> Iterator[None]:
    if "TORCH_CUDA_SANITIZER" not in os.environ or not torch.cuda.is_available():
        yield
        return
    from torch.cuda._sanitizer import cuda_sanitizer

    run = threading.Thread.run

    def watched(thread: Any) -> None:
        with cuda_sanitizer.dispatch:  # the streams and accesses that the main thread's operators are held against
            run(thread)

    with mock.patch.object(threading.Thread, "run", watched):
        yield
