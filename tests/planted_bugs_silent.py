"""Planted bugs of what would be wrong without a word: parameters and writes that escape, derivatives, orders."""

from __future__ import annotations

from planted_bugs_type import Bug

_PARAMS = "test_silent_params.py"
_PROGRAMS = "test_silent_programs.py"
_WRITES = "test_silent_writes.py"

SILENT = [
    Bug(
        "a layer is exported with the number of its weight",
        "ops/compiled_weight.py",
        "        if compat.is_exporting():",
        "        if False:",
        (f"{_PROGRAMS}::TestRecordings",),
    ),
    Bug(
        "second derivatives of a constant gradient are dropped",
        "_torch_compat/modes.py",
        "tuple(x if x is None else undifferentiable(x) for x in computed)",
        "tuple(computed)",
        (f"{_PROGRAMS}::TestSecondDerivatives",),
    ),
    Bug(
        "inputs of backward are not found",
        "_modules/backward_inputs.py",
        "            found += leaves",
        "            pass",
        (f"{_PROGRAMS}::TestInputsOfBackward::test_inputs_get_their_gradients",),
    ),
    Bug(
        "ranks do not compare their orders of uses",
        "_schedule/runtime.py",
        "                    self._compare_order(chain, uses)",
        "                    pass",
        (f"{_PROGRAMS}::TestOrderOfUses",),
    ),
    Bug(
        "parameters that are added without a registration escape",
        "_modules/frames.py",
        "now := (_registrations()[0], runtime.num_trained)",
        "now := (_registrations()[0], 0)",
        (f"{_PARAMS}::TestEscapedParameters::test_modules_that_come_later",),
    ),
    Bug(
        "the replaced parameter takes gradients",
        "_modules/shard_module.py",
        "    if old.requires_grad:",
        "    if False:",
        (f"{_PARAMS}::TestEscapedParameters::test_held_in_another_way",),
    ),
    Bug(
        "backward does not see that parameters were replaced",
        "_params/managed_param.py",
        "                self._refuse_backward_to(leaf)",
        "                pass",
        (f"{_PARAMS}::TestReplacedParameters",),
    ),
    Bug(
        "hooks from before sharding are lost",
        "_modules/shard_module.py",
        "    compat.move_hooks(old, new)",
        "    pass",
        (f"{_PARAMS}::TestParameterHooks::test_hooks_from_before_sharding_run",),
    ),
    Bug(
        "a hook on what a fused layer does not read never runs",
        "_schedule/attribute_reads.py",
        "if weight.is_fused and",
        "if False and",
        (f"{_PARAMS}::TestParameterHooks::test_hook_on_what_a_fused_layer_does_not_read",),
    ),
    Bug(
        "frozen in the last microbatch, earlier gradients are lost",
        "_params/managed_param.py",
        "        if (reduced := self.reduced) is None:",
        "        if (reduced := self.reduced) is None or not self.param.requires_grad:",
        (f"{_PARAMS}::TestFreezing::test_gradients_of_a_weight_that_is_frozen_later",),
    ),
    Bug(
        "a gradient at the parameter itself stays local",
        "_params/whole_param.py",
        "    param.add_local_grad(grad)\n    return (None,)",
        "    return None",
        (f"{_PARAMS}::TestDirectReads",),
    ),
    Bug(
        "parameters that a rank did not use are left out of the sum",
        "_schedule/runtime.py",
        "            param.awaits_reduction = param.param.requires_grad and (asked is None or id(leaf) in asked)",
        "            param.awaits_reduction = False",
        (f"{_PARAMS}::TestOtherParametersOnOtherRanks",),
    ),
    Bug(
        "a write in a forward is lost",
        "_schedule/attribute_reads.py",
        '                return written_to_no_effect(weight, "in a forward")',
        "                continue",
        (f"{_WRITES}::TestWritesInForward::test_a_write_to_what_is_read_is_refused",),
    ),
    Bug(
        "what was gathered ahead outlives a write",
        "_schedule/runtime.py",
        "            self.drop_prefetched_of([weight])",
        "            pass",
        (f"{_WRITES}::TestWritesInForward::test_momentum_encoders",),
    ),
    Bug(
        "a write between unshard and reshard is lost",
        "_modules/gtp_module.py",
        "        if written:",
        "        if False:",
        (f"{_WRITES}::TestWritesOutside::test_between_unshard_and_reshard",),
    ),
    Bug(
        "a weight that stays gathered keeps its old values",
        "_schedule/runtime.py",
        "            self._outdated.add(weight)",
        "            pass",
        (f"{_WRITES}::TestWritesOutside::test_shards_of_weights_that_stay_gathered",),
    ),
    Bug(
        "names of what ranks send are looked up in torch",
        "_comm/values.py",
        "    if not isinstance(dtype, torch.dtype):",
        "    if False:",
        ("test_values.py::test_what_is_sent_by_a_stranger_runs_nothing",),
    ),
]
