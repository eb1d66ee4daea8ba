"""The examples of the API reference that make a mesh run on four ranks. The others: ``test_reference_examples.py``."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from common import GlooTest, shared_directory
from reference import NUM_RANKS, Entry, entries, run_example

import dtensor_gtp

ON_RANKS = [entry for entry in entries() if entry.example and entry.is_on_ranks]


class TestReferenceExamples(GlooTest):
    """Has one test for each example."""

    world_size = NUM_RANKS


def made_of(entry: Entry) -> Callable[[GlooTest], None]:
    def test(self: GlooTest) -> None:
        if entry.lacks:
            self.skipTest(entry.lacks)
        before = Path.cwd()
        with shared_directory() as folder, mock.patch.object(dtensor_gtp, "init_weight_mesh", known_mesh):
            os.chdir(folder)  # examples write files
            try:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(0)
                    run_example(entry)
            finally:
                os.chdir(before)

    return pytest.mark.long(test) if entry.is_long else test


def known_mesh(*args: Any, **sizes: Any) -> dtensor_gtp.WeightMesh:
    """Each mesh once: to connect its process groups takes longer than an example."""
    mesh = _mesh(*args, **sizes)
    mesh.rng.manual_seed(sizes.get("seed", 0))
    return mesh


_mesh = functools.cache(dtensor_gtp.init_weight_mesh)

for _entry in ON_RANKS:
    setattr(TestReferenceExamples, "test_" + re.sub(r"\W", "_", _entry.path), made_of(_entry))


def test_examples_that_shard_are_among_them() -> None:
    found = {entry.path for entry in ON_RANKS}
    assert {"dtensor_gtp.gtp_shard", "dtensor_gtp.sharding_report", "dtensor_gtp.elastic.nonuniform_mesh"} <= found
    assert {f"test_{re.sub(r'[^a-zA-Z0-9_]', '_', path)}" for path in found} <= set(dir(TestReferenceExamples))
