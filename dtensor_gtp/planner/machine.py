"""A machine as the planner sees it: peaks, links, and the shares of them that real kernels reach.

Peaks are of data sheets. All other fields are measured, by ``--calibrate`` or by hand. Fields that were not measured on
this machine are carried over from another one, and the answer says "not calibrated". Presets and calibration files are
JSON of one format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from .._howto import printable
from .errors import PlanError, expect

GIB = 2**30
VERSION = 2
# Sequences up to the first length have ``Compute.attention``, from the second one on ``Compute.attention_long``.
ATTENTION_LENGTHS = (8192, 32768)
FACTORS = (1, 10)  # of contention, the least and the most
FORMATS = ("bf16", "float8", "float4")
_PRESETS = Path(__file__).parent / "machines"
# Operations of a GEMM and the share of the peak that it reaches, interpolated over the logarithm of the operations.
Curve = tuple[tuple[float, float], ...]


def _within(least: float, most: float, default: Any = MISSING) -> Any:
    """A number, and the least and the most that make sense: a file with another value was written in other units."""
    return field(default=default, metadata={"range": (least, most)})


@dataclass(frozen=True)
class Link:
    gb_s: float = _within(1e-3, 1e5)  # what a GPU sends, while it receives as much, in 10^9 bytes a second
    share: float = _within(0.001, 2)  # of that, what a collective of large messages reaches
    start_us: float = _within(0, 1e5)  # time before the first byte arrives; of copy engines, for each copy
    hop_us: float = _within(0, 1e4)  # for each further step of a ring or tree; for each peer in a barrier of copies


@dataclass(frozen=True)
class Compute:
    gemm: Curve
    float8_gemm: Curve  # of 8 bits and fewer, casts not included; a scale for each matrix
    float8_rowwise_gemm: Curve  # the same with a scale for each row
    attention: float = _within(0.001, 1)  # share of the bf16 peak that attention reaches; what is masked does not count
    hbm: float = _within(0.001, 1.5)  # share of the memory's bandwidth that elementwise kernels reach
    cast: float = _within(0.001, 1.5)  # the same of casts to formats of 8 bits and fewer, which read their input twice
    fused: float = _within(0, 1)  # share of the bytes of elementwise kernels that is left in compiled blocks
    kernel_us: float = _within(0, 1000)  # what each kernel takes beside: its begin, its end, and the gap before it
    attention_long: float = _within(0, 1, 0.0)  # for 32,768 tokens and more on one rank; 0 if it is the same
    # Of a GEMM's rate, what torch's ``grouped_mm`` reaches whose groups have as many operations: 4 x H200, e984528.
    ragged: float = _within(0.01, 1, 0.72)


@dataclass(frozen=True)
class Host:
    op_us: float = _within(0, 1e4)  # for one operation of torch in forward and backward, a view or a kernel
    use_us: float = _within(0, 1e5)  # for one use of a sharded weight in a pass, without calls of the process group
    fsdp_use_us: float = _within(0, 1e5)  # the same under ``fully_shard``, for each parameter
    collective_us: float = _within(0, 1e5)  # for one call of the process group
    copy_us: float = _within(0, 1e5)  # for one launch of copy engines
    replay_us: float = _within(0, 1e6)  # before the replay of a CUDA graph of a whole step


@dataclass(frozen=True)
class Contention:
    """How many times as long work takes while other work runs beside it."""

    gemm_beside_nccl: float = _within(*FACTORS)  # GEMMs beside a collective whose kernels take SMs
    gemm_beside_copy: float = _within(*FACTORS)  # GEMMs beside copy engines
    nccl_beside_gemm: float = _within(*FACTORS)  # such a collective beside GEMMs
    copy_beside_gemm: float = _within(*FACTORS)  # copies beside GEMMs
    wire: float = _within(*FACTORS)  # two collectives over the same link, each of them
    kernel: float = _within(*FACTORS)  # two kernels on one GPU, each of them: they share SMs and memory
    grouped: float = _within(*FACTORS)  # one collective of NCCL over several tensors, not one tensor of as many bytes


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind and the links between them.

    Args:
        name: For people.
        not_measured: Fields that are not of this machine, by name; ``("all",)`` for a preset.
        fast: The fast link, with NCCL.
        copy: The fast link, with copy engines.
        network: The link between domains.
        memory_gib: Memory of a GPU that the process can allocate.
        reserve_gib: Of that, what CUDA, NCCL and the allocator's fragments take.
        hbm_gb_s: Peak bandwidth of the memory.
        peak_tflops: Dense peak of matrix operations by format: "bf16", "float8", "float4".
        gpus_per_host: GPUs that can map each other's memory.
        gpus_per_domain: GPUs behind the fast link: a host, or a rack.
        jitter: Standard deviation of one rank's step, as a share of it: all wait for the slowest.
        spread: How far the answer may be off, as a share of it. Half of the range that is shown.
        watts: Power of a GPU that the peaks are for; 0 if it is not known.
        sources: Where the numbers come from: a text for each group of fields.

    Example:
        >>> machine = load_machine("h200")
        >>> machine.describe(), machine.gpus_per_host
        ('H200 141GB SXM (not calibrated)', 8)
        >>> machine.is_calibrated  # a preset: measure yours by --calibrate
        False
        >>> "fast" in machine.as_json()
        True
        >>> machine.with_limits(watts=500).describe()
        'H200 141GB SXM at 500 W (not calibrated)'
        >>> machine.has_ground, machine.is_carried_over  # runs on such GPUs were published
        (True, False)
    """

    name: str
    not_measured: tuple[str, ...]
    fast: Link
    copy: Link
    network: Link
    compute: Compute
    host: Host
    contention: Contention
    memory_gib: float = _within(0.01, 4096)
    reserve_gib: float = _within(0, 512)
    hbm_gb_s: float = _within(0.1, 1e5)
    peak_tflops: Mapping[str, float] = _within(1e-4, 1e5)
    gpus_per_host: int = _within(1, 1024)
    gpus_per_domain: int = _within(1, 65536)
    jitter: float = _within(0, 0.5)
    spread: float = _within(0, 0.9)
    watts: float = _within(0, 5000, 0.0)
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def memory_nbytes(self) -> int:
        """Memory of a GPU in bytes."""
        return int(self.memory_gib * GIB)

    def straggling(self, ranks: int) -> float:
        """By what share of a step the slowest of so many ranks is late: the expected maximum of normal times."""
        return self.jitter * math.sqrt(2 * math.log(ranks))

    def as_json(self) -> str:
        """What :func:`load_machine` reads."""
        return json.dumps({"version": VERSION} | asdict(self), indent=2) + "\n"

    def describe(self) -> str:
        """Its name, and whether it was measured."""
        if self.is_calibrated:
            return self.name
        return f"{self.name} ({'not' if self.is_preset else 'partly'} calibrated)"

    @property
    def is_preset(self) -> bool:
        """Whether nothing was measured on this machine."""
        return self.not_measured == ("all",)

    def with_limits(self, *, watts: float | None = None, network_gb_s: float | None = None) -> Machine:
        """The machine with less power, as much less of its peaks, or with another network.

        Args:
            watts: Limit of a GPU.
            network_gb_s: What a GPU sends to other domains, in 10^9 bytes a second.

        Raises:
            PlanError: The machine has no known power, or a limit is not below it.
        """
        machine = self
        if watts is not None:
            most = f"machine expects up to {self.watts:g} watts for {self.name}"
            expect(0 < watts <= self.watts, most, f"got {watts:g}. Pass less.")
            peaks = {kind: peak * watts / self.watts for kind, peak in self.peak_tflops.items()}
            machine = replace(machine, peak_tflops=peaks, watts=watts, name=f"{self.name} at {watts:g} W")
        if network_gb_s is not None:
            expected = "machine expects a network from 0.001 to 100000 GB/s"
            expect(0.001 <= network_gb_s <= 1e5, expected, f"got {network_gb_s:g}. Pass another.")
            machine = replace(machine, network=replace(machine.network, gb_s=network_gb_s))
        return machine

    @property
    def has_ground(self) -> bool:
        """Whether training on such GPUs was published or measured, so that times have a range."""
        return not self.is_preset or "ground" not in self.sources

    @property
    def is_carried_over(self) -> bool:
        """Whether its shares of peaks are those of another generation of GPUs."""
        return self.is_preset and "other generation" in self.sources.get("others", "")

    @property
    def is_calibrated(self) -> bool:
        """Whether all but the peaks were measured on this machine."""
        return not self.not_measured


