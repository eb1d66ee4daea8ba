"""Planted bugs of shards that live on the host, and of what the host checks and forgets."""

from __future__ import annotations

from planted_bugs_type import Bug

HOST = [
    Bug(
        "shard on the host is sent itself",
        "_params/gather.py",
        "        shard = weight.shard if copy is None else copy",
        "        shard = weight.shard",
        ("test_gtp_shard_offload.py::TestOffload::test_copies_are_made",),
    ),
    Bug(
        "gradient of a second use does not reach the host",
        "_params/managed_param.py",
        "            self._more_reduced.append(reduced)",
        "            pass",
        ("test_gtp_shard_offload.py::TestOffload::test_same_bits_as_without",),
    ),
    Bug(
        "whole parameter on the host is copied once",
        "_params/whole_param.py",
        "            compat.local_part(self.leaf.detach()).data.copy_(self.shard, non_blocking=True)",
        "            pass",
        ("test_gtp_shard_offload.py::TestOffload::test_same_bits_as_without",),
    ),
    Bug(
        "host does not wait for its gradients",
        "_schedule/reduce_gradients.py",
        "            self._comm.finish_on_host()",
        "            pass",
        ("test_gtp_shard_offload.py::TestOffload::test_copies_are_made",),
    ),
    Bug(
        "host does not wait for copies of its shards",
        "_schedule/runtime.py",
        "            self._drop_prefetched()\n            self.comm.finish_uploads()",
        "            self._drop_prefetched()",
        ("test_gtp_shard_offload.py::TestOffload::test_copies_are_made",),
    ),
    Bug(
        "last reductions fail and leave gradients",
        "_schedule/runtime.py",
        "        with self._forgetting_on_failure():\n            self.grads.launch_waiting()",
        "        if True:\n            self.grads.launch_waiting()",
        ("test_gtp_shard_runtime.py::TestPasses::test_exception_at_the_end_of_backward_leaves_nothing_behind",),
    ),
    Bug(
        "failed reduction hides the others",
        "_comm/context.py",
        "            except RuntimeError as error:\n",
        "            except ZeroDivisionError as error:\n",
        ("test_gtp_shard_runtime.py::TestPasses::test_exception_at_the_end_of_backward_leaves_nothing_behind",),
    ),
    Bug(
        "finite skips gradients that travel alone",
        "_schedule/reduce_gradients.py",
        "                self._look_at([weight], [buffer])\n",
        "                pass\n",
        ("test_debugging_aids.py::TestFinite::test_gradients_of_sharded_and_whole_parameters",),
    ),
    Bug(
        "finite looks at padding",
        "_schedule/reduce_gradients.py",
        "(weight.fqn, weight.layout.full_view(full))",
        "(weight.fqn, full)",
        ("test_debugging_aids.py::TestFinite::test_padding_is_not_looked_at",),
    ),
    Bug(
        "finite skips quantized weights",
        "_params/gather.py",
        " or isinstance(s, WeightWithRecipe)",
        "",
        ("test_debugging_aids.py::TestFinite::test_weights_in_every_storage",),
    ),
    Bug(
        "kernel is tried before it is loaded",
        "_comm/addends.py",
        "        thread.join()",
        "        pass",
        ("test_addends.py::test_a_kernel_is_loaded_once_and_tried_when_that_is_done",),
    ),
]
