"""CUDAGraph: one device graph, from its capture to its end."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from graphreplay import ConfigurationError, GraphReplayWarning, NotCopyableError
from graphreplay_cuda import driver, streams
from graphreplay_cuda.arguments import check_mode, check_pool, check_stream, require_device
from graphreplay_cuda.capture import IN_USE, Capture
from graphreplay_cuda.copynode import CopyNode, HandOut
from graphreplay_cuda.current import is_capturing_here
from graphreplay_cuda.errors import GraphStateError
from graphreplay_cuda.launches import Launches
from graphreplay_cuda.nodes import ConditionalNodes
from graphreplay_cuda.pools import PoolHandle
from graphreplay_cuda.release import release
from graphreplay_cuda.staging import Staging, as_list


class CUDAGraph(ConditionalNodes):
    """Device work that is captured once and launched as a whole, with loops and branches that the device decides on.

    ``capture_begin`` … ``capture_end`` take in what the calling thread puts on its current stream; ``replay`` launches
    it, ``reset`` frees it, and then another capture may begin. ``graph(...)`` does the first two around a block::

        g = CUDAGraph()
        with graph(g):
            y = model(static_x)
        static_x.copy_(x)
        g.replay()

    A graph reads and writes tensors by address. It keeps alive what was made inside the capture and the predicates of
    its nodes; weights, inputs and the like stay with the caller. It may be replayed from any thread and stream, and its
    launches run one after another. Arguments are checked without a device; whatever needs one raises
    BackendUnavailableError where there is none.
    """

    def __init__(self) -> None:
        self._capture: Capture | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._pool: PoolHandle | None = None
        self._keep_alive: list[Tensor] = []
        self._launches = Launches(torch.device("cuda"))
        self._launched = False
        self._copy_node: CopyNode | None = None
        self._staging: Staging | None = None
        self._hand_out: HandOut | None = None
        self._process = 0
        self._verbose = False

    # ---------------------------------------------------------------------------------------- capture

    def capture_begin(
        self,
        pool: tuple[int, int] | CUDAGraph | torch.cuda.CUDAGraph | None = None,
        capture_error_mode: str = "global",
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Begins to capture what this thread puts on ``stream``, which becomes current until the capture ends.

        Args:
            pool: where tensors made meanwhile live. None: a fresh pool of this graph; a handle from
                ``graph_pool_handle()``, the ``pool_id`` of a graph, or a graph: that pool, shared. Graphs that share a
                pool reuse each other's intermediate memory, so they must not run at the same time.
            capture_error_mode: what of other work CUDA forbids meanwhile: "global" (unsafe calls of any thread),
                "thread_local" (of this thread) or "relaxed" (nothing).
            stream: a side stream, or None for one that is kept for this on the current device. Graphs captured on one
                stream share the workspace that cuBLAS has for it: replay two at the same time only if each was captured
                on a stream of its own. Run the work once before, eagerly: libraries initialize themselves at first use,
                which a capture forbids; but on another stream than you pass here, since a workspace that this one got
                outside of captures is lost to its graphs where PyTorch frees it (``_cuda_clearCublasWorkspaces``).

        The capture comes behind the work of the current stream, and at its end the host waits for that. Wait yourself
        for replays in flight on further streams if they draw random numbers: as a capture begins, PyTorch (2.11) writes
        the seed that all graphs of the device read.

        Raises:
            ConfigurationError: a bad mode, pool or stream (a ValueError); the legacy default stream cannot be captured.
            BackendUnavailableError: there is no CUDA device.
            GraphStateError: the graph is captured or being captured already, or this thread or stream is.
                Or another capture into the pool is under way, or the graph that is to share its pool has none.
            CaptureError: torch could not begin; everything is as before.
        """
        check_mode(capture_error_mode)
        check_stream(stream)
        given = check_pool(pool.pool_id if isinstance(pool, CUDAGraph) else pool)
        require_device()
        if self._capture is not None or self._graph is not None:
            raise GraphStateError(f"capture_begin on a graph that {self._state()}; call reset() first, or take another")
        stream = stream or streams.dedicated_stream(torch.cuda.current_device())
        if is_capturing_here() or driver.is_capturing(stream.cuda_stream):
            raise GraphStateError(IN_USE)
        handle = given or PoolHandle(torch.cuda.graph_pool_handle())
        self._capture = Capture(stream, handle, capture_error_mode)
        self._pool, self._launches, self._process = handle, Launches(stream.device), os.getpid()
        self._launched = False

    def capture_end(self) -> None:
        """Ends the capture and instantiates the graph; the stream of before is current again.

        Raises:
            GraphStateError: no capture is under way in this thread, or a conditional body is open. Nothing is changed.
            CaptureError: the capture holds what no graph can. It is given up; the graph is as new.
        """
        self._end_capture(instantiate=True)

    def _end_capture(self, *, instantiate: bool) -> None:
        """As ``capture_end``, which leaves the instantiation to ``staging`` where that comes next."""
        capture = self._capturing("capture_end")
        if capture.bodies.open:
            raise GraphStateError(
                f"capture_end with an open {capture.bodies.open[-1].kind} body; call "
                "end_capture_to_conditional_node() first, or reset() to give the capture up"
            )
        self._capture = None
        self._graph = capture.end(instantiate=instantiate)
        self._keep_alive = capture.keep_alive

    def instantiate(self) -> None:
        """Does nothing to a captured graph: ``capture_end`` has instantiated it.

        Raises:
            GraphStateError: it is not captured.
        """
        self._captured("instantiate")

    def reset(self) -> None:
        """Frees the executable graph and leaves its pool; a capture under way is given up. The graph is then as new.

        Waits for replays in flight. Inside someone else's capture, or during one into its pool, the graph is freed
        after that. May be called at any time and again.
        """
        for trouble in self._give_up("reset"):
            warnings.warn(trouble, GraphReplayWarning, stacklevel=2)
        with self._launches.lock:
            graph, self._graph = self._graph, None
            if graph is None:
                return
            if self._copy_node is not None:
                self._copy_node.close("on a graph that was reset; take staging() of a captured graph")
            pool, launches, keep_alive = self._pool, self._launches, self._keep_alive
            self._keep_alive, self._copy_node, self._staging, self._hand_out = [], None, None, None
        assert pool is not None

        def free() -> None:
            try:
                launches.wait()
            finally:
                pool.leave(graph.reset)
                keep_alive.clear()

        release(graph, self._process, launches.is_blocked, free)

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        capture = getattr(self, "_capture", None)
        if getattr(self, "_graph", None) is not None or (capture and capture.thread == threading.get_ident()):
            self.reset()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # deepcopy, copy and pickle all come here.
        raise NotCopyableError("a CUDAGraph cannot be copied or pickled; capture another one")

    # ---------------------------------------------------------------------------------------- launches

    def replay(self, stream: torch.cuda.Stream | None = None) -> None:
        """Launches the graph on the current stream of its device, or on ``stream``. Inputs that an earlier
        ``stage_and_launch`` copied are not copied again.

        Raises:
            ConfigurationError: ``stream`` is no stream of the graph's device.
            GraphStateError: the graph is not captured, or the stream is being captured.
        """
        check_stream(stream, for_replay=True)
        self._captured("replay")
        if stream is not None:
            if stream.device != self._launches.device:
                raise ConfigurationError(f"a stream of {stream.device} for a graph on {self._launches.device}")
            with torch.cuda.stream(stream):
                self.replay()
            return
        driver.ensure_context()
        with self._launches.lock:
            graph = self._captured("replay")  # another thread may have reset it
            self._launches.refuse_capture("replay")
            if self._copy_node is not None:
                self._copy_node.clear()
            self._launches.take_turn()
            self._launched = True
            graph.replay()

    def stage_and_launch(self, static_inputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Copies each input onto its static buffer and launches the graph on the current stream, in one go.

        Plain inputs (of the buffer's dtype, device, shape and strides) are copied by a kernel at the root of the graph;
        others are converted as ``copy_`` does: broadcast, strided, of another dtype or device. All inputs are read
        before any buffer is written, so they may overlap buffers. Right when called again without waiting, from any
        stream and thread. The first call adds the kernel to the graph, which instantiates it again (a few milliseconds
        for a thousand nodes). Where the inputs are known to be plain, ``staging(static_inputs).launch(inputs)`` spares
        the checks.

        Args:
            static_inputs: tensors on the graph's device that the graph reads.
            inputs: as many tensors. Those on other devices are copied over first, which makes the host wait.

        Raises:
            ConfigurationError: a static input is no plain tensor on the device or overlaps itself, an input is no
                tensor or has no memory, or the lists differ in length.
            RuntimeError: ``copy_`` refuses an input, such as one of another shape. Nothing was copied.
            GraphStateError: the graph is not captured, or the stream is being captured.
        """
        self.staging(static_inputs).stage_and_launch(inputs)

    def staging(self, static_inputs: Sequence[Tensor]) -> Staging:
        """What ``stage_and_launch`` does, for one list of static inputs and many calls; see Staging. The list of
        the last call gives the same object again.

        Raises:
            ConfigurationError: a static input is no plain tensor on the device, or overlaps itself.
            GraphStateError: the graph is not captured.
        """
        graph, static_inputs = self._captured("stage_and_launch"), as_list("static inputs", static_inputs)
        with self._launches.lock:
            if self._staging is None or not self._staging.serves(static_inputs):
                self._launches.refuse_capture("staging")  # it loads a kernel, and instantiates
                self._copy_node = self._copy_node or CopyNode(
                    graph, self._launches, self._hand_out, in_flight=self._launched
                )
                self._staging = Staging(self._copy_node, static_inputs)
            return self._staging

    def hand_out(self, outputs: Sequence[Tensor], noted: Tensor) -> None:
        """Has each ``staging().run()`` copy these static outputs to tensors that it is given. Comes before the first
        ``staging()``; see HandOut for the arguments.

        Raises:
            GraphStateError: the graph is not captured, or has been staged already.
        """
        self._captured("hand_out")
        if self._copy_node is not None:
            raise GraphStateError("hand_out after staging(), which has ended the graph; call it before the first one")
        with driver.relaxed():
            self._hand_out = HandOut(self._launches.device.index, outputs, noted) if outputs else None
        self._keep_alive.append(noted)

    def _take_turns_with(self, launches: Launches) -> None:
        """Has the launches of this graph count among these. Comes before its first one."""
        assert self._copy_node is None
        assert not self._launched
        self._launches = launches

    # ------------------------------------------------------------------------------------------- state

    @property
    def pool_id(self) -> PoolHandle:
        """The memory pool of the graph, to share it with others.

        Raises:
            GraphStateError: it has none: it is neither captured nor being captured.
        """
        if self._pool is None or (self._graph is None and self._capture is None):
            require_device()
            raise GraphStateError(f"pool_id of a graph that {self._state()}; it has a pool from capture_begin on")
        return self._pool

    def enable_debug_mode(self) -> None:
        """Has ``debug_dump`` write all that the driver knows of each node, such as kernel arguments."""
        self._verbose = True

    def debug_dump(self, path: str | os.PathLike[str]) -> None:
        """Writes the graph as a DOT file, the bodies of conditional nodes included.

        Raises:
            GraphStateError: the graph is not captured.
            OSError: the file cannot be written.
        """
        graph = self._captured("debug_dump")
        driver.ensure_context()
        with open(path, "w"):  # for the error that Python gives; the driver's says nothing
            pass
        driver.write_dot(graph.raw_cuda_graph(), os.fspath(path), verbose=self._verbose)

    def _give_up(self, what: str) -> list[str]:
        """Gives up the capture under way, if any, for ``what`` the user does. Returns what went wrong with that.

        Raises:
            GraphStateError: it is under way in another thread.
        """
        if self._capture is None:
            return []
        capture = self._capturing(what)
        self._capture = None
        return capture.abort()

    def _state(self) -> str:
        return "is being captured" if self._capture else "is captured" if self._graph else "is not captured"

    def _captured(self, what: str) -> torch.cuda.CUDAGraph:
        graph = self._graph
        if graph is None:
            require_device()
            raise GraphStateError(f"{what} on a graph that {self._state()}; capture into it first")
        if self._process != os.getpid():
            raise GraphStateError(f"{what} in a process forked after the capture; capture the graph in this one")
        return graph

    def _capturing(self, what: str) -> Capture:
        capture = self._capture
        if capture is None:
            require_device()
            raise GraphStateError(f"{what} outside a capture into this graph; call capture_begin() first")
        if capture.thread != threading.get_ident():
            raise GraphStateError(f"{what} in another thread than capture_begin(); a capture ends where it began")
        return capture
