"""The files in recipes/launch/: those for accelerate on one node start as many ranks as they say.

Those for Slurm are run in tests/slurm/, those for Kubernetes and SkyPilot in tests/test_cloud_files.py, and the one of
accelerate for several nodes in tests/distributed/test_two_nodes.py.
"""

import json

import pytest

from tests.launches import REPOSITORY, run_launched

FOLDER = REPOSITORY / "recipes" / "launch"
SCRIPT = REPOSITORY / "tests" / "slurm" / "report_place.py"


@pytest.mark.slow
@pytest.mark.warm
@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("accelerate_cpu.yaml", []),
        ("accelerate_sharded.yaml", []),
        ("accelerate_one_node.yaml", ["--num_processes", "2"]),
    ],
)
def test_accelerate_starts_two_ranks_that_meet(tmp_path, file, options):
    words = ["-m", "accelerate.commands.launch", "--config_file", FOLDER / file, *options, SCRIPT, tmp_path]
    done = run_launched("python", words)
    assert done.returncode == 0, done.stdout
    reports = [json.loads(report.read_text()) for report in sorted(tmp_path.glob("rank-*.json"))]
    assert [(each["launcher"], each["rank"], each["ranks_met"]) for each in reports] == [
        ("accelerate", 0, 3),
        ("accelerate", 1, 3),
    ]


def test_the_table_names_every_file_and_no_other():
    table = (FOLDER / "README.md").read_text().splitlines()
    named = [line.split("`")[1] for line in table if line.startswith("| `")]
    assert sorted(named) == sorted(path.name for path in FOLDER.iterdir() if path.name != "README.md")
