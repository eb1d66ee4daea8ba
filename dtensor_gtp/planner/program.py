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
from .._schedule.plans import Plan, Together, Window
from ..policy import Schedule
from .costs import Load, Span, Stream, Task, Work, simulate
from .recorder import Op
from .setting import COMPUTE_NBYTES, PARAM_NBYTES, Setting, Sharded, Step, plan_step

# A group costs the host as much as so many weights: fitted on Llama, BERT and GPT-2 (2 x H100, f6c622c).
_GROUP = 6


class Program:
    """The tasks of one step in the order of their launches, and the host's clock while they are put together."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.costs = setting, setting.costs
        self.host = self.costs.machine.host
        self.tasks: list[Task] = []
        self.received: dict[str, float] = {}  # bytes that a rank receives, by axis
        self.host_ms = self.host.replay_us / 1e3 if setting.is_captured else 0.0  # when it has launched the last one
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
        name = "" if item is None else f" {item.name}"
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
                cause = "host" if is_host else self.tasks[waited].cause or "gathers"
                found[cause] = found.get(cause, 0) + span.begin - end
            if task.cause and task.ms:
                found[task.cause] = found.get(task.cause, 0) + span.end - span.begin
            end = span.end
        if self.ms > end:
            found["host"] = found.get("host", 0) + self.ms - end
        return found


class Gathers:
    """The gathers of one pass, as ``_schedule.gathering`` launches them; ``kept`` has those that stay till backward."""

    def __init__(self, tasks: Program, schedule: Schedule, plan: Plan, kept: dict[int, int]) -> None:
        self._tasks, self._schedule, self._kept = tasks, schedule, kept
        self._pending: dict[int, deque[int]] = {}  # tasks of gathers in flight, by weight
        self._chain = Chain(Window(0), tuple)  # the plan is given, so neither is used
        self._chain.plan = plan
        for positions in self._chain.expected():
            self._prefetch(positions)

    def use(self, number: int, *, is_kept: bool = False) -> None:
        """A use begins: compute waits for its gather. Launches what follows."""
        if number in self._kept:
            done = self._kept.pop(number)
        elif self._pending.get(number):
            done = self._pending[number].popleft()
        else:
            done = self._launch([number])
        for launch in self._chain.advance(number, self._tasks.setting.units[number].lane) or ():
            self._prefetch(launch.positions)
        if is_kept:
            self._kept[number] = done
        self._tasks.wait(done)

    def _prefetch(self, positions: Sequence[int]) -> None:
        uses = [self._chain.plan.uses[position] for position in positions]
        if missing := [use for use in uses if use not in self._kept]:
            task = self._launch(missing)
            for number in missing:
                self._pending.setdefault(number, deque()).append(task)

    def _launch(self, numbers: Sequence[int]) -> int:
        tasks, costs = self._tasks, self._tasks.costs
        weights = [tasks.setting.units[number] for number in numbers]
        first, names = weights[0], _names(weights)
        is_copy = tasks.setting.gathers_by(self._schedule, first.lane) == "copy_engine"
        tasks.spend(tasks.host.copy_us if is_copy and first.axis.size > 1 else tasks.host.collective_us)
        read_and_written = sum(weight.cast_nbytes for weight in weights)
        cast_ms = (costs.cast_ms if first.is_quantized else costs.memory_ms)(read_and_written)
        stream = Stream.EXPERT_GATHER if first.lane else Stream.GATHER
        if first.axis.size == 1 or not (is_copy or first.is_quantized):
            cast = tasks.add(Stream.COMPUTE, Load.COMPUTE, cast_ms, label=f"cast {names}")
        else:
            cast = tasks.add(Stream.CAST if is_copy else stream, Load.KERNEL, cast_ms, tasks.fork(), f"cast {names}")
        if first.axis.size == 1:
            return cast
        nbytes = sum(weight.wired for weight in weights)
        num = sum(len(weight.members) for weight in weights)
        ms = costs.together_ms(nbytes, first.axis, num, is_copy=is_copy)
        label = f"gather {names}"
        return tasks.transfer(stream, first.axis_name, nbytes, ms, [cast], label, "gathers", is_copy=is_copy)


class Reductions:
    """The gradients of a backward, as ``_schedule.reduce_gradients`` sends them."""

    def __init__(self, tasks: Program, schedule: Schedule, *, is_last: bool) -> None:
        self._tasks, self._schedule, self._is_last = tasks, schedule, is_last
        self._together: dict[tuple[int, bool], Together[Sharded]] = {}  # by lane, and whether they are groups
        self._inflight: deque[int] = deque()

    def submit(self, item: Sharded) -> None:
        """The gradient of a weight is there, or the backward of a block ends."""
        self._flush((item.lane, not item.is_group))
        together = self._together.setdefault(
            (item.lane, item.is_group), Together(self._schedule.coalesce_grad_nbytes, of_groups=item.is_group)
        )
        for launch in together.submit(item, self._sent_nbytes([item]) if item.is_group else item.sent):
            self._launch(launch)

    def finish(self) -> None:
        """Backward ends: compute waits for all of them."""
        for key in self._together:
            self._flush(key)
        self._retire(0)

    def _flush(self, key: tuple[int, bool]) -> None:
        for launch in self._together[key].flush() if key in self._together else ():
            self._launch(launch)

    def _retire(self, most: int) -> None:
        while len(self._inflight) > most:
            self._tasks.wait(self._inflight.popleft())

    def _launch(self, weights: Sequence[Sharded]) -> None:
        tasks, axis = self._tasks, weights[0].axis
        if weights[0].is_group:  # packed, once compute has waited for the last launch
            self._retire(0)
            ms = tasks.costs.memory_ms(sum(group.gathered for group in weights) + self._sent_nbytes(weights))
            tasks.add(Stream.COMPUTE, Load.COMPUTE, ms, label=f"pack {_names(weights)}")
        self._retire(self._schedule.max_inflight_reduce_scatters - 1)
        is_copy = tasks.setting.reduces_by(self._schedule, weights[0].lane) == "copy_engine"
        tasks.spend(tasks.host.copy_us if is_copy else tasks.host.collective_us)
        nbytes = self._sent_nbytes(weights)
        label, name = f"reduce {_names(weights)}", weights[0].axis_name
        after = tasks.fork()
        if axis.size > 1:
            ms = tasks.costs.together_ms(nbytes, axis, len(weights), is_copy=is_copy, is_reduction=True)
            after = [tasks.transfer(Stream.SCATTER, name, nbytes, ms, after, label, "reductions", is_copy=is_copy)]
        shard = sum(weight.shard_numel for weight in weights)
        # The sum of the addends; else the reduced rows are cast to the dtype of the parameter.
        has_addends = is_copy or tasks.setting.sends_narrow(self._schedule, weights[0])
        read = nbytes if has_addends else shard * tasks.setting.reduce_nbytes
        self.sum_up(weights, after, read + shard * PARAM_NBYTES)

    def _sent_nbytes(self, weights: Sequence[Sharded]) -> int:
        if self._tasks.setting.sends_narrow(self._schedule, weights[0]):
            return sum(each.weight.numel for each in weights) * COMPUTE_NBYTES
        return sum(weight.sent for weight in weights)

    def sum_up(self, weights: Sequence[Sharded], after: Sequence[int], nbytes: float) -> None:
        """What follows a reduce-scatter: a kernel that touches ``nbytes``, and what replicas exchange."""
        tasks, costs, names = self._tasks, self._tasks.costs, _names(weights)
        is_copy = tasks.setting.reduces_by(self._schedule, weights[0].lane) == "copy_engine"
        stream = Stream.FINISH if is_copy else Stream.SCATTER
        done = tasks.add(stream, Load.KERNEL, costs.memory_ms(nbytes), after, f"sum {names}", "reductions")
        name = weights[0].replicas
        replicas = costs.axis(name)
        if self._is_last and replicas.size > 1:
            shard = sum(weight.shard_numel for weight in weights) * tasks.setting.reduce_nbytes
            tasks.spend(tasks.host.collective_us)
            if tasks.setting.shards_optimizer:  # each replica takes its part of the sum
                ms, label = costs.scatter_ms(shard, replicas), f"reduce-scatter {names}"
            else:
                ms, label = costs.reduce_ms(shard, replicas), f"all-reduce {names}"
                shard *= 2
            done = tasks.transfer(stream, name, shard, ms, [done], label, "replicas")
        self._inflight.append(done)


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
    step, tasks = plan_step(setting, schedule), Program(setting)
    kept: dict[int, int] = {}
    gathers = Gathers(tasks, schedule, step.forward, kept)
    for number, item in enumerate(setting.sharded):
        tasks.operations(item.weight.before, "before", item)
        unit = setting.unit_of[number]
        if setting.is_exchanged(unit):
            _exchange_rows(tasks, item)
        else:
            _use(tasks, gathers, number, is_kept=unit in step.kept)
    tasks.operations(setting.trace.loss, "loss")
    reductions = Reductions(tasks, schedule, is_last=is_last)
    _backward(tasks, Gathers(tasks, schedule, step.backward, kept), reductions, step, schedule)
    tasks.operations(setting.trace.tail, "backward of the input")
    reductions.finish()
    small, axis = setting.trace.small_numel * setting.reduce_nbytes, setting.costs.axis("gtp")
    if small:
        tasks.spend(tasks.host.collective_us)
        ms, load = setting.costs.reduce_ms(small, axis), setting.costs.load(axis, is_copy=False)
        tasks.wait(tasks.add(Stream.SCATTER, load, ms, tasks.fork(), "whole parameters", "reductions"))
    return tasks.end()


def _use(tasks: Program, gathers: Gathers, number: int, *, is_kept: bool = False) -> None:
    """The first weight of a unit is where it is gathered."""
    unit = tasks.setting.unit_of[number]
    group = tasks.setting.units[unit]
    if number == group.members[0]:
        tasks.spend(tasks.host.use_us * (_GROUP if group.is_group else 1))
        gathers.use(unit, is_kept=is_kept)
    tasks.multiply(tasks.setting.sharded[number], "forward")


def _exchange_rows(tasks: Program, item: Sharded) -> None:
    """A lookup by exchange: ids are gathered, rows are looked up for all ranks and reduce-scattered."""
    nbytes = item.axis.size * tasks.setting.tokens * item.weight.shape[1] * COMPUTE_NBYTES
    tasks.spend(tasks.host.use_us + 2 * tasks.host.collective_us)
    tasks.add(Stream.COMPUTE, Load.COMPUTE, tasks.costs.memory_ms(3 * nbytes), label=f"look up {item.name}")
    ms = tasks.costs.gather_ms(nbytes, item.axis)
    tasks.transfer(Stream.COMPUTE, item.axis_name, nbytes, ms, (), f"exchange {item.name}", "lookup")


def _backward(tasks: Program, gathers: Gathers, reductions: Reductions, step: Step, schedule: Schedule) -> None:
    setting = tasks.setting
    for number, item in reversed([*enumerate(setting.sharded)]):
        again = step.recomputed.get(item.weight.block, ()) if setting.trace.ends_block(number) else ()
        for other in setting.trace.numbers[item.weight.block] if again else ():
            tasks.operations(setting.sharded[other].weight.before, "again before", setting.sharded[other])
            if other in again:
                _use(tasks, gathers, other)
        tasks.operations(item.weight.backward, "before backward of", item)
        unit = setting.unit_of[number]
        group = setting.units[unit]
        if setting.is_exchanged(unit):
            _exchanged_grad(tasks, reductions, item)
            continue
        if group.is_group and number == group.members[-1]:
            tasks.spend(tasks.host.use_us * _GROUP / 2)
            if group.members[0] not in step.recomputed.get(item.weight.block, ()):
                gathers.use(unit)
        for part in item.gradients()[:: 1 if schedule.wgrad_first else -1]:
            if not group.is_group:
                tasks.spend(tasks.host.use_us / 2)
                if part == "dgrad":
                    gathers.use(unit)
            tasks.multiply(item, part)
            if part == "wgrad" and not group.is_group:
                reductions.submit(item)
        if group.is_group and number == group.members[0]:
            tasks.spend(tasks.host.use_us * _GROUP / 2)
            reductions.submit(group)


def _exchanged_grad(tasks: Program, reductions: Reductions, item: Sharded) -> None:
    nbytes = item.axis.size * tasks.setting.tokens * item.weight.shape[1] * COMPUTE_NBYTES
    tasks.spend(tasks.host.use_us + tasks.host.collective_us)
    ms, label = tasks.costs.gather_ms(nbytes, item.axis), f"exchange {item.name}"
    tasks.wait(tasks.transfer(Stream.GATHER, item.axis_name, nbytes, ms, tasks.fork(), label, "lookup"))
    sums = tasks.costs.memory_ms(3 * nbytes + 2 * item.shard_numel * PARAM_NBYTES)
    tasks.add(Stream.COMPUTE, Load.COMPUTE, sums, label=f"wgrad {item.name}")
    reductions.sum_up([item], tasks.fork(), 2 * item.shard_numel * PARAM_NBYTES)


def _names(weights: Sequence[Sharded]) -> str:
    return " + ".join(weight.name.removesuffix(".weight") for weight in weights)
