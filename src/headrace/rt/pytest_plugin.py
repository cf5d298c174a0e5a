"""Runs every test marked `interpreter` in Triton's interpreter, under the race detector.

A marked test fails if a launch in it has a race, or touches a byte from several lanes without a
barrier, or if it launches nothing at all. Arguments of the marker:

* ``lanes=False``: warnings about lanes do not fail the test.
* ``detector=False``: the test uses a detector of its own.

A test that takes the fixture `race_detector` gets the detector that watches it.

Compiling needs the interpreter off. Triton looks once, when it is first imported, so one process
does one or the other: tests that compile do so in a process of their own (headrace.ops.aot), and
`-m gpu` leaves the interpreter off.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from headrace.rt.detector import Detector

if TYPE_CHECKING:
    from collections.abc import Generator

_detector = pytest.StashKey[Detector]()
_totals = pytest.StashKey[list[int]]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Switch the interpreter on before anything imports Triton."""
    config.stash[_totals] = [0, 0, 0]
    words = str(config.getoption("markexpr", "")).split()
    selects_gpu = any(
        word == "gpu" and (place == 0 or words[place - 1] != "not")
        for place, word in enumerate(words)
    )
    if not selects_gpu and "triton" not in sys.modules:
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give each marked test a detector."""
    marker = item.get_closest_marker("interpreter")
    if marker is None:
        return
    unknown = set(marker.kwargs) - {"lanes", "detector"}
    if marker.args or unknown:
        pytest.fail(f"the marker interpreter takes lanes= and detector=, not {sorted(unknown)}")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail("TRITON_INTERPRET is not 1; run kernel tests without -m gpu")
    if marker.kwargs.get("detector", True):
        item.stash[_detector] = Detector()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Watch the test's launches and fail it for what they did."""
    detector = item.stash.get(_detector, None)
    marker = item.get_closest_marker("interpreter")
    if detector is None or marker is None:
        return (yield)
    with detector:
        result = yield
    totals = item.config.stash[_totals]
    for place, count in enumerate(
        (len(detector.launches), detector.num_accesses, len(detector.reports))
    ):
        totals[place] += count
    detector.assert_clean(lanes=marker.kwargs.get("lanes", True))
    if detector.num_accesses == 0:
        pytest.fail("the race detector saw no access; a kernel test must launch its kernel")
    return result


@pytest.fixture
def race_detector(request: pytest.FixtureRequest) -> Detector:
    """The detector that watches this test."""
    detector: Detector | None = request.node.stash.get(_detector, None)
    assert detector is not None, "race_detector needs the marker interpreter"
    return detector


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say how much was checked; a number that falls is a hole."""
    launches, accesses, reports = config.stash[_totals]
    if launches:
        terminalreporter.write_line(
            f"kernel race detector: {launches} launches, {accesses} accesses, {reports} reports"
        )