def load_machine(text: str) -> Machine:
    """A preset by its name, or the machine of a JSON file.

    Args:
        text: One of :func:`preset_names`, or the path of a file of ``python -m dtensor_gtp.plan --calibrate``.

    Returns:
        The :class:`Machine`.

    Raises:
        PlanError: There is neither, or a field of the file is missing, unknown or out of range.

    Example:
        >>> load_machine("h100").gpus_per_host
        8
    """
    names = preset_names()
    if text.lower() in names:
        path = _PRESETS / f"{text.lower()}.json"
    else:
        path = Path(text)
    expected = f"machine expects one of {', '.join(names)}, or a file of --calibrate"
    expect(path.is_file(), expected, f"got {text!r}. Name one.")
    return machine_of(read_json(path, "machine expects a JSON file of --calibrate", "Write it anew."), str(path))


def read_json(path: Path, expected: str, remedy: str) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"{expected}, but {path} cannot be read ({error}). {remedy}") from None


def write_text(path: Path, text: str, who: str) -> None:
    try:
        path.write_text(text)
    except (OSError, ValueError) as error:  # the latter of names that no file can have
        raise PlanError(f"{who} cannot write {path} ({error}). Name another place.") from None


def preset_names() -> list[str]:
    """The machines that come with the package.

    Returns:
        Names that :func:`~dtensor_gtp.plan` and :func:`load_machine` take.

    Example:
        >>> "h100" in preset_names()
        True
    """
    return sorted(path.stem for path in _PRESETS.glob("*.json"))


