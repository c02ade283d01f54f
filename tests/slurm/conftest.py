"""One cluster for all tests here."""

import os
import tempfile
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, reason_against


@pytest.fixture(scope="session")
def cluster():
    reason = reason_against()
    if reason is not None:
        pytest.skip(reason)
    # Munge refuses a socket below a folder that only its owner may enter, so this is none of tempfile's own.
    cluster = Cluster(Path(tempfile.gettempdir()) / f"finetune-slurm-{os.getpid()}")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
