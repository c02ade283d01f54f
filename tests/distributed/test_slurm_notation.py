import random
import time

import hostlist
import pytest

from finetune.distributed.slurm_notation import _first_host_from_slurm_nodelist, tasks_on_node
from finetune.errors import LaunchError

PREFIXES = ("n", "node", "gpu-", "c1-", "rack2_", "a.b-", "x")
SUFFIXES = ("", "-ib", "-eth0", ".cluster", "b")
NUM_LISTS = 3000
SECONDS = 30
"""Of the processor: reading takes a fraction of one. It would take minutes if it grew with the square of the length."""


def random_number_group(choose):
    """`[3]`, `[01-04,007]`: one to three parts, with or without leading zeros."""
    parts = []
    for _ in range(choose.randint(1, 3)):
        first = choose.randint(0, 120)
        width = choose.choice((0, 0, 2, 3, 5))
        last = first + choose.randint(0, 4)
        parts.append(f"{first:0{width}d}" if choose.random() < 0.4 else f"{first:0{width}d}-{last:0{width}d}")
    return f"[{','.join(parts)}]"


def random_nodelist(choose):
    """One to four names, each with up to two groups: between prefixes, one after the other, before suffixes."""
    names = []
    for _ in range(choose.randint(1, 4)):
        name = choose.choice(PREFIXES)
        for _ in range(choose.choice((0, 1, 1, 1, 2))):
            name += random_number_group(choose) + choose.choice(SUFFIXES)
        names.append(name)
    return ",".join(names)


def test_random_node_lists_are_read_as_python_hostlist_reads_them():
    choose = random.Random(20250115)
    for _ in range(NUM_LISTS):
        nodelist = random_nodelist(choose)
        hosts = hostlist.expand_hostlist(nodelist, allow_duplicates=True)
        assert _first_host_from_slurm_nodelist(nodelist) == hosts[0], nodelist


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("c[1-2]n[5-6]", "c1n5"),
        ("n[1-2]-ib,m[3-4]-eth", "n1-ib"),
        ("node[007,001-004]", "node007"),
        ("alpha,beta", "alpha"),
        (" n[9-10]\n", "n9"),
    ],
)
def test_the_forms_that_slurm_writes(nodelist, first):
    assert _first_host_from_slurm_nodelist(nodelist) == first


@pytest.mark.parametrize(
    "nodelist",
    [
        *("", " ", ",", "a,,b", "a b", "n[1-2", "n1-2]", "n]1[", "n[]"),
        *("n[a-b]", "n[3-1]", "n[1,]", "n[[1]]", "n[1-2-3]"),
    ],
)
def test_a_malformed_list_is_refused_with_what_to_do(nodelist):
    with pytest.raises(LaunchError, match=r"cannot be read.*Set MASTER_ADDR"):
        _first_host_from_slurm_nodelist(nodelist)


@pytest.mark.parametrize(
    "text", ["[" * 60_000, "]" * 60_000, "n[1-" * 30_000, "n[" + "1," * 60_000, "n[" + "9" * 90_000 + "]", "," * 90_000]
)
def test_a_long_malformed_list_is_refused_at_once(text):
    start = time.process_time()
    with pytest.raises(LaunchError) as caught:
        _first_host_from_slurm_nodelist(text)
    taken = time.process_time() - start
    assert taken < SECONDS
    assert len(str(caught.value)) < 1000


def test_a_long_list_is_read_at_once():
    text = ",".join(f"n[{number}-{number + 1},{number + 7}]x" for number in range(6_000))
    start = time.process_time()
    assert _first_host_from_slurm_nodelist(text) == "n0x"
    taken = time.process_time() - start
    assert taken < SECONDS


@pytest.mark.parametrize(
    ("counts", "of_each_node"),
    [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("4,2(x2)", [4, 2, 2]), ("1(x1)", [1]), ("3,1,2", [3, 1, 2])],
)
def test_tasks_are_counted_node_by_node(counts, of_each_node):
    assert [tasks_on_node(counts, node) for node in range(len(of_each_node))] == of_each_node
    assert tasks_on_node(counts, len(of_each_node)) is None


@pytest.mark.parametrize("counts", ["", "x", "2(3)", "2(x)", "-1"])
def test_counts_that_cannot_be_read_say_nothing(counts):
    assert tasks_on_node(counts, 0) is None
