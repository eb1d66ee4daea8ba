"""The tasks of a step with ``fully_shard`` on each block and the root, so that users see what they gain.

The order is that of torch's ``_fsdp_param_group.py``: one block is gathered ahead, its shards are copied in and the
result is copied out on the GPU, one reduce-scatter is in flight.
"""

from __future__ import annotations

from .costs import Load, Stream
from .program import Program, Tasks
from .setting import COMPUTE_NBYTES, PARAM_NBYTES, Setting, Sharded


def units_of(setting: Setting) -> tuple[Sharded, list[Sharded]]:
    """What each ``fully_shard`` call gathers: that of the root, and those of the blocks."""
    units = []
    for block, numbers in sorted(setting.trace.numbers.items()):
        unit, name = setting.together(numbers), "root" if block < 0 else f"block {block}"
        units.append(unit._replace(weight=unit.weight._replace(name=name)))
    return units[0], units[1:]


class _Step:
    def __init__(self, setting: Setting) -> None:
        self._setting, self._tasks = setting, Tasks(setting)
        self._axis = setting.costs.axis("gtp")
        self._gathers: dict[str, int] = {}
        self._copied_out, self._reducing = list[int](), list[int]()

    def _weights(self, unit: Sharded) -> list[Sharded]:
        return [self._setting.sharded[number] for number in unit.members]

    def _spend(self, unit: Sharded, share: float) -> None:
        self._tasks.spend(len(unit.members) * self._tasks.host.fsdp_use_us * share)

    def _gather(self, unit: Sharded) -> None:
        """Shards are cast and copied in, then gathered, after the last gather was copied out."""
        if unit.name in self._gathers:
            return
        tasks, costs = self._tasks, self._tasks.costs
        self._spend(unit, 1 / 4)
        tasks.spend(tasks.host.collective_us)
        nbytes = unit.shard_numel * (2 * PARAM_NBYTES + 3 * COMPUTE_NBYTES)
        after = self._copied_out or tasks.fork()
        cast = tasks.add(Stream.GATHER, Load.KERNEL, costs.memory_ms(nbytes), after, f"copy in {unit.name}")
        ms, label = costs.gather_ms(unit.gathered, self._axis), f"gather {unit.name}"
        self._gathers[unit.name] = tasks.transfer(Stream.GATHER, "gtp", unit.gathered, ms, [cast], label, "gathers")

    def _wait(self, unit: Sharded) -> None:
        """The gather is copied to where modules read it."""
        self._spend(unit, 1 / 4)
        self._tasks.wait(self._gathers.pop(unit.name))
        ms, label = self._tasks.costs.memory_ms(2 * unit.gathered), f"copy out {unit.name}"
        self._copied_out = [self._tasks.add(Stream.COMPUTE, Load.COMPUTE, ms, label=label, cause="gathers")]

    def _reduce(self, unit: Sharded) -> None:
        """Gradients are copied in, cast if need be, and reduced, after the last reduction."""
        tasks, costs = self._tasks, self._tasks.costs
        self._spend(unit, 1 / 2)
        tasks.spend(tasks.host.collective_us)
        while self._reducing:
            tasks.wait(self._reducing.pop())
        ms = costs.memory_ms(unit.gathered + unit.sent)
        copied = tasks.add(Stream.COMPUTE, Load.COMPUTE, ms, label=f"copy in gradients of {unit.name}")
        ms = costs.scatter_ms(unit.sent, self._axis)
        tasks.transfer(Stream.SCATTER, "gtp", unit.sent, ms, [copied], f"reduce {unit.name}", "reductions")
        nbytes = unit.shard_numel * (self._setting.reduce_nbytes + PARAM_NBYTES)
        self._reducing.append(tasks.add(Stream.SCATTER, Load.KERNEL, costs.memory_ms(nbytes), (), f"sum {unit.name}"))

    def run(self, *, keeps: bool) -> Program:
        tasks, (root, units) = self._tasks, units_of(self._setting)
        table, *head = self._weights(root)
        self._gather(root)
        self._wait(root)
        tasks.forward([table])
        for unit in units:
            self._gather(unit)
            self._wait(unit)
            tasks.forward(self._weights(unit))
        tasks.forward(head)
        tasks.operations(self._setting.trace.loss, "loss")
        tasks.backward(head)
        for unit, following in zip(units[::-1], [*units[-2::-1], None], strict=True):
            if keeps:  # its hooks look for what there is to do
                self._spend(unit, 1 / 4)
            else:
                self._gather(unit)
                self._wait(unit)
                if following is not None:
                    self._gather(following)
            tasks.backward(self._weights(unit))
            self._reduce(unit)
        tasks.backward([table])
        tasks.operations(self._setting.trace.tail, "backward of the input")
        self._reduce(root)
        for task in self._reducing:
            tasks.wait(task)
        return tasks.end()


def build_fully_shard(setting: Setting, *, keeps: bool = False) -> Program:
    """``fully_shard`` on each block and on the root; ``keeps`` with ``reshard_after_forward=False``. In forward the
    host runs ahead, so a block is gathered as soon as the one before it has been copied out."""
    return _Step(setting).run(keeps=keeps)
