"""The tasks of one step under ``gtp_shard``, in the order in which the runtime launches them.

The plan is the runtime's own (``_schedule.plans``), and a ``Chain`` of the runtime says at each use what is
launched. A gather waits for all that compute was given before, a reduction too; compute waits for the gather of the
weight in use, and for the oldest reduction once as many are in flight as may be.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Sequence

from .._schedule.passes import Chain
from .._schedule.plans import Plan, Window
from .._schedule.waiting_gradients import Together, travels_as_it_is
from ..policy import Schedule
from .costs import Load, Span, Stream, Task, Work, simulate
from .recorder import Op
from .setting import COMPUTE_NBYTES, PARAM_NBYTES, Setting, Sharded, plan_step

# A group costs the host as much as so many weights: fitted on Llama, BERT and GPT-2 (2 x H100, f6c622c).
_GROUP = 6


class Program:
    """The tasks of one step in the order of their launches, and the host's clock while they are put together."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.costs = setting.costs
        self.host = self.costs.machine.host
        self.tasks: list[Task] = []
        self.received: dict[str, float] = {}  # bytes that a rank receives, by axis
        self.host_ms = 0.0  # when it has launched the last one
        if setting.is_captured:
            self.host_ms = self.host.replay_us / 1e3
        self._last_compute: tuple[int, ...] = ()
        self._waits: list[int] = []  # what the next task of compute waits for

    def spend(self, us: float) -> None:
        if not self.setting.is_captured:
            self.host_ms += us / 1e3

    def add(
        self, stream: Stream, load: Load, ms: float, after: Iterable[int] = (), label: str = "", cause: str = ""
    ) -> int:
        waits = tuple(after)
        if stream is Stream.COMPUTE:
            waits, self._waits, self._last_compute = (*waits, *self._waits), [], (len(self.tasks),)
        self.tasks.append(Task(stream, load, ms, waits, self.host_ms, label, cause))
        return len(self.tasks) - 1

    def wait(self, task: int) -> None:
        """The next task of compute waits for ``task``."""
        self._waits.append(task)

    def fork(self) -> list[int]:
        """What another stream waits for that is to wait for compute."""
        return [*self._waits, *self._last_compute]

    def compute(self, works: Sequence[Work], label: str) -> None:
        """Compute, and the collectives of other axes, which compute waits for."""
        for work in works:
            self.spend(work.host_ms * 1e3)
            if work.axis:
                self.transfer(Stream.COMPUTE, work.axis, work.nbytes, work.ms, (), f"{label}: {work.axis}", work.axis)
            else:
                self.add(Stream.COMPUTE, Load.COMPUTE, work.ms, label=label)

    def operations(self, ops: Iterable[Op], label: str, item: Sharded | None = None) -> None:
        """Those around the use of a weight; outside of blocks those of no weight."""
        if item is None:
            name = ""
        else:
            name = f" {item.name}"
        self.compute(self.costs.works(ops, is_block=item is not None and item.weight.block >= 0), label + name)

    def multiply(self, item: Sharded, part: str) -> None:
        """The GEMM of a use: "forward", "wgrad" or "dgrad"."""
        self.compute(self.setting.product(item, part), f"{'use' if part == 'forward' else part} {item.name}")

    def forward(self, weights: Sequence[Sharded]) -> None:
        for item in weights:
            self.operations(item.weight.before, "before", item)
            self.multiply(item, "forward")

    def backward(self, weights: Sequence[Sharded]) -> None:
        for item in reversed(weights):
            self.operations(item.weight.backward, "before backward of", item)
            for part in item.gradients():
                self.multiply(item, part)

    def transfer(
        self, stream: Stream, name: str, nbytes: float, ms: float, after: Iterable[int], label: str, cause: str,
        *, is_copy: bool = False,
    ) -> int:  # fmt: skip
        """A collective over an axis, with which each rank gets the parts of ``nbytes`` that the others have."""
        axis = self.costs.axis(name)
        self.received[name] = self.received.get(name, 0) + nbytes * (axis.size - 1) / axis.size
        return self.add(stream, self.costs.load(axis, is_copy=is_copy), ms, after, label, cause)

    def end(self) -> Program:
        if self._waits:
            self.add(Stream.COMPUTE, Load.COMPUTE, 0.0, label="end", cause="reductions")
        return self

    @functools.cached_property
    def spans(self) -> list[Span]:
        return simulate(self.tasks, self.costs.machine.contention)

    @property
    def ms(self) -> float:
        return max(max((span.end for span in self.spans), default=0.0), self.host_ms)

    def exposed(self) -> dict[str, float]:
        """Time in which the compute stream does nothing for the model, by cause: it waits, or runs a collective."""
        found: dict[str, float] = {}
        end = 0.0
        for task, span in zip(self.tasks, self.spans, strict=True):
            if task.stream is not Stream.COMPUTE:
                continue
            if span.begin > end:
                waited = max(task.after, key=lambda other: self.spans[other].end, default=-1)
                is_host = waited < 0 or self.spans[waited].end < span.begin - 1e-6
                if is_host:
                    cause = "host"
                else:
                    cause = self.tasks[waited].cause or "gathers"
                found[cause] = found.get(cause, 0) + span.begin - end
            if task.cause and task.ms:
                found[task.cause] = found.get(task.cause, 0) + span.end - span.begin
            end = span.end
        if self.ms > end:
            found["host"] = found.get("host", 0) + self.ms - end
        return found


