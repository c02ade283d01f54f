"""Shipped folders are found in a checkout and in a wheel; shipped assets by name."""

import pytest

from finetune.config import config_files
from finetune.config.config_files import resolve_shipped, shipped_folder
from finetune.errors import ConfigError


def test_in_a_wheel_the_packages_own_folder_wins(tmp_path, monkeypatch):
    package = tmp_path / "finetune"
    monkeypatch.setattr(config_files, "PACKAGE", package)
    with pytest.raises(ConfigError, match=r"no configs/ folder\. Install"):
        shipped_folder("configs")
    (tmp_path / "configs").mkdir()
    assert shipped_folder("configs") == tmp_path / "configs"
    (package / "shipped" / "configs").mkdir(parents=True)
    assert shipped_folder("configs") == package / "shipped" / "configs"


def test_assets_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(config_files, "PACKAGE", tmp_path)
    with pytest.raises(ConfigError, match="There is: nothing"):
        resolve_shipped("shipped:orders")
    for name in ("orders", "phi_tiny", "__pycache__", ".hidden"):
        (tmp_path / "assets" / name).mkdir(parents=True)
    assert resolve_shipped("shipped:phi_tiny") == str(tmp_path / "assets" / "phi_tiny")
    for wrong in ("shipped:phi4", "shipped:", "shipped:../assets/orders", "shipped:__pycache__", "shipped:.hidden"):
        with pytest.raises(ConfigError) as caught:
            resolve_shipped(wrong)
        assert str(caught.value) == (
            f"{wrong} is not shipped with this package. There is: shipped:orders, shipped:phi_tiny."
        )
