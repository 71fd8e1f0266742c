"""How many cores this process may use."""

import os
from pathlib import Path


def usable_cores() -> int:
    """Cores of the affinity mask, fewer where a cgroup grants less CPU time; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _cgroup_cores()
    limit = cores or 1
    return max(1, min(limit, quota) if quota is not None else limit)


def _cgroup_cores() -> int | None:
    """The CPU quota of the process's control group (v2, else v1), rounded up to whole cores."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        base = Path("/sys/fs/cgroup/cpu")
        try:
            quota = (base / "cpu.cfs_quota_us").read_text()
            period = (base / "cpu.cfs_period_us").read_text()
        except OSError:
            return None
    if quota.strip() in ("max", "-1"):
        return None
    return -(-int(quota) // int(period))
