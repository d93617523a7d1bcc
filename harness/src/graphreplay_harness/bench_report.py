"""What samples of a benchmark amount to: medians, quartiles, ratios, and the text of a report. No device is needed.

Samples are microseconds, by measure ("host", "device", "queued") and contender.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

BARE = "bare replay (torch)"
EACH = "copy_ each, replay"
FOREACH = "_foreach_copy_, replay"
CHECKED = "stage_and_launch"
LAUNCH = "staging.launch"
OURS = "bare replay (ours)"
COPY = "_foreach_copy_ alone"
NOTHING = "nothing"
CONTENDERS = (BARE, EACH, FOREACH, CHECKED, LAUNCH, OURS, COPY, NOTHING)

MEASURES = {"host": "host us (quartiles)", "device": "device us (quartiles)", "queued": "back to back us (quartiles)"}
"""Their headings in a table."""

TARGET_INPUTS = 15
TARGET_HOST = 2.2
"""How many bare replays a launch with so many inputs may cost the host."""
TARGET_DEVICE = 1.05
"""How many bare replays, beside the copy, it may cost the device."""

Samples = Mapping[str, Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class Spread:
    """Microseconds: the median, and the quartiles around it."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:8.2f} ({self.low:.2f} to {self.high:.2f})"


def spread(samples: Sequence[float]) -> Spread:
    """The median and the quartiles of at least one sample."""
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0])
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(median, low, high)


Summary = dict[str, dict[str, Spread]]


def summarize(samples: Samples) -> Summary:
    """The spread of each measure of each contender."""
    return {measure: {name: spread(each) for name, each in of.items()} for measure, of in samples.items()}


@dataclass(frozen=True)
class Verdict:
    """What a summary of the contenders says about ``launch``."""

    host_ratio: float
    """Host time of a launch, in bare replays of torch."""
    device_extra_us: float
    """Device time of a launch beyond a bare replay."""
    copy_us: float
    """Device time of copying the same tensors alone: the bytes' own time."""
    bandwidth_gb_s: float
    """Of that copy: bytes read and bytes written, in 10**9 bytes a second."""
    device_us: float
    """Device time of a launch."""
    device_limit_us: float
    """What it may be."""


def judge(summary: Summary, nbytes: int) -> Verdict:
    """Compares a launch with a bare replay. ``nbytes`` is the size of all inputs together."""
    host, device = ({name: each.median for name, each in summary[measure].items()} for measure in ("host", "device"))
    return Verdict(
        host_ratio=host[LAUNCH] / host[BARE],
        device_extra_us=device[LAUNCH] - device[BARE],
        copy_us=device[COPY],
        bandwidth_gb_s=2 * nbytes / device[COPY] / 1e3,
        device_us=device[LAUNCH],
        device_limit_us=TARGET_DEVICE * device[BARE] + device[COPY],
    )


@dataclass(frozen=True)
class Result:
    """The samples of one number of inputs, and what they amount to."""

    inputs: int
    nbytes: int
    """Of all inputs together."""
    samples: Samples
    summary: Summary
    verdict: Verdict

    @classmethod
    def of(cls, inputs: int, nbytes: int, samples: Samples) -> Result:
        summary = summarize(samples)
        return cls(inputs, nbytes, samples, summary, judge(summary, nbytes))

    def as_json(self) -> dict[str, Any]:
        """All of it, to the nanosecond."""
        return rounded(asdict(self))  # type: ignore[no-any-return]


def rounded(value: Any) -> Any:
    """A tree of dicts and lists with its floats to three places."""
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


def report(results: Sequence[Result]) -> str:
    """Ratios first, then a table for each number of inputs, then how the target is met, if it was measured."""
    lines = [
        "staging.launch against a bare replay; the bytes' own time is that of _foreach_copy_ alone, on the device:"
    ]
    for result in results:
        lines.append(
            f"{counted(result.inputs)}: host {result.verdict.host_ratio:.2f} times, "
            f"device {result.verdict.device_extra_us:+.2f} us; "
            f"the bytes' own time {result.verdict.copy_us:.2f} us ({result.verdict.bandwidth_gb_s:.0f} GB/s)"
        )
    for result in results:
        lines += ["", f"{counted(result.inputs)}, {result.nbytes / 2**20:.2f} MiB", *table(result.summary)]
    targets = [line for result in results if result.inputs == TARGET_INPUTS for line in target(result.verdict)]
    return "\n".join([*lines, *([""] if targets else []), *targets])


def target(verdict: Verdict) -> Iterable[str]:
    """How a launch stands to its target."""
    yield f"host: {verdict.host_ratio:.2f} times bare replay (target {TARGET_HOST})"
    yield (
        f"device: {verdict.device_us:.2f} us against {TARGET_DEVICE} * bare + copy alone = "
        f"{verdict.device_limit_us:.2f} us"
    )


def table(summary: Summary) -> Iterable[str]:
    """A row for each contender, a column for each measure."""
    names = list(next(iter(summary.values())))
    width = max(map(len, names))
    yield f"{'':{width}}  " + "  ".join(f"{MEASURES[measure]:>30}" for measure in summary)
    for name in names:
        yield f"{name:{width}}  " + "  ".join(f"{each[name]!s:>30}" for each in summary.values())


def counted(inputs: int) -> str:
    """So many inputs, in words."""
    return f"{inputs} input{'' if inputs == 1 else 's'}"
