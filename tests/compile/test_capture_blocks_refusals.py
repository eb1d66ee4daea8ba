"""``capture_blocks`` without a GPU: what it refuses, and what it tells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from common import ALL
from runtime_common import runtime_of
from schedules import explicit
from test_capture_blocks import WIDTH, Net, OnHost, Pair, Wire, one_of, tokens_of, train
from torch.distributed.device_mesh import DeviceMesh

from dtensor_gtp import SchedulePolicy, capture_blocks, gtp_shard, quantize_
from dtensor_gtp.graphs.capture_blocks import CapturedBlocks


@pytest.fixture
def world() -> Iterator[tuple[DeviceMesh, Wire]]:
    with one_of(4) as world:
        yield world


class TestRefusals:
    def refused(self, module: nn.Module, blocks: list[nn.Module], error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            CapturedBlocks(module, blocks, OnHost(), 2, 4)

    def test_arguments(self, world: Any) -> None:
        mesh, _ = world
        model = gtp_shard(Net(), mesh, schedule=ALL)
        with pytest.raises(RuntimeError, match="capture_blocks records CUDA graphs, but the weights of the Net are on"):
            capture_blocks(model, model.blocks)
        with pytest.raises(ValueError, match="capture_blocks expects a module that gtp_shard was called on"):
            capture_blocks(nn.Linear(2, 2), [])
        for blocks in ([], [nn.Linear(2, 2)], [model.blocks, model.blocks[0]], [model.blocks[0]] * 2):
            self.refused(model, blocks, ValueError, "capture_blocks expects modules below the Net that do not contain")
        self.refused(
            model, [model.blocks[0].norm], ValueError, "blocks with sharded weights, but 'blocks.0.norm' has no"
        )
        with pytest.raises(ValueError, match="capture_blocks expects warmup_calls >= 2, but got 1"):
            CapturedBlocks(model, list(model.blocks), OnHost(), 1, 4)
        with pytest.raises(TypeError, match=r"capture_blocks expects an int as max_graphs, but got 1.5"):
            CapturedBlocks(model, list(model.blocks), OnHost(), 2, 1.5)  # type: ignore[arg-type]
        CapturedBlocks(model, [model.blocks[0]], OnHost(), 2, 4)
        self.refused(model, list(model.blocks), NotImplementedError, "'blocks.0.up.weight' belongs to another recorded")

    def test_a_window_that_is_too_small_is_told(self, world: Any, caplog: pytest.LogCaptureFixture) -> None:
        Pair(world)
        assert not caplog.text
        Pair(world, schedule=SchedulePolicy(min_shard_numel=0, prefetch_nbytes=64))
        assert "gathers the rest of the 9216 bytes of a block only after the block before" in caplog.text

    def test_blocks(self, world: Any) -> None:
        mesh, _ = world
        plain = Net(depth=3)
        quantize_(plain, "float8_tensorwise", filter_fn=lambda _, name: name == "blocks.0.up")
        ignored = {plain.blocks[1].up.bias}
        model = gtp_shard(plain, mesh, schedule=ALL, ignored_params=ignored)
        model.blocks[2].compile()
        for index, match in enumerate(
            (
                "'blocks.0.up.weight' is quantized for its gather",
                r"does not manage its parameter 'up\.bias'",
                "it is compiled",
            )
        ):
            self.refused(
                model, [model.blocks[index]], NotImplementedError, f"block 'blocks.{index}', a Block: .*{match}"
            )

    def test_a_parameter_of_two_blocks(self, world: Any) -> None:
        for name in ("up", "norm"):
            plain = Net()
            setattr(plain.blocks[1], name, getattr(plain.blocks[0], name))
            model = gtp_shard(plain, world[0], schedule=ALL)
            match = rf"'blocks.1', a Block: its parameter 'blocks.0.{name}.weight' is one of 'blocks.0', too"
            self.refused(model, list(model.blocks), NotImplementedError, match)

    def test_what_cannot_be_recorded(self, world: Any) -> None:
        mesh, _ = world
        model = gtp_shard(Net(), mesh, schedule=explicit(min_shard_numel=0, embedding="exchange"))
        captured = CapturedBlocks(model, [model.embedding], OnHost(), 2, 4)
        train(0)(model)  # in which ranks find out whether it pays
        with pytest.raises(NotImplementedError, match=r"'embedding': it exchanges activations for 'embedding.weight'"):
            model(tokens_of(1))
        captured.remove()
        pair = Pair(world)
        x = torch.randn(7, WIDTH)
        for _ in range(2):
            pair.models[1].blocks[0](x)[0].sum().backward()
        pair.models[1].blocks[0].up.forward = lambda x: 1 / 0
        with pytest.raises(
            RuntimeError, match=r"could not record block 'blocks.0': ZeroDivisionError: division by zero"
        ):
            pair.models[1].blocks[0](x)
        assert runtime_of(pair.models[1]).grads.recording is None
