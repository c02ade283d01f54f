"""The documentation builds without a warning, holds what the code has, and fetches nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html import unescape
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, REPOSITORY

sys.path.insert(0, str(DOCS / "generate"))
from commands import all_commands
from configuration import configuration_page
from sources import missing_paths, named_paths, with_links

needs_mkdocs = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
    reason='the site is built with: pip install -e ".[docs]"',
)
_FETCHED = re.compile(
    r"""<(?:script|img|iframe)\b[^>]*\bsrc=["']?(?:https?:)?//|<link\b[^>]*\bhref=["']?(?:https?:)?//"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # A proxy that answers to nobody: what asked the network would fail, and be a warning.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=REPOSITORY,
        env={**os.environ, **nowhere},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr + done.stdout
    return folder


def text_of(page: Path) -> str:
    return unescape(re.sub("<[^>]*>", "", page.read_text(encoding="utf-8")))


@pytest.mark.slow
@needs_mkdocs
def test_the_site_is_complete_and_a_reader_fetches_nothing_from_elsewhere(site):
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS)).with_suffix(".html").is_file()
    listed = (site / "llms.txt").read_text(encoding="utf-8")
    assert listed.startswith("# finetune\n\n> Fine-tune Phi models on your own chats")
    assert "- [See it work](quickstart.html): See it work: two minutes, no GPU\n" in listed
    links = re.findall(r"^- \[.+?\]\(([^#)]+)(?:#([^)]+))?\): \w", listed, re.MULTILINE)
    in_first_paragraph = 1
    assert len(links) + in_first_paragraph == (DOCS / "index.md").read_text(encoding="utf-8").count(".md")
    assert all(f'id="{part}"' in (site / page).read_text(encoding="utf-8") for page, part in links if part)
    assert all((site / page).is_file() for page, _ in links)
    python = text_of(site / "reference/python.html")
    import finetune

    for name in finetune.__all__:
        assert name == "__version__" or name in python
    assert "Minutes that ranks wait for each other" in text_of(site / "reference/configuration.html")
    assert "--no-modelfile" in text_of(site / "reference/commands.html")
    assert "def test_" in text_of(site / "source/tests/test_one_curve.py.html")
    assert "gradient_accumulation_steps" in text_of(site / "migrating.html")
    assert not (site / "generate").exists()
    # site.css wraps the lines of commands by this class, so that none is cut.
    assert '<div class="language-bash highlight">' in (site / "index.html").read_text(encoding="utf-8")

    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    assert [page for page in pages if _FETCHED.search(page.read_text(encoding="utf-8"))] == []
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?https?:|@import", sheet.read_text(encoding="utf-8")), sheet


def test_the_configuration_page_has_every_key():
    from finetune.config.schema import Config

    page = configuration_page()
    for name, field in Config.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        for key in [f"{name}.{it}" for it in inner] if inner else [name]:
            row = re.search(rf"^\|[^|]*`{re.escape(key)}` \| (.+?) \| (.+?) \| (.{{8,}}) \|$", page, re.MULTILINE)
            assert row is not None, f"{key} has no row, or no meaning"
    assert "`training.max_steps` | whole number above 0, or null | `null` |" in page
    assert "`lora.dropout` | number at least 0 and below 1 | `0.0` |" in page
    assert "`parallel.backend` | `auto`, `nccl`, `gloo` | `auto` |" in page


def test_the_commands_page_has_every_command():
    import typer.main
    from commands import commands_page

    from finetune.cli.commands import app

    page = commands_page()
    names = [path for path, _ in all_commands(typer.main.get_command(app), "finetune")]
    assert "finetune config show" in names
    for name in names:
        assert f"\n## {name}\n" in page
    assert "`--max-new-tokens" in page


def test_a_page_that_names_a_file_links_it_and_a_dead_one_is_found():
    text = "See `tests/conftest.py`, `tests/crash` and `tests/gone.py`.\n\n```\n`tests/other.py`\n```\n"
    assert named_paths(text) == {"tests/conftest.py", "tests/crash", "tests/gone.py"}
    assert missing_paths(text) == ["tests/gone.py"]
    linked = with_links(text, "tasks/slurm.md")
    assert "[`tests/conftest.py`](../source/tests/conftest.py.md)" in linked
    assert "```\n`tests/other.py`\n```" in linked
