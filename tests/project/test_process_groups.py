"""No code of the package communicates over a group that it was not given: an AST scan, checked on bad snippets."""

import ast
import re

import pytest
from sources import PACKAGE, SOURCES, dotted, nodes, parsed

FORBIDDEN = re.compile(
    "WORLD|GroupMember|_get_default_group|_get_default_store|_world|default_pg|init_device_mesh|init_process_group|"
    "monitored_barrier"
)
# Functions of torch.distributed that take the default group unless they are given one.
NEED_A_GROUP = re.compile(
    "all_gather|all_gather_coalesced|all_gather_into_tensor|all_gather_object|all_reduce|all_reduce_coalesced|"
    "all_to_all|all_to_all_single|barrier|batch_isend_irecv|broadcast|broadcast_object_list|gather|gather_object|irecv|"
    "isend|recv|reduce|reduce_scatter|reduce_scatter_tensor|scatter|scatter_object_list|send|"
    "get_backend|get_group_rank|get_process_group_ranks|get_world_size"
)
GROUP_IS_FIRST = {"get_backend", "get_group_rank", "get_process_group_ranks", "get_world_size"}
# The one place that makes meshes, of the whole world where nobody has made one; it communicates over none of them.
MAKES_MESHES = {
    "_comm/process_groups.py": ("init_device_mesh", "init_process_group", "get_world_size", "get_backend"),
    "elastic/regroup.py": ("init_process_group", "get_backend"),
}
# To abandon all process groups of a process, of which some ranks are gone, is not to communicate in any of them.
LEAVES_THEM = {"_torch_compat/groups.py": ("_world",)}


def findings(tree: ast.Module) -> list[str]:
    """Lines that use, or may use, a process-global group."""
    found = []
    for node in nodes(tree):
        names = {getattr(node, "attr", ""), getattr(node, "id", "")}
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.name.rpartition(".")[2] for alias in node.names}
        found += [f"line {node.lineno}: {name}" for name in names if FORBIDDEN.fullmatch(name)]
        if isinstance(node, ast.Call):
            found.extend(_call_findings(node))
    return found


def _call_findings(call: ast.Call) -> list[str]:
    function = call.func
    is_dist = isinstance(function, ast.Attribute) and dotted(function.value) in ("dist", "torch.distributed")
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    groups = [keyword.value for keyword in call.keywords if keyword.arg == "group"]
    if name in GROUP_IS_FIRST:
        groups += call.args[:1]
    is_given = any(not (isinstance(group, ast.Constant) and group.value is None) for group in groups)
    if is_dist and NEED_A_GROUP.fullmatch(name) and not is_given:
        return [f"line {call.lineno}: {name} without a group"]
    # The ranks of a new group must be those of a group that was passed, and nobody else may have to join.
    is_local = any(keyword.arg == "use_local_synchronization" for keyword in call.keywords)
    if name == "new_group" and not (is_local and (call.args or any(k.arg == "ranks" for k in call.keywords))):
        return [f"line {call.lineno}: new_group of the whole world"]
    return []


@pytest.mark.parametrize(
    "source",
    [
        "dist.all_reduce(t)",
        "dist.all_reduce(t, group=None)",
        "torch.distributed.broadcast(t, 0)",
        "dist.all_gather_object(out, x, async_op=False)",
        "n = dist.get_world_size()",
        "n = dist.get_world_size(None)",
        "g = dist.group.WORLD",
        "from torch.distributed.distributed_c10d import _get_default_group",
        "g = c10d._get_default_group()",
        "mesh = init_device_mesh('cpu', (4,))",
        "from torch.distributed.device_mesh import init_device_mesh",
        "g = dist.new_group()",
        "g = dist.new_group([0, 1])",
        "dist.barrier()",
    ],
)
def test_scan_finds_global_groups(source: str) -> None:
    assert findings(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "dist.all_reduce(t, group=mesh.get_group())",
        "n = dist.get_world_size(group)",
        "rank = dist.get_rank()",
        "g = dist.new_group(ranks, use_local_synchronization=True)",
        "x = tensors.gather(0, index)",
    ],
)
def test_scan_accepts_groups_that_were_passed(source: str) -> None:
    assert findings(ast.parse(source)) == []


def test_r11_package_uses_no_process_global_group() -> None:
    found = {path.relative_to(PACKAGE).as_posix(): findings(parsed(path)) for path in SOURCES}
    for name, allowed in {**MAKES_MESHES, **LEAVES_THEM}.items():
        found[name] = [line for line in found.get(name, []) if line.split()[2] not in allowed]
    assert {name: lines for name, lines in found.items() if lines} == {}
