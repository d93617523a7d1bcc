"""What the demo prints: progress while it works, a row for each request, statistics and the conclusion."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TextIO

from graphreplay import GraphedForward
from graphreplay.forward import DISABLE_VARIABLE
from graphreplay_harness.demo_models import MAX_TOKENS, Models
from graphreplay_harness.demo_options import Options
from graphreplay_harness.demo_requests import Outcome, Request

_SHOWN = 40
"""Characters of a prompt in its row."""

_REASONS = 5
"""Of a wrapper's misses and eager calls."""

_HEADINGS = """
                                            eager       graphed ms          largest
request tokens latents captures replays        ms capturing replaying    difference  prompt"""


class Report:
    """Writes lines, and on a terminal also says in place what is being done."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty()
        self._start = time.perf_counter()

    def doing(self, what: str) -> None:
        """Shows what is being done, on a terminal, until the next line."""
        if self._live:
            self._out.write(f"\r\x1b[K{self._clock()} {what} ...")
            self._out.flush()

    def introduction(self, options: Options, off: bool) -> None:
        self._line(
            f"graphreplay demo on {options.device} in {str(options.dtype).removeprefix('torch.')}: "
            f"prompts {len(options.prompts)}, Euler steps {options.steps}, seed {options.seed}"
        )
        if options.empty_lines:
            self._line(f"Empty lines skipped: {options.empty_lines}")
        if off:
            self._line(f"Graphs are off, since {DISABLE_VARIABLE} is set: every call is a plain forward.")
        elif options.device.type == "cpu":
            self._line("On a CPU the reference backend shows correctness, not speed: a replay costs what eager costs.")

    def loaded(self, models: Models, requests: Sequence[Request]) -> None:
        self._line(f"{self._clock()} encoder: all-MiniLM-L6-v2, {models.encoder_weights}")
        self._line(f"{self._clock()} DiT: StableAudioDiTModel, {models.layers} layers, seeded random weights")
        for request in requests:
            if request.cut:
                self._line(f"Prompt {request.number} is longer than {MAX_TOKENS} tokens; the rest of it is cut off.")

    def headings(self) -> None:
        self._line(_HEADINGS)

    def outcome(self, outcome: Outcome) -> None:
        request = outcome.request
        self._line(
            f"{request.number:>7} {request.tokens:>6} {request.length:>7} {outcome.captures:>8} {outcome.replays:>7} "
            f"{outcome.eager_ms:>9.1f} {outcome.first_ms:>9.1f} {outcome.again_ms:>9.1f} {outcome.difference:>13.3g}  "
            f"{_shown(request.prompt)}"
        )

    def statistics(self, *wrappers: GraphedForward) -> None:
        self._line()
        for wrapper in wrappers:
            stats = wrapper.stats()
            self._line(
                f"{wrapper.name}: {stats['graphs']} graphs in {stats['bytes'] / 2**20:.1f} MiB, "
                f"{stats['captures']} captures, {stats['replays']} replays, {stats['evictions']} evictions, "
                f"{stats['eager_calls']} eager calls"
            )
            reasons = [
                f"    {what} {count} ×: {reason}"
                for what in ("miss", "eager")
                for reason, count in stats[f"{what}_reasons"].items()
            ]
            for text in reasons[:_REASONS]:
                self._line(text)
            if len(reasons) > _REASONS:
                self._line(f"    and {len(reasons) - _REASONS} reasons more")

    def forward(self, request: Request, repeats: int, eager_ms: float, graphed_ms: float) -> None:
        self._line(
            f"One DiT forward at {request.length} latents, median of {repeats}: eager {eager_ms:.2f} ms, "
            f"graphed {graphed_ms:.2f} ms, ratio {eager_ms / graphed_ms:.2f}"
        )

    def conclusion(self, outcomes: Sequence[Outcome], allowed: float, passed: bool) -> None:
        """The verdict. The allowed difference is a fraction of what the steps added to the noise."""
        worst = max(outcome.difference for outcome in outcomes)
        limit = min(allowed * outcome.added for outcome in outcomes)
        self._line(f"Largest difference of graphed from eager latents: {worst:.3g} (allowed: {limit:.3g})")
        self._line(f"{self._clock()} {'passed' if passed else 'failed'}")

    def _line(self, text: str = "") -> None:
        if self._live:
            self._out.write("\r\x1b[K")
        self._out.write(text + "\n")
        self._out.flush()

    def _clock(self) -> str:
        return f"[{time.perf_counter() - self._start:5.1f} s]"


def _shown(prompt: str) -> str:
    """The prompt, shortened, without characters that would move the cursor."""
    text = "".join(sign if sign.isprintable() else " " for sign in prompt)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