def preset_of(device_name: str) -> str | None:
    """The preset of a GPU by its name, as ``torch.cuda.get_device_name`` gives it; None if there is none."""
    # The name of a GPU has no word of the domain that NVLink connects.
    words = {name: name.removesuffix("-nvl72").split("-") for name in preset_names()}
    known = [name for name, of_name in words.items() if all(word in device_name.lower() for word in of_name)]
    return max(known, key=len, default=None)  # a GB200 is no B200


def machine_of(content: Any, where: str) -> Machine:
    """The machine of what a file holds; ``where`` it is, for errors."""
    has_version = isinstance(content, dict) and "version" in content
    expect(has_version, "machine expects a JSON object with a version", f"{where} has none. Write it by --calibrate.")
    wrong = f"{where} is of version {content['version']!r}. Write it anew by --calibrate."
    expect(content["version"] == VERSION, f"machine expects a file of version {VERSION}", wrong)
    values = {name: value for name, value in content.items() if name not in ("version", "like")}
    if "like" in content:  # the preset of all that is not here
        names = preset_names()
        like = content["like"]
        expect(like in names, f"machine expects one of {', '.join(names)} as like", f"{where} has {like!r}. Name one.")
        base = asdict(load_machine(like))
        for name in ("fast", "copy", "network", "compute", "host", "contention"):
            if isinstance(given := values.get(name), dict):
                values[name] = base[name] | given
        values = base | values
    machine: Machine = _build(Machine, values, where)
    host = machine.gpus_per_host
    domain = machine.gpus_per_domain
    most = "machine expects gpus_per_host of at most gpus_per_domain"
    expect(host <= domain, most, f"{where} has {host} and {domain}. Mend the file.")
    expect("bf16" in machine.peak_tflops, "machine expects peak_tflops.bf16", f"{where} has no such field. Add it.")
    return machine


def _build(kind: Any, values: Any, where: str, prefix: str = "") -> Any:
    is_object = isinstance(values, dict)
    expect(is_object, f"machine expects an object as {prefix or 'file'}", f"{where} has {values!r}. Mend the file.")
    types = get_type_hints(kind)
    found = {}
    for name in values.keys() - types.keys():
        raise PlanError(f"machine has no field {prefix}{name}, but {where} does. Known are {', '.join(types)}.")
    for item in fields(kind):
        if item.name in values:
            bounds = item.metadata.get("range")
            found[item.name] = _checked(types[item.name], bounds, values[item.name], where, prefix + item.name)
        elif (item.default, item.default_factory) == (MISSING, MISSING):
            raise PlanError(f"machine expects a field {prefix}{item.name}, but {where} has none. Add it.")
    return kind(**found)


def _checked(kind: Any, bounds: Any, value: Any, where: str, name: str) -> Any:
    """The value of a field of this type, as a dataclass holds it."""

    def demand(is_fine: object, expected: str, given: Any = value) -> None:
        expect(is_fine, f"machine expects {expected} as {name}", f"{where} has {given!r}. Mend the file.")

    is_list = isinstance(value, list | tuple)
    is_object = isinstance(value, dict)
    if is_dataclass(kind):
        return _build(kind, value, where, f"{name}.")
    if kind is str:
        demand(isinstance(value, str), "a text")
        return printable(value)
    if kind == tuple[str, ...]:
        demand(is_list and all(isinstance(text, str) for text in value), "a list of names")
        return tuple(value)
    if kind == Mapping[str, str]:
        demand(is_object and all(isinstance(text, str) for text in value.values()), "an object of texts")
        return value
    if kind == Mapping[str, float]:
        demand(is_object, "an object of numbers")
        for key in value.keys() - set(FORMATS):
            raise PlanError(f"machine has no field {name}.{key}, but {where} does. Take it out.")
        return {key: _checked(float, bounds, each, where, f"{name}.{key}") for key, each in value.items()}
    if kind == Curve:
        demand(is_list and value, "pairs of numbers")
        for pair in value:
            demand(isinstance(pair, list | tuple) and len(pair) == 2 and all(map(_is_number, pair)), "pairs of numbers")
            demand(pair[0] > 0 and 0 < pair[1] <= 1, "positive operations and shares up to 1", pair)
        return tuple(sorted((float(number), float(share)) for number, share in value))
    least, most = bounds
    demand(_is_number(value) and least <= value <= most, f"a number from {least:g} to {most:g}")
    demand(kind is float or isinstance(value, int), "an integer")
    return value


def _is_number(value: Any) -> bool:
    # An integer of JSON may be larger than any float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
