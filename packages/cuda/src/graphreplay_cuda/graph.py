"""CUDAGraph: one device graph, from its capture to its end."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from graphreplay import BackendUnavailableError, GraphReplayWarning
from graphreplay_cuda import driver, streams
from graphreplay_cuda.arguments import check_mode, check_pool, check_stream
from graphreplay_cuda.blocks import IfNode, WhileNode
from graphreplay_cuda.capture import Capture
from graphreplay_cuda.errors import GraphStateError
from graphreplay_cuda.pools import PoolHandle
from graphreplay_cuda.release import release
from graphreplay_cuda.staging import CopyNode, Staging


class CUDAGraph:
    """Device work that is captured once and launched as a whole, with loops and branches that the device decides on.

    ``capture_begin`` … ``capture_end`` take in what the calling thread puts on its current stream; ``replay`` launches
    it, ``reset`` frees it, and then another capture may begin. ``graph(...)`` does the first two around a block::

        g = CUDAGraph()
        with graph(g):
            y = model(static_x)
        static_x.copy_(x)
        g.replay()

    A graph may be replayed from any thread and stream; its launches run one after another. Arguments are checked
    without a device; whatever needs one raises BackendUnavailableError where there is none.
    """

    def __init__(self) -> None:
        self._capture: Capture | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._pool: PoolHandle | None = None
        self._device = torch.device("cuda")
        self._keep_alive: list[Tensor] = []
        self._copy_node: CopyNode | None = None
        self._staging: Staging | None = None
        self._last_stream: int | None = None
        self._process = 0
        self._lock = threading.RLock()
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
            stream: a side stream, or None for one that is kept for this on the current device. What the capture uses
                for the first time (cuDNN, cuSOLVER) must have run on it, or on any stream, before.

        Raises:
            ConfigurationError: a bad mode, pool or stream (a ValueError); the legacy default stream cannot be captured.
            BackendUnavailableError: there is no CUDA device.
            GraphStateError: the graph is captured or being captured already, or this thread or stream is.
            CaptureError: torch could not begin; everything is as before.
        """
        check_mode(capture_error_mode)
        check_stream(stream)
        given = check_pool(pool.pool_id if isinstance(pool, CUDAGraph) else pool)
        _require_device()
        if self._capture is not None or self._graph is not None:
            raise GraphStateError(f"capture_begin on a graph that {self._state()}; call reset() first, or take another")
        stream = stream or streams.dedicated_stream(torch.cuda.current_device())
        if torch.cuda.is_current_stream_capturing() or driver.is_capturing(stream.cuda_stream):
            raise GraphStateError(
                "the current stream or the one to capture is in a capture already; end that first, or pass another "
                "stream"
            )
        handle = given or PoolHandle(torch.cuda.graph_pool_handle())
        self._capture = Capture(stream, handle, capture_error_mode)
        self._pool, self._device, self._process = handle, stream.device, os.getpid()

    def capture_end(self) -> None:
        """Ends the capture and instantiates the graph; the stream of before is current again.

        Raises:
            GraphStateError: no capture is under way in this thread, or a conditional body is open. Nothing is changed.
            CaptureError: the capture holds what no graph can. It is given up; the graph is as new.
        """
        capture = self._capturing("capture_end")
        if capture.bodies.open:
            raise GraphStateError(
                f"capture_end with an open {capture.bodies.open[-1].kind} body; call "
                "end_capture_to_conditional_node() first, or reset() to give the capture up"
            )
        self._capture = None
        self._graph = capture.end()
        self._keep_alive = capture.keep_alive

    def instantiate(self) -> None:
        """Does nothing to a captured graph: ``capture_end`` has instantiated it.

        Raises:
            GraphStateError: it is not captured.
        """
        self._captured("instantiate")

    def reset(self) -> None:
        """Frees the executable graph and leaves its pool; a capture under way is given up. The graph is then as new.

        Waits for replays in flight. Inside someone else's capture the graph is freed after it. May be called at any
        time and again.
        """
        if self._capture is not None:
            self._capturing("reset")
            for trouble in self._give_up():
                warnings.warn(trouble, GraphReplayWarning, stacklevel=2)
        graph, self._graph = self._graph, None
        if graph is None:
            return
        assert self._pool is not None
        pool, device, last, keep_alive = self._pool, self._device, self._last_stream, self._keep_alive
        self._keep_alive, self._copy_node, self._staging, self._last_stream = [], None, None, None

        def free() -> None:
            if last is not None:
                torch.cuda.ExternalStream(last, device=device).synchronize()
            graph.reset()
            pool.leave()
            keep_alive.clear()

        release(graph, self._process, free)

    def __del__(self) -> None:
        if self._graph is not None:
            self.reset()

    # ---------------------------------------------------------------------------------------- launches

    def replay(self, stream: torch.cuda.Stream | None = None) -> None:
        """Launches the graph on the current stream of its device, or on ``stream``. Inputs that an earlier
        ``stage_and_launch`` copied are not copied again.

        Raises:
            ConfigurationError: ``stream`` is no stream of CUDA.
            GraphStateError: the graph is not captured, or the stream is being captured.
        """
        check_stream(stream, for_replay=True)
        graph = self._captured("replay")
        if stream is not None:
            with torch.cuda.stream(stream):
                return self.replay()
        with self._lock:
            if self._copy_node is not None:
                driver.ensure_context(self._device.index)
                self._copy_node.clear()
            self._launched()
            try:
                graph.replay()
            except RuntimeError as error:
                if torch.cuda.is_current_stream_capturing():
                    raise GraphStateError("a graph cannot be replayed inside a capture") from error
                raise

    def stage_and_launch(self, static_inputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Copies each input onto its static buffer and launches the graph on the current stream, in one go.

        Plain inputs (of the buffer's dtype, device, shape and strides) are copied by a kernel at the root of the graph;
        others are converted as ``copy_`` does: broadcast, strided, of another dtype or device. All inputs are read
        before any buffer is written, so they may overlap buffers. Right when called again without waiting, from any
        stream and thread. The first call adds the kernel to the graph, which instantiates it again.

        Args:
            static_inputs: tensors on the graph's device that the graph reads.
            inputs: as many tensors. Those on other devices are copied over first, which makes the host wait.

        Raises:
            ConfigurationError: a static input is no tensor on the device, or the lists differ in length.
            RuntimeError: ``copy_`` refuses an input, such as one of another shape. Nothing was copied.
            GraphStateError: the graph is not captured, or the stream is being captured.
        """
        self.staging(static_inputs).stage_and_launch(inputs)

    def staging(self, static_inputs: Sequence[Tensor]) -> Staging:
        """What ``stage_and_launch`` does, for one list of static inputs and many calls; see Staging. The same list
        gives the same object.

        Raises:
            ConfigurationError: a static input is no tensor on the device.
            GraphStateError: the graph is not captured.
        """
        graph = self._captured("stage_and_launch")
        with self._lock:
            if self._staging is None or not self._staging.serves(static_inputs):
                if self._copy_node is None:
                    if self._last_stream is not None:  # instantiating anew destroys what is in flight
                        torch.cuda.ExternalStream(self._last_stream, device=self._device).synchronize()
                    self._copy_node = CopyNode(graph, self._device)
                self._staging = Staging(self._copy_node, static_inputs, self._lock, self._launched)
            return self._staging

    # --------------------------------------------------------------------------------- conditional nodes

    def begin_capture_to_if_node(self, pred: Tensor) -> None:
        """Captures what follows into a body that runs where ``pred`` is True when a replay gets here.

        Args:
            pred: one bool on the graph's device. The graph keeps it alive, and each replay reads it.

        Raises:
            GraphStateError: no capture is under way in this thread.
            FeatureUnavailableError: the driver is older than CUDA 12.4.
            PredicateError, ConditionalBodyError: a bad predicate, or a stream outside the innermost open body.
        """
        self._capturing("begin_capture_to_if_node").bodies.begin("if", pred)

    def begin_capture_to_else_node(self) -> None:
        """Captures what follows into a body that runs where the predicate of the if body which has just ended is False.

        Raises:
            GraphStateError: no capture is under way in this thread.
            FeatureUnavailableError: the driver is older than CUDA 12.8.
            ConditionalBodyError: no if body has just ended.
        """
        self._capturing("begin_capture_to_else_node").bodies.begin_else(None)

    def begin_capture_to_while_node(self, pred: Tensor) -> None:
        """Captures what follows into a body that runs again and again: first if ``pred`` is True when a replay gets
        here, then as long as ``set_conditional_handle_for_current_node`` says. Arguments and errors as for if nodes."""
        self._capturing("begin_capture_to_while_node").bodies.begin("while", pred)

    def set_conditional_handle_for_current_node(self, pred: Tensor) -> None:
        """Has the innermost while body run again if ``pred`` is True when a replay gets here.

        Raises:
            GraphStateError: no capture is under way in this thread.
            PredicateError, ConditionalBodyError: a bad predicate, or no while body is innermost.
        """
        self._capturing("set_conditional_handle_for_current_node").bodies.set(pred)

    def end_capture_to_conditional_node(self) -> None:
        """Ends the innermost open body.

        Raises:
            GraphStateError: no capture is under way in this thread, or no body is open.
            ConditionalBodyError: a while body never sets its predicate (it stays open), or holds what no body can run
                (``capture_end`` will give the capture up).
        """
        self._capturing("end_capture_to_conditional_node").bodies.end()

    def if_node(self, pred: Tensor) -> IfNode:
        """``with graph.if_node(pred) as branch:`` captures a body as ``begin_capture_to_if_node`` does; right behind
        it, ``with branch.orelse():`` captures the other one."""
        return IfNode(self._capturing("if_node"), pred)

    def while_node(self, pred: Tensor) -> WhileNode:
        """``with graph.while_node(pred) as loop:`` captures a body as ``begin_capture_to_while_node`` does;
        ``loop.set(pred)``, its last step, decides about the next iteration."""
        return WhileNode(self._capturing("while_node"), pred)

    # ------------------------------------------------------------------------------------------- state

    @property
    def pool_id(self) -> PoolHandle:
        """The memory pool of the graph, to share it with others.

        Raises:
            GraphStateError: it has none: it is neither captured nor being captured.
        """
        if self._pool is None or (self._graph is None and self._capture is None):
            _require_device()
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
        with open(path, "w"):  # for the error that Python gives; the driver's says nothing
            pass
        driver.write_dot(graph.raw_cuda_graph(), os.fspath(path), verbose=self._verbose)

    def _give_up(self) -> list[str]:
        """Gives up the capture under way, if any. Returns what went wrong with that."""
        capture, self._capture = self._capture, None
        return [] if capture is None else capture.abort()

    def _state(self) -> str:
        return "is being captured" if self._capture else "is captured" if self._graph else "is not captured"

    def _captured(self, what: str) -> torch.cuda.CUDAGraph:
        graph = self._graph
        if graph is None:
            _require_device()
            raise GraphStateError(f"{what} on a graph that {self._state()}; capture into it first")
        if self._process != os.getpid():
            raise GraphStateError(f"{what} in a process forked after the capture; capture the graph in this one")
        return graph

    def _capturing(self, what: str) -> Capture:
        capture = self._capture
        if capture is None:
            _require_device()
            raise GraphStateError(f"{what} outside a capture into this graph; call capture_begin() first")
        if capture.thread != threading.get_ident():
            raise GraphStateError(f"{what} in another thread than capture_begin(); a capture ends where it began")
        return capture

    def _launched(self) -> torch.cuda.Stream | None:
        """Notes the current stream as the last one to launch on; returns the one before, if it was another."""
        before, self._last_stream = self._last_stream, torch._C._cuda_getCurrentRawStream(self._device.index)
        if before is None or before == self._last_stream:
            return None
        return torch.cuda.ExternalStream(before, device=self._device)


class graph:  # a function in all but name; frames of a generator would keep an error, and its tensors, alive
    """Captures a block into ``cuda_graph``: ``with graph(g): …``.

    Arguments and errors are those of ``capture_begin`` and ``capture_end``. If the block raises, the capture is given
    up, all is as before, and the error goes on.
    """

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: tuple[int, int] | CUDAGraph | torch.cuda.CUDAGraph | None = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "global",
    ) -> None:
        self._graph = cuda_graph
        self._arguments = pool, capture_error_mode, stream

    def __enter__(self) -> CUDAGraph:
        self._graph.capture_begin(*self._arguments)
        return self._graph

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self._end()
        else:
            for trouble in self._graph._give_up():
                error.add_note(f"and {trouble}")

    def _end(self) -> None:
        try:
            self._graph.capture_end()
        except GraphStateError:  # a body was left open; the block is over, so nobody can end it
            self._graph._give_up()
            raise


def graph_pool_handle() -> PoolHandle:
    """A name for a memory pool that several graphs share; torch takes it as well.

    Raises:
        BackendUnavailableError: there is no CUDA device.
    """
    _require_device()
    return PoolHandle(torch.cuda.graph_pool_handle())


def is_current_stream_capturing() -> bool:
    """Whether the current stream is being captured, by a CUDAGraph or anyone else; False without a CUDA device."""
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _require_device() -> None:
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        why = "no usable NVIDIA GPU or driver" if built else "this PyTorch is built without CUDA"
        raise BackendUnavailableError(f"CUDA graphs need a CUDA device: {why}")
