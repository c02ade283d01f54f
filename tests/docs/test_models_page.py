"""The table of docs/models.md is what the record says, and the record has each family of the presets."""

from __future__ import annotations

from finetune.config.compose import compose
from finetune.config.listing import list_configs
from finetune.diagnose.family import PROMISES
from finetune.model.published import published_sizes
from tools.families import BEGIN, END, FAMILIES, PAGE, read_record, table


def test_the_table_is_what_the_record_says() -> None:
    records = read_record()
    assert list(records) == list(FAMILIES.values())
    page = PAGE.read_text(encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0] == "".join(table(records))
    for name, record in records.items():
        assert [promise["name"] for promise in record["promises"]] == list(PROMISES), name


def test_each_model_type_of_the_presets_is_in_the_record() -> None:
    presets = [compose([f"model={name}"], complete=False).model for name, _ in list_configs()["model"]]
    types = {sizes.sizes["model_type"] for section in presets if (sizes := published_sizes(section)) is not None}
    assert types <= {record["model_type"] for record in read_record().values()}
