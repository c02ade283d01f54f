"""The code prints each message of the troubleshooting page, exactly as on the page."""

from __future__ import annotations

import pytest

from tests.docs.messages import MAKERS
from tests.docs.pages import DOCS, marked_blocks

PAGE = DOCS / "troubleshooting.md"
MESSAGES = {block.more: " ".join(block.text.split()) for block in marked_blocks(PAGE) if block.marker == "message"}


def test_every_message_of_the_page_is_made_here_and_the_other_way_round():
    assert MESSAGES.keys() == MAKERS.keys()
    assert len(MESSAGES) == len([block for block in marked_blocks(PAGE) if block.marker == "message"])


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_stands_on_the_page_as_it_is_printed(name, tmp_path, monkeypatch):
    assert MESSAGES[name] in MAKERS[name](tmp_path, monkeypatch)


def test_every_topic_has_its_message():
    headings = {line.strip("# ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("###")}
    assert headings >= {
        "The port is in use",
        "The process group is not initialised",
        "Slurm: srun is missing",
        "Training continues without DDP",
        "Only one GPU is used",
        "device_ids has the wrong type",
        "Out of memory",
        "At a barrier, in the middle of a run",
    }
