"""Fixtures that several rooms' tests share."""

from pathlib import Path

import pytest

from headrace.checkpoint import open_checkpoint


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file: from the cache, fetched once where it is not there."""
    return open_checkpoint().path
