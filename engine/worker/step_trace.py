"""A trace of steps by torch's profiler: what ran on the host and on the device, and when. Knows no step."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class StepTrace:
    """Records from its making to `write`. One at a time in a process."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def write(self, path: Path) -> None:
        """Stop recording and write a Chrome trace. Takes seconds; raises OSError."""
        self._profile.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=False)  # the exporter tells of a file that it cannot write on stderr only
        self._profile.export_chrome_trace(str(path))
