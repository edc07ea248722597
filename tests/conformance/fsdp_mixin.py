"""transformers' own tests of FSDP2, on one small model of each of some types. Run by pytest in a process of its own."""

from __future__ import annotations

import os
import unittest
from types import SimpleNamespace

from support.tiny import tiny_config

from tests import test_fsdp_mixin as suite

os.cpu_count = lambda: 8  # ranks of tiny models need no core each
suite.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None  # as its own message says, for other types than seven

for kind in os.environ["CONFORMANCE_TYPES"].split():
    tester = SimpleNamespace(get_config=lambda kind=kind: tiny_config(kind))
    globals()[kind] = type(f"Test_{kind}", (suite.FSDPTesterMixin, unittest.TestCase), {"model_tester": tester})
