"""The contract, kept by the reference backend on the CPU."""

from typing import Any

from graphreplay import ReferenceGraphedForward
from graphreplay.testing.contract import BackendContract


class TestReference(BackendContract):
    cls = ReferenceGraphedForward
    device = "cpu"


class TestVerified(BackendContract):
    """The same with every replay compared with eager: results, buffers, random numbers and counts are no others."""

    # These count runs of the forward, of which there are more here; or pass a variant that tells one object from
    # another and replay the first when the second is in place, where the comparison sides with the second.
    test_context_surrounds_captures_and_nothing_else = None
    test_nested_call_becomes_part_of_the_outer_graph = None
    test_memory_of_a_closure_lives_as_long_as_its_graph = None

    cls = ReferenceGraphedForward
    device = "cpu"

    def wrap(self, module: Any, **options: Any) -> Any:
        return super().wrap(module, **{"verify": "always", **options})
