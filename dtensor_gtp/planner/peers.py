"""The tasks of a step without ``gtp_shard``: compute alone, and ``fully_shard`` on each block and the root.

They are here so that a prediction can be held against measurements of both, and so that users see what they gain. The
order of ``fully_shard`` is that of torch's ``_fsdp_param_group.py``: one block is gathered ahead, its shards are copied
in and the result is copied out on the GPU, one reduce-scatter is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

from .program import Program, Tasks, product
from .setting import COMPUTE_NBYTES, PARAM_NBYTES, Setting, Sharded
from .simulate import Load, Stream


def build_compute(setting: Setting) -> Program:
    """Whole bf16 weights and no communication."""
    weights, tasks = setting.sharded(), Tasks(setting)
    for item in weights:
        tasks.ops(item.weight.before, f"before {item.name}", is_block=item.weight.block >= 0)
        tasks.compute(product(tasks, item, "forward"), f"use {item.name}")
    tasks.ops(setting.trace.loss, "loss", is_block=False)
    tasks.turning = len(tasks.tasks)
    for item in reversed(weights):
        tasks.ops(item.weight.backward, f"before backward of {item.name}", is_block=item.weight.block >= 0)
        _gradients(tasks, item)
    tasks.ops(setting.trace.tail, "backward of the input", is_block=False)
    return tasks.done()


def _gradients(tasks: Tasks, item: Sharded) -> None:
    for part in ("wgrad", "dgrad") if item.weight.has_dgrad else ("wgrad",):
        tasks.compute(product(tasks, item, part), f"{part} {item.name}")


class _Unit:
    """The parameters of one ``fully_shard`` call."""

    def __init__(self, weights: Sequence[Sharded]) -> None:
        self.weights = weights
        self.name = f"block {weights[0].weight.block}" if weights[0].weight.block >= 0 else "root"
        self.gathered = sum(item.wired for item in weights)
        self.full = sum(item.gathered for item in weights)
        self.sent = sum(item.sent for item in weights)
        self.shard_numel = sum(item.shard_numel for item in weights)


class _FullyShard:
    def __init__(self, setting: Setting) -> None:
        self.setting, self.tasks = setting, Tasks(setting)
        self.axis = setting.costs.axis("gtp")
        weights = setting.sharded()
        blocks = sorted({item.weight.block for item in weights if item.weight.block >= 0})
        self.root = _Unit([item for item in weights if item.weight.block < 0])
        self.units = [_Unit([item for item in weights if item.weight.block == block]) for block in blocks]
        self.gathers: dict[str, int] = {}
        self._copied_out: list[int] = []
        self._reducing: list[int] = []

    def gather(self, unit: _Unit) -> None:
        """Shards are cast and copied in, then gathered, after the last gather was copied out."""
        if unit.name in self.gathers:
            return
        tasks = self.tasks
        tasks.spend(len(unit.weights) * tasks.host.fsdp_use_us / 4 + tasks.host.collective_us)
        nbytes = unit.shard_numel * (2 * PARAM_NBYTES + 3 * COMPUTE_NBYTES)
        after = [*self._copied_out, *tasks.fork()] if not self._copied_out else self._copied_out
        cast = tasks.add(Stream.GATHER, Load.KERNEL, tasks.costs.memory_ms(nbytes), after, f"copy in {unit.name}")
        tasks.receive("gtp", unit.gathered * (self.axis.size - 1) / self.axis.size)
        ms = tasks.costs.gather_ms(unit.gathered, self.axis)
        load = tasks.costs.load(self.axis, is_copy=False)
        self.gathers[unit.name] = tasks.add(Stream.GATHER, load, ms, [cast], f"gather {unit.name}", "gathers")

    def wait(self, unit: _Unit) -> None:
        """The gather is copied to where modules read it."""
        tasks = self.tasks
        tasks.spend(len(unit.weights) * tasks.host.fsdp_use_us / 4)
        tasks.wait(self.gathers.pop(unit.name))
        ms = tasks.costs.memory_ms(2 * unit.full)
        copied = tasks.add(Stream.COMPUTE, Load.COMPUTE, ms, label=f"copy out {unit.name}", cause="gathers")
        self._copied_out = [copied]

    def reduce(self, unit: _Unit) -> None:
        """Gradients are copied in, cast if need be, and reduced, after the last reduction."""
        tasks = self.tasks
        tasks.spend(len(unit.weights) * tasks.host.fsdp_use_us / 2 + tasks.host.collective_us)
        while self._reducing:
            tasks.wait(self._reducing.pop())
        ms = tasks.costs.memory_ms(unit.full + unit.sent)
        copied = tasks.add(Stream.COMPUTE, Load.COMPUTE, ms, label=f"copy in gradients of {unit.name}")
        tasks.receive("gtp", unit.sent * (self.axis.size - 1) / self.axis.size)
        load = tasks.costs.load(self.axis, is_copy=False)
        ms = tasks.costs.scatter_ms(unit.sent, self.axis)
        tasks.add(Stream.SCATTER, load, ms, [copied], f"reduce {unit.name}", "reductions")
        nbytes = unit.shard_numel * (self.setting.reduce_nbytes + PARAM_NBYTES)
        done = tasks.add(Stream.SCATTER, Load.KERNEL, tasks.costs.memory_ms(nbytes), (), f"sum {unit.name}")
        self._reducing.append(done)

    def run(self, *, keeps: bool) -> Program:
        tasks, units = self.tasks, self.units
        self.gather(self.root)
        self.wait(self.root)
        table, *head = self.root.weights
        self._forward(table)
        for unit in units:
            self.gather(unit)
            self.wait(unit)
            for item in unit.weights:
                self._forward(item)
        for item in head:
            self._forward(item)
        tasks.ops(self.setting.trace.loss, "loss", is_block=False)
        tasks.turning = len(tasks.tasks)
        for item in reversed(head):
            self._backward(item)
        for number in reversed(range(len(units))):
            if keeps:  # its hooks look for what there is to do
                self.tasks.spend(len(units[number].weights) * self.tasks.host.fsdp_use_us / 4)
            else:
                self.gather(units[number])
                self.wait(units[number])
                if number:
                    self.gather(units[number - 1])
            for item in reversed(units[number].weights):
                self._backward(item)
            self.reduce(units[number])
        self._backward(table)
        tasks.ops(self.setting.trace.tail, "backward of the input", is_block=False)
        self.reduce(self.root)
        for task in self._reducing:
            tasks.wait(task)
        tasks.add(Stream.COMPUTE, Load.COMPUTE, 0.0, label="end", cause="reductions")
        return tasks.done()

    def _forward(self, item: Sharded) -> None:
        is_block = item.weight.block >= 0
        self.tasks.ops(item.weight.before, f"before {item.name}", is_block=is_block)
        self.tasks.compute(product(self.tasks, item, "forward"), f"use {item.name}")

    def _backward(self, item: Sharded) -> None:
        is_block = item.weight.block >= 0
        self.tasks.ops(item.weight.backward, f"before backward of {item.name}", is_block=is_block)
        _gradients(self.tasks, item)


def build_fully_shard(setting: Setting, *, keeps: bool = False) -> Program:
    """``fully_shard`` on each block and on the root; ``keeps`` with ``reshard_after_forward=False``. In forward the
    host runs ahead, so a block is gathered as soon as the one before it has been copied out."""
    return _FullyShard(setting).run(keeps=keeps)


def fully_shard_peak(setting: Setting) -> int:
    """The most bytes above the state in a step of ``fully_shard`` on each block and on the root.

    The root's parameters stay gathered from the begin to the end, and its gradients wait for the end. In backward of a
    block there are two blocks gathered, its own gradients so far, the copy of the last block's gradients that is
    reduced, and the shards' gradients of the blocks before.
    """
    weights = setting.sharded()
    root = [item for item in weights if item.weight.block < 0]
    gathered = sum(item.gathered for item in root)
    table, *head = root
    grads = sum(item.gathered for item in head)
    most = max(gathered + max(item.weight.amounts[:2]) for item in weights)
    most = max([most, *(gathered + item.weight.amounts.before_backward for item in head)])
    most = max([most, *(gathered + item.gathered + item.weight.amounts.wgrad for item in head)])
    reduced = reducing = 0
    for block in sorted({item.weight.block for item in weights if item.weight.block >= 0}, reverse=True):
        items = [item for item in weights if item.weight.block == block]
        size = sum(item.gathered for item in items)
        ahead = size if block else 0
        computed = 0
        for item in reversed(items):
            computed += item.gathered
            held = gathered + grads + size + ahead + computed + reducing + reduced
            most = max(most, held + max(item.weight.amounts[2:]))
        reduced += sum(item.shard_numel for item in items) * PARAM_NBYTES
        reducing = sum(item.sent for item in items)
    own = gathered + grads + table.gathered
    return max(most, own + sum(item.sent for item in root) + reduced)