class _GTPShard(Program):
    """Gathers are launched as ``_schedule.gathering`` does, reductions as ``_schedule.reduce_gradients`` does."""

    def __init__(self, setting: Setting, schedule: Schedule, *, is_last: bool) -> None:
        super().__init__(setting)
        self._schedule = schedule
        self._is_last = is_last
        self._step = plan_step(setting, schedule)
        self._kept: dict[int, int] = {}  # gathers that stay from forward to backward, by unit
        self._last: dict[int, int] = {}  # gathers of the last use, by unit
        self._together: dict[int, Together[Sharded]] = {}  # gradients that wait for others, by lane
        self._reducing: deque[int] = deque()

    def forward_pass(self) -> None:
        self._begin(self._step.forward)
        for number, item in enumerate(self.setting.sharded):
            self.operations(item.weight.before, "before", item)
            unit = self.setting.unit_of[number]
            if self.setting.is_exchanged(unit):
                self._exchange_rows(item)
            else:
                self._use(number, is_kept=unit in self._step.kept)

    def backward_pass(self) -> None:
        setting = self.setting
        recomputed = self._step.recomputed
        self._begin(self._step.backward)
        for number, item in reversed([*enumerate(setting.sharded)]):
            again = recomputed.get(item.weight.block, ()) if setting.trace.ends_block(number) else ()
            for other in setting.trace.numbers[item.weight.block] if again else ():
                self.operations(setting.sharded[other].weight.before, "again before", setting.sharded[other])
                if other in again:
                    self._use(other)
            self.operations(item.weight.backward, "before backward of", item)
            unit = setting.unit_of[number]
            group = setting.units[unit]
            if setting.is_exchanged(unit):
                if not item.weight.is_frozen:
                    self._exchange_grad(item)
                continue
            if group.is_group and number == group.members[-1]:
                self.spend(self.host.use_us * _GROUP / 2)
                if group.members[0] not in recomputed.get(item.weight.block, ()):
                    self._gather(unit)
            for part in item.gradients()[:: 1 if self._schedule.wgrad_first else -1]:
                if not group.is_group:
                    self.spend(self.host.use_us / 2)
                    if part == "dgrad":
                        self._gather(unit)
                self.multiply(item, part)
                if part == "wgrad" and not group.is_group:
                    self._reduce(item)
            if group.is_group and number == group.members[0]:
                self.spend(self.host.use_us * _GROUP / 2)
                if group.sent:
                    self._reduce(group)

    def finish(self) -> Program:
        """Backward ends: compute waits for all reductions."""
        for together in self._together.values():
            if together.waiting:
                self._launch_reduction(together.flush())
        self._retire(0)
        trace = self.setting.trace
        axis = self.costs.axis("gtp")
        small = (trace.small_numel - trace.frozen_small_numel) * self.setting.reduce_nbytes
        if small:
            self.spend(self.host.collective_us)
            ms = self.costs.reduce_ms(small, axis)
            load = self.costs.load(axis, is_copy=False)
            self.wait(self.add(Stream.SCATTER, load, ms, self.fork(), "whole parameters", "reductions"))
        return self.end()

    def _begin(self, plan: Plan) -> None:
        """A pass begins with its first gathers."""
        self._pending: dict[int, deque[int]] = {}  # gathers in flight, by unit
        self._chain = Chain(Window(0), tuple)  # the plan is given, so neither is used
        self._chain.plan = plan
        for positions in self._chain.expected():
            self._prefetch(positions)

    def _use(self, number: int, *, is_kept: bool = False) -> None:
        """The first weight of a unit is where it is gathered."""
        unit = self.setting.unit_of[number]
        group = self.setting.units[unit]
        if number == group.members[0]:
            self.spend(self.host.use_us * (_GROUP if group.is_group else 1))
            self._gather(unit, is_kept=is_kept)
        self.multiply(self.setting.sharded[number], "forward")

    def _gather(self, unit: int, *, is_kept: bool = False) -> None:
        """A use begins: compute waits for its gather. Launches what follows."""
        if unit in self._kept:
            done = self._kept.pop(unit)
        elif len(self._chain.observed) in self._chain.plan.served:
            done = self._last[unit]  # it has stayed since its last use
        elif self._pending.get(unit):
            done = self._pending[unit].popleft()
        else:
            done = self._launch_gather([unit])
        for launch in self._chain.advance(unit, self.setting.units[unit].lane) or ():
            self._prefetch(launch.positions)
        if is_kept:
            self._kept[unit] = done
        self._last[unit] = done
        self.wait(done)

    def _prefetch(self, positions: Sequence[int]) -> None:
        uses = [self._chain.plan.uses[position] for position in positions]
        if missing := [use for use in uses if use not in self._kept]:
            task = self._launch_gather(missing)
            for unit in missing:
                self._pending.setdefault(unit, deque()).append(task)

    def _launch_gather(self, units: Sequence[int]) -> int:
        weights = [self.setting.units[unit] for unit in units]
        first = weights[0]
        names = _names(weights)
        is_copy = self.setting.gathers_by(self._schedule, first.lane) == "copy_engine"
        self.spend(self.host.copy_us if is_copy and first.axis.size > 1 else self.host.collective_us)
        read_and_written = sum(weight.cast_nbytes for weight in weights)
        cast_ms = (self.costs.cast_ms if first.is_quantized else self.costs.memory_ms)(read_and_written)
        if first.lane:
            stream = Stream.EXPERT_GATHER
        else:
            stream = Stream.GATHER
        if first.axis.size == 1 or not (is_copy or first.is_quantized):
            cast = self.add(Stream.COMPUTE, Load.COMPUTE, cast_ms, label=f"cast {names}")
        else:
            cast = self.add(Stream.CAST if is_copy else stream, Load.KERNEL, cast_ms, self.fork(), f"cast {names}")
        if first.axis.size == 1:
            return cast
        nbytes = sum(weight.wired for weight in weights)
        num = sum(len(weight.members) for weight in weights)
        ms = self.costs.together_ms(nbytes, first.axis, num, is_copy=is_copy)
        label = f"gather {names}"
        return self.transfer(stream, first.axis_name, nbytes, ms, [cast], label, "gathers", is_copy=is_copy)

    def _reduce(self, item: Sharded) -> None:
        """The gradient of a weight is there, or the backward of a block ends."""
        together = self._together.setdefault(item.lane, Together(self._schedule.coalesce_grad_nbytes))
        if item.is_group:
            nbytes = self._sent_nbytes([item])
        else:
            nbytes = item.sent
        for launch in together.submit(item, nbytes, is_group=item.is_group):
            self._launch_reduction(launch)

    def _retire(self, most: int) -> None:
        while len(self._reducing) > most:
            self.wait(self._reducing.popleft())

    def _launch_reduction(self, weights: Sequence[Sharded]) -> None:
        axis = weights[0].axis
        nbytes = self._sent_nbytes(weights)
        names = _names(weights)
        if weights[0].is_group:  # packed, once compute has waited for the last launch
            self._retire(0)
            self.add(Stream.COMPUTE, Load.COMPUTE, self._pack_ms(weights), label=f"pack {names}")
        self._retire(self._schedule.max_inflight_reduce_scatters - 1)
        is_copy = self.setting.reduces_by(self._schedule, weights[0].lane) == "copy_engine"
        self.spend(self.host.copy_us if is_copy else self.host.collective_us)
        label = f"reduce {names}"
        name = weights[0].axis_name
        after = self.fork()
        if axis.size > 1:
            ms = self.costs.together_ms(nbytes, axis, len(weights), is_copy=is_copy, is_reduction=True)
            after = [self.transfer(Stream.SCATTER, name, nbytes, ms, after, label, "reductions", is_copy=is_copy)]
        shard = -(-sum(weight.weight.numel for weight in weights) // axis.size)
        # The sum of the addends; else the reduced rows are cast to the dtype of the parameter.
        has_addends = is_copy or self.setting.sends_narrow(self._schedule, weights[0])
        if has_addends:
            read = nbytes
        else:
            read = shard * self.setting.reduce_nbytes
        self._sum_up(weights, after, read + shard * PARAM_NBYTES)

    def _pack_ms(self, groups: Sequence[Sharded]) -> float:
        """For the gradients of groups, but for those that travel as they are: see ``ReductionLaunches``."""
        weights = [self.setting.sharded[number].weight for group in groups for number in group.members]
        numels = [weight.numel for weight in weights if not weight.is_frozen]
        sent_nbytes = self.setting.reduce_nbytes
        if self.setting.sends_narrow(self._schedule, groups[0]):
            sent_nbytes = COMPUTE_NBYTES
            numels = [numel for numel in numels if not travels_as_it_is(numel * COMPUTE_NBYTES)]
        return self.costs.memory_ms(sum(numels) * (COMPUTE_NBYTES + sent_nbytes))

    def _sent_nbytes(self, weights: Sequence[Sharded]) -> int:
        if self.setting.sends_narrow(self._schedule, weights[0]):
            return sum(each.weight.numel for each in weights) * COMPUTE_NBYTES
        return sum(weight.sent for weight in weights)

    def _sum_up(self, weights: Sequence[Sharded], after: Sequence[int], nbytes: float) -> None:
        """What follows a reduce-scatter: a kernel that touches ``nbytes``, and what replicas exchange."""
        is_copy = self.setting.reduces_by(self._schedule, weights[0].lane) == "copy_engine"
        if is_copy:
            stream = Stream.FINISH
        else:
            stream = Stream.SCATTER
        names = _names(weights)
        done = self.add(stream, Load.KERNEL, self.costs.memory_ms(nbytes), after, f"sum {names}", "reductions")
        name = weights[0].replicas
        replicas = self.costs.axis(name)
        if self._is_last and replicas.size > 1:
            shard = sum(weight.shard_numel for weight in weights) * self.setting.reduce_nbytes
            self.spend(self.host.collective_us)
            if self.setting.shards_optimizer:  # each replica takes its part of the sum
                ms = self.costs.scatter_ms(shard, replicas)
                label = f"reduce-scatter {names}"
            else:
                ms = self.costs.reduce_ms(shard, replicas)
                label = f"all-reduce {names}"
                shard *= 2
            done = self.transfer(stream, name, shard, ms, [done], label, "replicas")
        self._reducing.append(done)

    def _exchange_rows(self, item: Sharded) -> None:
        """A lookup by exchange: ids are gathered, rows are looked up for all ranks and reduce-scattered."""
        nbytes = item.axis.size * self.setting.tokens * item.weight.shape[1] * COMPUTE_NBYTES
        self.spend(self.host.use_us + 2 * self.host.collective_us)
        self.add(Stream.COMPUTE, Load.COMPUTE, self.costs.memory_ms(3 * nbytes), label=f"look up {item.name}")
        ms = self.costs.gather_ms(nbytes, item.axis)
        self.transfer(Stream.COMPUTE, item.axis_name, nbytes, ms, (), f"exchange {item.name}", "lookup")

    def _exchange_grad(self, item: Sharded) -> None:
        nbytes = item.axis.size * self.setting.tokens * item.weight.shape[1] * COMPUTE_NBYTES
        self.spend(self.host.use_us + self.host.collective_us)
        ms = self.costs.gather_ms(nbytes, item.axis)
        label = f"exchange {item.name}"
        self.wait(self.transfer(Stream.GATHER, item.axis_name, nbytes, ms, self.fork(), label, "lookup"))
        sums = self.costs.memory_ms(3 * nbytes + 2 * item.shard_numel * PARAM_NBYTES)
        self.add(Stream.COMPUTE, Load.COMPUTE, sums, label=f"wgrad {item.name}")
        self._sum_up([item], self.fork(), 2 * item.shard_numel * PARAM_NBYTES)


def build_compute(setting: Setting) -> Program:
    """Whole bf16 weights and no communication: a step without ``gtp_shard``."""
    tasks = Program(setting)
    tasks.forward(setting.sharded)
    tasks.operations(setting.trace.loss, "loss")
    tasks.backward(setting.sharded)
    tasks.operations(setting.trace.tail, "backward of the input")
    return tasks.end()


def build(setting: Setting, schedule: Schedule, *, is_last: bool = True) -> Program:
    """One forward and backward. ``is_last``: gradients are summed over replicas too."""
    tasks = _GTPShard(setting, schedule, is_last=is_last)
    tasks.forward_pass()
    tasks.operations(setting.trace.loss, "loss")
    tasks.backward_pass()
    tasks.operations(setting.trace.tail, "backward of the input")
    return tasks.finish()


def _names(weights: Sequence[Sharded]) -> str:
    return " + ".join(weight.name.removesuffix(".weight") for weight in weights)
