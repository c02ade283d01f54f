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
